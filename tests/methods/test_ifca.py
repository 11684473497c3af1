"""IFCA against Algorithm 1 (model averaging) in plain PyTorch: k modules, a loop over them per client."""

import copy
import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from apiece import ApieceError, Params, Recipe, Round, Task, tree
from apiece.engines.base import Engine
from apiece.engines.sequential import Sequential
from apiece.engines.vectorized import Vectorized
from apiece.evaluate import models
from apiece.methods.fedavg import FedAvg
from apiece.methods.ifca import IFCA, Clusters
from apiece.train import Training
from tests.methods.test_feddf import personal_batches, rows_of
from tests.worlds import CPU, cohort_shards, dropout_net, federation, servers

ENGINES = [Sequential(CPU), Vectorized(CPU, 8)]
SIZES = (7, 23, 0, 12, 16, 1, 9)
COHORT, ROUNDS, K = 4, 3, 3
LOCAL = Recipe(lr=0.3, batch_size=5, epochs=2)
MODEL = 5 * 7 + 7 + 7 * 3 + 3  # numbers in `net`


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


class Plain(NamedTuple):
    clusters: list[nn.Module]
    choice: dict[int, int]  # of the clients met, those with examples
    votes: list[float]


def best(clusters: list[nn.Module], x: Tensor, y: Tensor) -> int:
    losses = [F.cross_entropy(theta(x), y).item() for theta in clusters]
    return losses.index(min(losses))


def trained(start: nn.Module, batches: list[Tensor], lr: float, x: Tensor, y: Tensor) -> nn.Module:
    theta = copy.deepcopy(start)
    step = torch.optim.SGD(theta.parameters(), lr=lr)
    for rows in batches:
        step.zero_grad()
        F.cross_entropy(theta(x[rows]), y[rows]).backward()
        step.step()
    return theta


def algorithm_1(training: Training, start: Clusters) -> Iterator[Plain]:
    data = training.federation.data
    clusters = [net() for _ in range(K)]
    for j, theta in enumerate(clusters):
        theta.load_state_dict({name: t[j] for name, t in start.theta.items()})
    choice: dict[int, int] = {}
    votes = [0.0] * K
    for t in range(ROUNDS):
        answers: list[list[tuple[int, nn.Module]]] = [[] for _ in range(K)]
        for i, shard in cohort_shards(training, t):
            own = torch.as_tensor(data.train[i])
            if len(own):
                choice[i] = best(clusters, data.x[own], data.y[own])
                theta = trained(clusters[choice[i]], rows_of(shard, LOCAL), LOCAL.lr, data.x, data.y)
                answers[choice[i]].append((len(own), theta))
        everybody = sum(n for chosen in answers for n, _ in chosen)
        for j, chosen in enumerate(answers):
            total = sum(n for n, _ in chosen)
            votes[j] += total / everybody
            if chosen:
                with torch.no_grad():
                    for name, p in clusters[j].named_parameters():
                        p.copy_(
                            torch.stack([n / total * theta.get_parameter(name) for n, theta in chosen]).sum(0)
                        )
        yield Plain(copy.deepcopy(clusters), dict(choice), list(votes))


def assert_close(ours: Params, theirs: nn.Module) -> None:
    for name, p in theirs.named_parameters():
        torch.testing.assert_close(ours[name], p.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: e.name)
@pytest.mark.parametrize("epochs", [0, 2], ids=["deployed as it is", "fine-tuned"])
def test_equals_algorithm_1(epochs: int, engine: Engine) -> None:
    """Every cluster, every choice and the votes, round by round; then everybody's models.

    Four of seven take part at a time; one has no examples and never chooses.
    """
    method = IFCA(K, LOCAL, Recipe(epochs=epochs, lr=0.1))
    training, server = federation(method, engine, SIZES, COHORT, net)
    f, everyone = training.federation, list(range(len(SIZES)))
    expected = list(algorithm_1(training, server))
    # Two clusters are chosen, one is never; client 2 has no examples, 3 comes last.
    assert expected[-1].choice == {0: 0, 4: 2, 6: 2, 1: 2, 5: 0, 3: 2}

    for plain, after in zip(expected, servers(training, server, ROUNDS), strict=True):
        for j, theta in enumerate(plain.clusters):
            assert_close(tree.take(after.theta, j), theta)
        torch.testing.assert_close(after.votes, torch.tensor(plain.votes))
        broadcast = training.broadcast(after, ROUNDS)
        states = f.states(engine, broadcast, everyone).cluster.tolist()
        assert states == [plain.choice.get(i, -1) for i in everyone]

    popular = plain.votes.index(max(plain.votes))
    for i, (initial, personalized) in enumerate(models(engine, f, broadcast, everyone, ROUNDS)):
        own = torch.as_tensor(f.data.train[i])
        last = plain.choice.get(i, popular)
        assert_close(initial, plain.clusters[last])
        deployed = best(plain.clusters, f.data.x[own], f.data.y[own]) if len(own) else last
        batches = personal_batches(training, i, Recipe(batch_size=5, epochs=epochs))
        assert_close(personalized, trained(plain.clusters[deployed], batches, 0.1, f.data.x, f.data.y))


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: e.name)
def test_one_cluster_is_fedavg(engine: Engine) -> None:
    """The server and everybody's models, with dropout."""
    ends = []
    for method in (IFCA(1, LOCAL, Recipe(epochs=2)), FedAvg(LOCAL)):
        training, server = federation(method, engine, SIZES, COHORT, dropout_net)
        after = list(servers(training, server, ROUNDS))[-1]
        broadcast = training.broadcast(after, ROUNDS)
        found = models(engine, training.federation, broadcast, list(range(len(SIZES))), ROUNDS)
        params = tree.take(after.theta, 0) if isinstance(after, Clusters) else after.params
        ends.append((params, found))
    for a, b in zip(*map(tree.leaves, ends), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_the_first_cluster_is_the_start_and_the_others_are_drawn() -> None:
    task = Task(net)
    start = task.init(1)
    server, again, other = (IFCA(3).init(task, start, key) for key in (5, 5, 6))
    assert all(torch.equal(server.theta[name][0], start[name]) for name in start)
    assert all(torch.equal(server.theta[name], again.theta[name]) for name in start)
    for name in start:
        a, b, c = server.theta[name]
        assert not torch.equal(a, b)
        assert not torch.equal(b, c)
        assert not torch.equal(b, other.theta[name][1])


def test_a_cluster_that_nobody_chose_stays_bit_for_bit() -> None:
    training, server = federation(IFCA(K, LOCAL), Vectorized(CPU, 8), SIZES, COHORT, net)
    for after in servers(training, server, ROUNDS):
        assert after.votes[1] == 0.0
        assert all(torch.equal(after.theta[name][1], server.theta[name][1]) for name in server.theta)
        assert not any(torch.equal(after.theta[name][2], server.theta[name][2]) for name in server.theta)


def test_one_model_goes_up_and_k_go_down() -> None:
    training, server = federation(IFCA(K, LOCAL), Sequential(CPU), SIZES, COHORT, net)
    broadcast = training.broadcast(server, 0)
    assert training.shapes.of(broadcast).bytes_up == 4 * (MODEL + K)
    assert tree.nbytes(broadcast) == 4 * K * MODEL + 8


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: e.name)
def test_a_lost_reply_neither_votes_nor_chooses(engine: Engine) -> None:
    """Client 4's examples are NaN: of clients 0, 2, 4 and 6 in round 0, only the first and the last count."""
    training, server = federation(IFCA(K, LOCAL), engine, SIZES, COHORT, net)
    f = training.federation
    x = f.data.x.clone()
    x[f.data.train[4]] = torch.nan
    poisoned = dataclasses.replace(f, data=dataclasses.replace(f.data, x=x))
    (after,) = servers(dataclasses.replace(training, federation=poisoned), server, 1)
    torch.testing.assert_close(after.votes, torch.tensor([7 / 16, 0.0, 9 / 16]))
    assert all(t.isfinite().all() for t in after.theta.values())
    states = poisoned.states(engine, training.broadcast(after, 1), [0, 2, 4, 6])
    assert states.cluster.tolist() == [0, -1, -1, 2]


def test_before_anybody_has_voted_a_newcomer_gets_the_start() -> None:
    task, method = Task(net), IFCA(K)
    start = task.init(1)
    broadcast = method.broadcast(method.init(task, start, 0), Round(0, 0, 1, 1, 1))
    client = method.init_client(task, broadcast, start, torch.zeros((), dtype=torch.int64))
    assert all(torch.equal(method.initial(task, broadcast, client)[name], start[name]) for name in start)


def test_what_it_refuses() -> None:
    with pytest.raises(ApieceError, match="clusters must be at least 1"):
        IFCA(clusters=0)
