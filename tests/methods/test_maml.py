"""MAML against plain autograd through the inner loop, and closed forms on quadratics.

`Plain`, `one_client` and `Location` also serve the tests of Meta-SGD.
"""

from collections.abc import Callable, Iterable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from apiece import ApieceError, Method, Model, Params, Recipe, Rule, Shard, Task, random
from apiece.engines.base import Engine
from apiece.engines.sequential import Sequential
from apiece.engines.vectorized import Vectorized
from apiece.evaluate import models
from apiece.methods.maml import MAML
from apiece.shard import Batch, Rows
from apiece.train import Training
from tests.worlds import CPU, cohort_shards, federation, servers

SIZES = (7, 23, 1, 0, 12, 9)
FOMAML = partial(MAML, first_order=True)
ENGINES = [Sequential(CPU), Vectorized(CPU, 8)]
Vector = dict[str, Tensor]


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))


def rows(batch: Batch) -> Tensor:
    chosen: Tensor = batch.x[batch.weight > 0]
    return chosen


class Plain:
    """FedMeta as a loop over clients: autograd, and of our code the order of the batches."""

    def __init__(self, training: Training, theta: Vector, recipe: Recipe, support: float) -> None:
        data = training.federation.data
        self.training, self.recipe, self.support = training, recipe, support
        self.x, self.y, self.model = data.x, data.y, net()
        self.theta = {k: v.clone().requires_grad_() for k, v in theta.items()}
        self.alpha = {k: torch.full_like(v, recipe.lr) for k, v in self.theta.items()}
        self.counted: list[int] = []

    def loss(self, at: Vector, chosen: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(self.model, at, (self.x[chosen],)), self.y[chosen])

    def adapted(self, batches: Iterable[Tensor], through: bool) -> Vector:
        """θ_u; `through`: as a function of θ and α that can be differentiated."""
        at = self.theta
        for chosen in batches:
            slopes = torch.autograd.grad(self.loss(at, chosen), list(at.values()), create_graph=through)
            at = {k: v - self.alpha[k] * g for (k, v), g in zip(at.items(), slopes, strict=True)}
        return at

    @torch.enable_grad()
    def set_gradients(self, index: int, through: bool, learned: list[Tensor] | None = None) -> None:
        """(1/m) Σ g_u over the clients of round `index` that have a query; `learned`: θ, or θ and α."""
        found = []
        for _, shard in cohort_shards(self.training, index):
            S, Q = shard.split(self.support)
            query = rows(Q.all())
            if len(query):
                support = S.batches(self.recipe.batch_size, self.recipe.epochs, self.recipe.steps)
                theta_u = self.adapted([rows(batch) for batch in support], through)
                by = learned or list(theta_u.values())
                found.append(torch.autograd.grad(self.loss(theta_u, query), by))
        self.counted.append(len(found))
        for p, parts in zip(learned or self.theta.values(), zip(*found, strict=True), strict=True):
            p.grad = sum(parts[1:], parts[0]) / len(found)

    def personalized(self, client: int, steps: int) -> Vector:
        """Steps on all of a client's examples, which `ragged` numbers through."""
        first = sum(SIZES[:client])
        everything = torch.arange(first, first + SIZES[client])
        return self.adapted([everything] * steps if len(everything) else [], through=False)


def personalized(training: Training, engine: Engine, server: object, after: int) -> list[Params]:
    everyone = list(range(len(SIZES)))
    with torch.no_grad():
        pairs = models(engine, training.federation, training.broadcast(server, after), everyone, after)
    return [p for _, p in pairs]


def assert_same(ours: Params, plain: Vector) -> None:
    for name, p in plain.items():
        torch.testing.assert_close(ours[name], p.detach(), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: e.name)
@pytest.mark.parametrize("batch_size", [0, 4])
@pytest.mark.parametrize("first_order", [False, True])
def test_equals_autograd_through_the_inner_loop_or_at_its_end(
    engine: Engine, batch_size: int, first_order: bool
) -> None:
    """Three rounds of four of six clients, of which two have no query and do not count; Adam."""
    local = Recipe(lr=0.3, batch_size=batch_size, steps=3)
    personal, outer = Recipe(batch_size=0, steps=4), Rule("adam", lr=0.05)
    method = MAML(local, personal, outer, support=0.6, first_order=first_order)
    training, start = federation(method, engine, SIZES, 4, net)
    plain = Plain(training, dict(start.params), method.local, 0.6)
    theta = list(plain.theta.values())
    adam = torch.optim.Adam(theta, lr=0.05)
    server = start
    for index, after in enumerate(servers(training, start, 3)):
        plain.set_gradients(index, through=not first_order, learned=theta)
        adam.step()
        assert_same(after.params, plain.theta)
        server = after
    assert min(plain.counted) < 4
    for client, ours in enumerate(personalized(training, engine, server, 3)):
        assert_same(ours, plain.personalized(client, 4))


class Location(nn.Module):
    """Outputs θ − x: with half its square as loss, L(θ, A) is a parabola around the mean of A."""

    def __init__(self) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.linspace(-1, 2, 5, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.theta - x


def location() -> Task:
    return Task(Location, losses=lambda outputs, y: 0.5 * outputs.square().sum(-1))


def one_client(size: int = 9) -> Shard:
    x = torch.randn(size, 5, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    at = Rows(torch.arange(size), torch.tensor(size), random.as_key(3), random.as_key(4))
    return Shard(x, torch.zeros(size, dtype=torch.int64), at, True)


def means(data: Shard) -> tuple[Tensor, Tensor]:
    """Of the support and of the query."""
    S, Q = (part.all() for part in data.split(0.5))
    return S.x[S.weight > 0].mean(0), Q.x[Q.weight > 0].mean(0)


@pytest.mark.parametrize("K", [1, 3])
def test_on_a_parabola_by_hand(K: int) -> None:
    """Each step halves the distance to s (α = ½): θ_u = s + (θ − s)/2^K, and dθ_u/dθ = 1/2^K.

    So g_u = (θ_u − q)/2^K. FOMAML leaves the factor out: g_u = θ_u − q.
    """
    task, data, recipe = location(), one_client(), Recipe(lr=0.5, batch_size=0, steps=K)
    theta, (s, q) = task.init(0), means(data)
    theta_u = s + (theta["theta"] - s) / 2**K
    methods: list[tuple[Method, float]] = [(MAML(recipe), 2.0**-K), (FOMAML(recipe), 1.0)]
    for method, factor in methods:
        reply = method.client_update(task, Model(theta), (), data)
        torch.testing.assert_close(reply.update["theta"], -factor * (theta_u - q))
        assert reply.model is not None
        torch.testing.assert_close(reply.model["theta"], theta_u)


def test_without_an_inner_step_it_is_the_gradient_on_the_query() -> None:
    """α = 0; FOMAML is the same then, bit for bit."""
    task, data, still = location(), one_client(), Recipe(lr=0.0, batch_size=0, steps=2)
    theta, (_, q) = task.init(0), means(data)
    reply = MAML(still).client_update(task, Model(theta), (), data)
    torch.testing.assert_close(reply.update["theta"], q - theta["theta"])
    other = FOMAML(still).client_update(task, Model(theta), (), data)
    assert torch.equal(reply.update["theta"], other.update["theta"])


@pytest.mark.parametrize("cls", [MAML, FOMAML])
@pytest.mark.parametrize("size", [0, 1])
def test_a_client_without_a_query_has_no_weight(cls: Callable[..., Method], size: int) -> None:
    task = location()
    reply = cls().client_update(task, Model(task.init(0)), (), one_client(size))
    assert float(reply.weight) == 0.0
    assert bool(reply.update["theta"].isfinite().all())


@pytest.mark.parametrize("cls", [MAML, FOMAML])
def test_what_it_refuses(cls: Callable[..., Method]) -> None:
    for recipe in (Recipe(momentum=0.9), Recipe(weight_decay=0.1), Recipe(optimizer="adam")):
        with pytest.raises(ApieceError, match="local must be plain gradient descent"):
            cls(local=recipe)
    for support in (0.0, 1.0, -0.5):
        with pytest.raises(ApieceError, match="support"):
            cls(support=support)
