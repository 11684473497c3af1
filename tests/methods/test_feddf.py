"""FedDF against Algorithm 1 in plain PyTorch, which shares nothing with our code but the order of batches."""

import copy
import dataclasses
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from apiece import ApieceError, Model, Params, Recipe, Round, Shard, Task, random, tree
from apiece.data.federated import Ragged
from apiece.engines.base import Engine
from apiece.engines.sequential import Sequential
from apiece.engines.vectorized import Vectorized
from apiece.evaluate import models
from apiece.method import Stacked
from apiece.methods.fedavg import FedAvg
from apiece.methods.feddf import FedDF
from apiece.train import Training
from tests.worlds import CPU, cohort_shards, dropout_net, ragged, servers
from tests.wrappers.test_learned_aggregation import proxy, world

ENGINES = [Sequential(CPU), Vectorized(CPU, 8)]
SIZES = (9, 23, 0, 12)
COHORT, ROUNDS, EPOCHS = 3, 3, 2
CLIENTS = Recipe(lr=0.3, batch_size=5, epochs=EPOCHS)
SGD = Recipe("sgd", lr=0.5, batch_size=8, epochs=2)
ADAM = Recipe("adam", lr=0.01, batch_size=8, epochs=2, steps=7)
NOTHING = Recipe(epochs=0)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def plain(params: Params) -> nn.Module:
    model = net()
    model.load_state_dict(dict(params))
    return model


def trained(start: nn.Module, batches: list[Tensor], x: Tensor, y: Tensor) -> nn.Module:
    model = copy.deepcopy(start)
    step = torch.optim.SGD(model.parameters(), lr=0.3)
    for rows in batches:
        step.zero_grad()
        F.cross_entropy(model(x[rows]), y[rows]).backward()
        step.step()
    return model


def rows_of(shard: Shard, recipe: Recipe) -> list[Tensor]:
    """Row numbers of every batch, of a shard whose x they are."""
    return [batch.x for batch in shard.batches(recipe.batch_size, recipe.epochs or 0, recipe.steps or 0)]


def numbered(shard: Shard) -> Shard:
    return dataclasses.replace(shard, _x=torch.arange(len(shard._y)))


def personal_batches(training: Training, client: int, recipe: Recipe) -> list[Tensor]:
    f = training.federation
    rows, even = f.rows(f.data.train, [client], [client], random.fold(f.root, "personalize", ROUNDS))
    return rows_of(Shard(torch.arange(len(f.data.y)), f.data.y, tree.take(rows, 0), even), recipe)


def algorithm_1(training: Training, start: Params, distill: Recipe) -> Iterator[nn.Module]:
    """The server's model after every round."""
    data, own = training.federation.data, proxy()
    x_t = plain(start)
    for t in range(ROUNDS):
        clients = [
            (int(shard.size), trained(x_t, rows_of(shard, CLIENTS), data.x, data.y))
            for _, shard in cohort_shards(training, t)
            if int(shard.size)
        ]
        total = sum(n for n, _ in clients)
        student = copy.deepcopy(x_t)
        with torch.no_grad():
            for name, p in student.named_parameters():
                p.copy_(torch.stack([n / total * x_k.get_parameter(name) for n, x_k in clients]).sum(0))
        if distill.optimizer == "adam":
            step: torch.optim.Optimizer = torch.optim.Adam(student.parameters(), lr=distill.lr)
        else:
            step = torch.optim.SGD(student.parameters(), lr=distill.lr)
        for rows in rows_of(numbered(own).at(training.round(t).key), distill):
            d = own._x[rows]
            with torch.no_grad():
                p = torch.stack([x_k(d) for _, x_k in clients]).mean(0).softmax(-1)
            step.zero_grad()
            (p * (p / student(d).softmax(-1)).log()).sum(-1).mean().backward()
            step.step()
        x_t = student
        yield copy.deepcopy(x_t)


def assert_close(ours: Params, theirs: nn.Module, tolerance: float = 1e-5) -> None:
    for name, p in theirs.named_parameters():
        torch.testing.assert_close(ours[name], p.detach(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: e.name)
@pytest.mark.parametrize("distill", [SGD, ADAM], ids=["sgd", "adam"])
def test_equals_algorithm_1(distill: Recipe, engine: Engine) -> None:
    """The server's model round by round, and everybody's models at the end.

    Three of four take part at a time, one of them in some round without examples.
    """
    method = FedDF(local=CLIENTS, distill=distill)
    training, server = world(method, engine, COHORT, net, ragged(SIZES))
    f = training.federation
    assert 2 in {client for t in range(ROUNDS) for client, _ in cohort_shards(training, t)}
    expected = list(algorithm_1(training, server.params, distill))
    for theirs, ours in zip(expected, servers(training, server, ROUNDS), strict=True):
        assert_close(ours.params, theirs)
    found = models(engine, f, training.broadcast(ours, ROUNDS), list(range(len(SIZES))), ROUNDS)
    for client, (initial, personalized) in enumerate(found):
        assert_close(initial, theirs)
        batches = personal_batches(training, client, CLIENTS)
        assert_close(personalized, trained(theirs, batches, f.data.x, f.data.y))


def test_the_labels_of_the_proxy_are_never_read() -> None:
    """Other labels change no bit; other examples do."""
    own = proxy()
    scrambled = dataclasses.replace(own, _y=torch.full_like(own._y, -(10**9)))
    moved = proxy(poison=0.5)
    ends = []
    for of_server in (own, scrambled, moved):
        training, server = world(FedDF(local=CLIENTS, distill=SGD), of_server=of_server)
        ends.append(list(servers(training, server, 2))[-1].params)
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
    assert not any(torch.equal(ends[0][name], ends[2][name]) for name in ends[0])


def fused(method: FedDF, updates: list[Params], weights: list[float], start: Params) -> Params:
    task = Task(dropout_net, proxy=proxy())
    stacked = Stacked(tree.stack(updates), torch.tensor(weights))
    with torch.no_grad():
        after = method.server_update(task, Model(start), stacked, Round(0, 5, len(updates), 9, 99))
    return after.params


@pytest.mark.parametrize("clients", [1, 2, 5])
def test_identical_clients_are_a_fixed_point(clients: int) -> None:
    """The ensemble says what the average says: no gradient, also for a model with dropout."""
    task = Task(dropout_net)
    start, same = task.init(1), task.init(2)
    method = FedDF(distill=SGD._replace(epochs=20))
    after = fused(method, [same - start] * clients, [3.0, 1.0, 7.0, 2.0, 9.0][:clients], start)
    for name in same:
        torch.testing.assert_close(after[name], same[name], rtol=0, atol=2e-6)
    other = fused(method, [same - start] * clients + [start.zeros()], [1.0] * (clients + 1), start)
    average = (clients * same + start) / (clients + 1)
    assert float((other - average).sqnorm()) > 1e-3


def test_lost_replies_are_neither_averaged_nor_in_the_ensemble() -> None:
    """A lost reply is a row of zeros of weight 0: the model that was sent must not vote."""
    task = Task(dropout_net)
    start, method = task.init(1), FedDF(distill=SGD)
    a, b, lost = task.init(2) - start, task.init(3) - start, start.zeros()
    clean = fused(method, [a, b], [3.0, 5.0], start)
    holes = fused(method, [lost, a, lost, b], [0.0, 3.0, 0.0, 5.0], start)
    for name in clean:
        torch.testing.assert_close(holes[name], clean[name], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: e.name)
def test_a_client_whose_reply_is_not_finite_changes_nothing_but_its_absence(engine: Engine) -> None:
    """Its examples are NaN: the round ends as if it had none."""
    data = ragged(SIZES)
    x = data.x.clone()
    x[data.train[1]] = torch.nan
    poisoned = dataclasses.replace(data, x=x)
    nobody = data.train[1][:0]
    absent = dataclasses.replace(
        data, train=Ragged.of([nobody if i == 1 else data.train[i] for i in range(len(SIZES))])
    )
    ends = []
    for own in (poisoned, absent):
        training, server = world(FedDF(local=CLIENTS, distill=SGD), engine, len(SIZES), net, own)
        ends.append(next(servers(training, server, 1)).params)
    for name in ends[0]:
        torch.testing.assert_close(ends[0][name], ends[1][name], rtol=1e-6, atol=1e-6)


def test_without_distillation_it_is_fedavg() -> None:
    ends = []
    for method in (FedDF(local=CLIENTS, distill=NOTHING), FedAvg(local=CLIENTS)):
        training, server = world(method, Vectorized(CPU, 8), COHORT, dropout_net, ragged(SIZES))
        ends.append(list(servers(training, server, ROUNDS))[-1].params)
    for name in ends[0]:
        torch.testing.assert_close(ends[0][name], ends[1][name], rtol=1e-6, atol=1e-6)


def test_what_it_refuses() -> None:
    with pytest.raises(ApieceError, match="there is none"):
        FedDF().init(Task(net), Task(net).init(1), 0)
    with pytest.raises(ApieceError, match=r"distill\.lr must not be negative"):
        FedDF(distill=Recipe(lr=-1.0))
