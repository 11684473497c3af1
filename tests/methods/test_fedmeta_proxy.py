"""FedMeta with UGA against a plain loop whose steps stay in the autograd graph (create_graph=True)."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from apiece import ApieceError, Model, Params, Recipe, Round, Shard, Task, random, tree
from apiece.engines.base import Engine
from apiece.engines.sequential import Sequential
from apiece.engines.vectorized import Vectorized
from apiece.evaluate import models
from apiece.methods.fedavg import FedAvg
from apiece.methods.fedmeta_proxy import FedMetaProxy
from apiece.shard import Rows
from apiece.train import Training
from tests.methods.test_feddf import numbered, personal_batches, rows_of
from tests.worlds import CPU, cohort_shards, dropout_net, ragged, servers
from tests.wrappers.test_learned_aggregation import proxy, world

ENGINES = [Sequential(CPU), Vectorized(CPU, 8)]
SIZES = (9, 23, 0, 12)
COHORT, ROUNDS, ETA, ETA_G = 3, 3, 0.3, 0.7
META = Recipe(lr=0.4, batch_size=8, epochs=1)
NOTHING = Recipe(epochs=0)
Vector = dict[str, Tensor]


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


MODULE = net()


def loss(w: Vector, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(functional_call(MODULE, w, (x,)), y)


def stepped(w: Vector, lr: float, x: Tensor, y: Tensor) -> Vector:
    slopes = torch.autograd.grad(loss(w, x, y), list(w.values()), create_graph=True)
    return {name: t - lr * g for (name, t), g in zip(w.items(), slopes, strict=True)}


def leaves(w: Vector) -> Vector:
    return {name: t.detach().clone().requires_grad_() for name, t in w.items()}


def uga(w_t: Vector, trace: list[Tensor], everything: Tensor, x: Tensor, y: Tensor) -> Vector:
    """∇_{w_t} L(w_k; D_k), back through every step of the trace."""
    start = w = leaves(w_t)
    for rows in trace:
        w = stepped(w, ETA, x[rows], y[rows])
    slopes = torch.autograd.grad(loss(w, x[everything], y[everything]), list(start.values()))
    return dict(zip(start, slopes, strict=True))


def plain_rounds(training: Training, start: Params, recipe: Recipe) -> Iterator[Vector]:
    """The server's model after every round; `recipe` is that of the trace."""
    data, own = training.federation.data, proxy()
    w_t = dict(start)
    for t in range(ROUNDS):
        clients = [(int(shard.size), client, shard) for client, shard in cohort_shards(training, t)]
        total = sum(n for n, _, _ in clients)
        w = dict(w_t)
        for n, client, shard in clients:
            if n:
                everything = torch.as_tensor(data.train[client])
                g_k = uga(w_t, rows_of(shard, recipe), everything, data.x, data.y)
                w = {name: w[name] - ETA_G * n / total * g_k[name] for name in w}
        for rows in rows_of(numbered(own).at(training.round(t).key), META):
            w = stepped(leaves(w), META.lr, own._x[rows], own._y[rows])
        w_t = {name: p.detach() for name, p in w.items()}
        yield w_t


def assert_close(ours: Params, theirs: Vector, tolerance: float = 1e-5) -> None:
    for name, p in theirs.items():
        torch.testing.assert_close(ours[name], p.detach(), rtol=tolerance, atol=tolerance)


# the recipe, and that of the trace: of E epochs the last is the evaluation
TRACES = {
    "E=3": (Recipe(lr=ETA, batch_size=5, epochs=3), Recipe(batch_size=5, epochs=2)),
    "E=1": (Recipe(lr=ETA, batch_size=5, epochs=1), Recipe(batch_size=5, epochs=0)),
    "steps=4": (Recipe(lr=ETA, batch_size=5, epochs=3, steps=4), Recipe(batch_size=5, steps=4)),
}


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: e.name)
@pytest.mark.parametrize("trace", TRACES)
def test_equals_a_plain_loop(trace: str, engine: Engine) -> None:
    """The server's model round by round, and everybody's models at the end; one client has no examples."""
    local, steps = TRACES[trace]
    method = FedMetaProxy(ETA_G, local=local, personal=Recipe(epochs=2, lr=0.2), meta=META)
    training, server = world(method, engine, COHORT, net, ragged(SIZES))
    f = training.federation
    expected = list(plain_rounds(training, server.params, steps))
    for theirs, ours in zip(expected, servers(training, server, ROUNDS), strict=True):
        assert_close(ours.params, theirs)
    everybody = list(range(len(SIZES)))
    found = models(engine, f, training.broadcast(ours, ROUNDS), everybody, ROUNDS)
    for client, (initial, personalized) in enumerate(found):
        assert_close(initial, theirs)
        w = dict(theirs)
        for rows in personal_batches(training, client, Recipe(batch_size=5, epochs=2)):
            w = stepped(leaves(w), 0.2, f.data.x[rows], f.data.y[rows])
        assert_close(personalized, w)


def test_the_trace_makes_the_factor_of_a_quadratic() -> None:
    """L = ½(w − b)²: after s steps w_k − b = (1 − η)^s (w_t − b), and its slope with respect to w_t is
    (1 − η)^s · (w_k − b) = (1 − η)^2s (w_t − b). Without the trace one of the two factors is missing."""

    class Point(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.full((1,), 3.0))

        def forward(self, x: Tensor) -> Tensor:
            return self.w.expand(len(x), 1)

    task = Task(Point, losses=lambda out, y: 0.5 * (out[:, 0] - y) ** 2)
    key = random.as_key(1)
    data = Shard(
        torch.zeros(5, 1), torch.full((5,), 1.0), Rows(torch.arange(4), torch.tensor(4), key, key), True
    )
    method = FedMetaProxy(eta_g=0.5, local=Recipe(lr=0.1, batch_size=2, epochs=3))
    with torch.no_grad():
        reply = method.client_update(task, Model(task.init(0)), (), data)
    s = 2 * 2  # two batches in each of E − 1 epochs
    torch.testing.assert_close(reply.update["w"], torch.full((1,), -0.5 * 0.9 ** (2 * s) * 2.0))
    assert reply.model is not None
    torch.testing.assert_close(reply.model["w"], torch.full((1,), 1.0 + 0.9**s * 2.0))


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: e.name)
def test_without_trace_and_meta_update_it_is_fedavg(engine: Engine) -> None:
    """Bit for bit, with dropout: the server and every personalized model."""
    local = Recipe(lr=0.2, batch_size=5, epochs=2)
    ends = []
    for method in (
        FedMetaProxy(uga=False, local=local, personal=Recipe(), meta=NOTHING),
        FedAvg(local=local),
    ):
        training, server = world(method, engine, COHORT, dropout_net, ragged(SIZES))
        after = list(servers(training, server, ROUNDS))[-1]
        broadcast = training.broadcast(after, ROUNDS)
        found = models(engine, training.federation, broadcast, list(range(len(SIZES))), ROUNDS)
        ends.append((after.params, found))
    assert tree.same_structure(*ends)
    assert all(torch.equal(a, b) for a, b in zip(*map(tree.leaves, ends), strict=True))


def test_one_epoch_and_no_meta_update_are_gradient_descent_on_all_examples() -> None:
    """With everybody in the cohort: w − η_g ∇ of the loss of all examples together."""
    method = FedMetaProxy(ETA_G, local=Recipe(epochs=1), meta=NOTHING)
    training, server = world(method, Vectorized(CPU, 8), len(SIZES), net, ragged(SIZES))
    data = training.federation.data
    (after,) = servers(training, server, 1)
    assert_close(after.params, stepped(leaves(dict(server.params)), ETA_G, data.x[:-1], data.y[:-1]), 1e-6)


def test_the_meta_update_is_a_step_on_the_proxy() -> None:
    """By default one, of all of it: w + update − η_meta ∇L(w + update; D_meta)."""
    own = proxy()
    task, method = Task(net, proxy=own), FedMetaProxy()
    w, update = task.init(1), task.init(2)
    with torch.no_grad():
        after = method.server_update(task, Model(w), update, Round(0, 5, 3, 4, 44))
    assert_close(after.params, stepped(leaves(dict(w + update)), 0.1, own._x[:20], own._y[:20]), 1e-6)


def test_what_it_refuses() -> None:
    with pytest.raises(ApieceError, match="there is none"):
        FedMetaProxy().init(Task(net), Task(net).init(1), 0)
    with pytest.raises(ApieceError, match="eta_g must be positive"):
        FedMetaProxy(eta_g=0.0)
    with pytest.raises(ApieceError, match="at least 1"):
        FedMetaProxy(local=Recipe(epochs=0))
    with pytest.raises(ApieceError, match=r"meta\.lr must not be negative"):
        FedMetaProxy(meta=Recipe(lr=-1.0))
