"""Ditto against Algorithm 1 in plain PyTorch, which shares nothing with our code but the order of batches."""

from collections.abc import Iterable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from apiece import ApieceError, Method, Model, Params, Recipe, Shard, Task, random, tree
from apiece.data.federated import Federated
from apiece.engines.base import Engine
from apiece.engines.sequential import Sequential
from apiece.engines.vectorized import Vectorized
from apiece.evaluate import models
from apiece.methods.ditto import Ditto
from apiece.methods.fedavg import FedAvg
from apiece.methods.local import Local
from apiece.shard import Rows
from apiece.train import Training
from tests.worlds import CPU, cohort_shards, dropout_net, federation, servers

ENGINES = [Sequential(CPU), Vectorized(CPU, 8)]
SIZES = (0, 23, 9, 12, 7, 1, 16)
COHORT, ROUNDS = 3, 4
IDS = [(0, 4, 6), (1, 4, 5), (1, 3, 6), (2, 5, 6)]  # who takes part: four come back
W = Recipe(lr=0.2, batch_size=5, epochs=2)
V = Recipe(lr=0.1, batch_size=4, epochs=1)

Vector = dict[str, Tensor]


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def slope(training: Training, at: Vector, rows: Tensor) -> Vector:
    """∇f(at) on these rows of the data, f the mean cross-entropy."""
    data = training.federation.data
    leaves = {k: v.clone().requires_grad_() for k, v in at.items()}
    with torch.enable_grad():
        loss = F.cross_entropy(functional_call(net(), leaves, (data.x[rows],)), data.y[rows])
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


def minus(at: Vector, lr: float, direction: Vector) -> Vector:
    return {k: at[k] - lr * direction[k] for k in at}


def rows_of(shard: Shard, recipe: Recipe) -> list[Tensor]:
    """The rows of every batch, in order; the shard's x are row numbers."""
    if not int(shard.size):
        return []
    return [b.x[b.weight > 0] for b in shard.batches(recipe.batch_size, recipe.epochs, recipe.steps)]


def evaluation_shard(training: Training, client: int, rounds: int) -> Shard:
    """The client's shard of row numbers when it is scored after `rounds` rounds."""
    f = training.federation
    assert isinstance(f.data, Federated)
    rows, even = f.rows(f.data.train, [client], [client], random.fold(f.root, "personalize", rounds))
    return Shard(torch.arange(len(f.data.y)), f.data.y, tree.take(rows, 0), even)


def one_client(size: int) -> Shard:
    draw = torch.Generator().manual_seed(4)
    x, y = torch.randn(size, 5, generator=draw), torch.randint(3, (size,), generator=draw)
    return Shard(x, y, Rows(torch.arange(size), torch.tensor(size), random.as_key(3), random.as_key(4)), True)


def assert_deploys_what_it_replies(method: Method) -> None:
    """With `personal` as `local`, a client's own model after a round is the one it would deploy."""
    task, data, start = Task(net), one_client(9), Task(net).init(1)
    broadcast = Model(Task(net).init(2))
    client = method.init_client(task, Model(start), start, data.key)
    reply = method.client_update(task, broadcast, client, data)
    assert reply.model is not None
    assert_close(reply.model, dict(method.personalize(task, broadcast, client, data)))


def assert_close(ours: Params, plain: Vector) -> None:
    assert list(ours) == sorted(plain)
    for k, value in plain.items():
        torch.testing.assert_close(ours[k], value.detach(), rtol=1e-5, atol=2e-6)


def train(training: Training, w: Vector, batches: Iterable[Tensor], lr: float) -> Vector:
    for rows in batches:
        w = minus(w, lr, slope(training, w, rows))
    return w


def pulled(training: Training, v: Vector, w: Vector, batches: Iterable[Tensor], lam: float) -> Vector:
    """v ← v − η(∇F(v) + λ(v − w)), batch by batch."""
    for rows in batches:
        g = slope(training, v, rows)
        v = {k: v[k] - V.lr * (g[k] + lam * (v[k] - w[k])) for k in v}
    return v


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: e.name)
def test_equals_algorithm_1(engine: Engine) -> None:
    """w and every v_k, round by round; then every client's initial and personalized model.

    Three of seven take part at a time; one is without examples.
    """
    lam = 0.7
    training, server = federation(Ditto(lam, W, V), engine, SIZES, COHORT, net)
    w: Vector = dict(server.params)
    v: dict[int, Vector] = {}
    met = []
    for t, ours in enumerate(servers(training, server, ROUNDS)):
        total: Vector = {k: torch.zeros_like(p) for k, p in w.items()}
        clients = cohort_shards(training, t)
        met.append(tuple(k for k, _ in clients))
        examples = sum(int(shard.size) for _, shard in clients)
        for k, shard in clients:
            w_k = train(training, w, rows_of(shard, W), W.lr)
            v[k] = pulled(training, v.get(k, w), w, rows_of(shard, V), lam)
            total = {name: total[name] + int(shard.size) / examples * w_k[name] for name in w}
        w = total
        assert_close(ours.params, w)
        broadcast = training.broadcast(ours, t + 1)
        states = training.federation.states(engine, broadcast, range(len(SIZES)))
        for k in range(len(SIZES)):
            assert_close(tree.take(states.v, k), v.get(k, w))
    assert met == IDS

    for k, (initial, personalized) in enumerate(
        models(engine, training.federation, broadcast, list(range(len(SIZES))), ROUNDS)
    ):
        batches = rows_of(evaluation_shard(training, k, ROUNDS), V)
        assert_close(initial, v.get(k, w))
        assert_close(personalized, pulled(training, v.get(k, w), w, batches, lam))


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: e.name)
def test_without_the_pull_each_trains_alone(engine: Engine) -> None:
    """λ = 0: v_k starts from the w that the client was first sent and sees its own batches, nothing else."""
    training, server = federation(Ditto(0.0, W, V), engine, SIZES, COHORT, net)
    first: dict[int, Vector] = {}
    seen: dict[int, list[Tensor]] = {}
    for t, ours in enumerate(servers(training, server, ROUNDS)):
        for k, shard in cohort_shards(training, t):
            first.setdefault(k, dict(server.params))
            seen.setdefault(k, []).extend(rows_of(shard, V))
        server = ours
    states = training.federation.states(engine, training.broadcast(server, ROUNDS), range(len(SIZES)))
    for k, w in first.items():
        assert_close(tree.take(states.v, k), train(training, w, seen[k], V.lr))


def test_without_the_pull_and_with_everybody_it_is_local() -> None:
    """λ = 0: three rounds of two full-batch steps are Local's training of six."""
    whole = Recipe(lr=0.3, batch_size=0, epochs=2)
    engine, everyone = ENGINES[1], list(range(len(SIZES)))
    training, server = federation(Ditto(0.0, W, whole), engine, SIZES, len(SIZES), net)
    *_, last = servers(training, server, 3)
    ours = training.federation.states(engine, training.broadcast(last, 3), everyone)
    alone, start = federation(Local(personal=whole._replace(epochs=6)), engine, SIZES, COHORT, net)
    found = models(engine, alone.federation, alone.broadcast(start, 0), everyone, 0)
    for k, (_, personalized) in enumerate(found):
        assert_close(tree.take(ours.v, k), dict(personalized))


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: e.name)
def test_the_shared_model_is_fedavgs(engine: Engine) -> None:
    """Bit for bit, with dropout: what is held in v_k does not touch it."""
    ends = []
    for method in (Ditto(0.7, W, V), FedAvg(local=W)):
        training, server = federation(method, engine, SIZES, COHORT, dropout_net)
        ends.append([after.params for after in servers(training, server, ROUNDS)])
    for ours, theirs in zip(*ends, strict=True):
        assert all(torch.equal(ours[k], theirs[k]) for k in theirs)


def test_the_replys_model_is_the_personal_one() -> None:
    assert_deploys_what_it_replies(Ditto())


def test_settings_that_make_no_sense_are_refused() -> None:
    for lam in (-0.1, float("inf"), float("nan")):
        with pytest.raises(ApieceError, match="lam must be finite"):
            Ditto(lam)
    assert Ditto(local=Recipe(lr=0.3)).personal.lr == 0.3
