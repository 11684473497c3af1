"""Per-FedAvg against a plain loop of Algorithm 1, exact Hessian products, and the batches it really draws."""

from itertools import combinations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from apiece import ApieceError, Batch, Dropout, Model, Params, Recipe, Shard, Task, check_method, random
from apiece.engines.base import Engine
from apiece.engines.sequential import Sequential
from apiece.engines.vectorized import Vectorized
from apiece.evaluate import models
from apiece.methods.per_fedavg import PerFedAvg
from apiece.methods.reptile import Reptile
from apiece.shard import Rows
from tests.worlds import CPU, cohort_shards, federation, servers

SIZES = (7, 23, 1, 0, 12)
ENGINES = [Sequential(CPU), Vectorized(CPU, 8)]
Vector = dict[str, Tensor]


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))


def slope(model: nn.Module, at: Vector, x: Tensor, y: Tensor) -> Vector:
    leaves = {k: v.detach().requires_grad_() for k, v in at.items()}
    with torch.enable_grad():
        loss = F.cross_entropy(functional_call(model, leaves, (x,)), y)
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


def moved(at: Vector, by: float, along: Vector) -> Vector:
    return {k: v + by * along[k] for k, v in at.items()}


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: e.name)
@pytest.mark.parametrize("support", [1.0, 0.8])
@pytest.mark.parametrize("hessian", ["fo", "hf"])
def test_equals_a_plain_loop(engine: Engine, hessian: str, support: float) -> None:
    """Three rounds of three of five clients; the mean is unweighted and without those that have no query.

    A client of one example has none left for it.
    """
    alpha, beta, delta = 0.4, 0.2, 0.05
    local = Recipe(lr=beta, batch_size=5, epochs=2)
    method = PerFedAvg(alpha, hessian, delta, support, local)
    training, start = federation(method, engine, SIZES, 3, net)
    model, data = net(), training.federation.data
    w = {k: v.clone() for k, v in start.params.items()}
    counted, server = [], start

    def gradient(at: Vector, batch: Batch) -> Vector:
        rows = batch.x[batch.weight > 0]
        return slope(model, at, data.x[rows], data.y[rows])

    for index, after in enumerate(servers(training, start, 3)):
        ends = []
        for _, shard in cohort_shards(training, index):
            S, Q = (shard, shard) if support == 1.0 else shard.split(support)
            if not Q.size:
                continue
            at = w
            for D in S.batches(5, 2):
                D1, D2 = (
                    next(of.at(random.fold(D.key, name)).batches(5, steps=1))
                    for name, of in (("D′", Q), ("D″", S))
                )
                v = gradient(moved(at, -alpha, gradient(at, D)), D1)
                direction = v
                if hessian == "hf":
                    ahead, behind = (gradient(moved(at, by, v), D2) for by in (delta, -delta))
                    direction = {k: v[k] - alpha * (ahead[k] - behind[k]) / (2 * delta) for k in v}
                at = moved(at, -beta, direction)
            ends.append(at)
        counted.append(len(ends))
        w = {k: torch.stack([end[k] for end in ends]).mean(0) for k in w}
        for k in w:
            torch.testing.assert_close(after.params[k], w[k], rtol=1e-5, atol=5e-6)
        server = after
    assert min(counted) < 3

    with torch.no_grad():
        pairs = models(engine, training.federation, training.broadcast(server, 3), [0, 1, 2, 3, 4], 3)
    for client, (initial, personalized) in enumerate(pairs):
        rows = sum(SIZES[:client]) + torch.arange(SIZES[client])  # as `ragged` numbers them
        step = slope(model, w, data.x[rows], data.y[rows]) if len(rows) else {k: 0.0 * w[k] for k in w}
        for k in w:
            assert torch.equal(initial[k], server.params[k])
            torch.testing.assert_close(personalized[k], w[k] - alpha * step[k], rtol=1e-5, atol=5e-6)


def one_client(size: int) -> Shard:
    draw = torch.Generator().manual_seed(4)
    x = torch.randn(size, 5, generator=draw, dtype=torch.float64)
    y = torch.randint(3, (size,), generator=draw)
    return Shard(x, y, Rows(torch.arange(size), torch.tensor(size), random.as_key(3), random.as_key(4)), True)


def logistic() -> nn.Module:
    return nn.Linear(5, 3).double()


def error_of_product(delta: float) -> float:
    """‖Hv found − Hv‖ / ‖Hv‖ of one step on the whole shard: w₁ = w − β(v − αHv)."""
    task, data = Task(logistic), one_client(21)
    alpha, beta, w = 0.5, 0.1, task.init(1)
    local = Recipe(lr=beta, batch_size=0, steps=1)
    reply = PerFedAvg(alpha, "hf", delta, local=local).client_update(task, Model(w), (), data)
    model, at = logistic(), dict(w)
    v = slope(model, moved(at, -alpha, slope(model, at, data._x, data._y)), data._x, data._y)
    leaves = {k: p.clone().requires_grad_() for k, p in at.items()}
    loss = F.cross_entropy(functional_call(model, leaves, (data._x,)), data._y)
    first = torch.autograd.grad(loss, list(leaves.values()), create_graph=True)
    product = sum((g * v[k]).sum() for k, g in zip(leaves, first, strict=True))
    assert isinstance(product, Tensor)
    exact = Params(dict(zip(leaves, torch.autograd.grad(product, list(leaves.values())), strict=True)))
    found = (reply.update / beta + Params(v)) / alpha
    return float(((found - exact).sqnorm() / exact.sqnorm()).sqrt())


def test_hessian_free_is_the_exact_product_in_the_limit() -> None:
    """Logistic regression in float64. Central differences err by O(δ²): half the δ, a quarter of it."""
    assert error_of_product(PerFedAvg.delta) < 1e-3
    assert error_of_product(0.2) / error_of_product(0.1) == pytest.approx(4, rel=0.05)


class Recording(Task):
    """Notes every batch whose objective is asked for."""

    def objective(self, params: Params, batch: Batch) -> Tensor:
        SEEN.append(batch)
        return super().objective(params, batch)


SEEN: list[Batch] = []


def draws(hessian: str, key: int, local: Recipe) -> list[list[Batch]]:
    """The batches of each step, on a client of 40 examples whose x are their numbers."""
    SEEN.clear()
    task = Recording(lambda: nn.Sequential(nn.Linear(1, 3), Dropout(0.5)))
    rows = Rows(torch.arange(40), torch.tensor(40), random.as_key(key), random.as_key(4))
    data = Shard(torch.arange(40.0)[:, None], torch.zeros(40, dtype=torch.int64), rows, True)
    PerFedAvg(1e-4, hessian, local=local).client_update(task, Model(task.init(0)), (), data)
    calls = 4 if hessian == "hf" else 2
    assert len(SEEN) % calls == 0
    return [SEEN[i : i + calls] for i in range(0, len(SEEN), calls)]


def test_the_three_batches_of_a_step_are_drawn_independently() -> None:
    """Ten of 40 examples each; two independent draws share 10·10/40 = 2.5 on average.

    Over 100 steps the mean of that hypergeometric (variance 1.44) has a standard error of 0.12.
    """
    steps = draws("hf", 1, Recipe(lr=1e-4, batch_size=10, steps=100))
    assert len(steps) == 100
    examples = [[set(batch.x[:, 0].tolist()) for batch in step] for step in steps]
    for batches, (D, D1, D2, again) in zip(steps, examples, strict=True):
        assert len(D) == len(D1) == len(D2) == 10
        assert again == D2
        assert torch.equal(batches[2].key, batches[3].key)  # one dropout mask for both ends of a difference
        assert len({int(batch.key) for batch in batches}) == 3
    for a, b in combinations(range(3), 2):
        shared = sum(len(step[a] & step[b]) for step in examples) / 100
        assert shared == pytest.approx(2.5, abs=0.5)
    for which in (1, 2):
        shared = sum(len(examples[t][which] & examples[t + 1][which]) for t in range(99)) / 99
        assert shared == pytest.approx(2.5, abs=0.5)


def test_rounds_draw_other_batches() -> None:
    one, other = (draws("fo", key, Recipe(batch_size=10, steps=5)) for key in (1, 2))
    for which in (0, 1):
        assert all(not torch.equal(a[which].x, b[which].x) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("hessian", ["fo", "hf"])
def test_without_alpha_it_trains_as_reptile(hessian: str) -> None:
    """α = 0 leaves w ← w − β∇f(w; D′): with the whole shard as batch, Reptile's rounds."""
    local, sizes = Recipe(lr=0.2, batch_size=0, epochs=3), (7, 23, 1, 12)
    ours, start = federation(PerFedAvg(0.0, hessian, local=local), Vectorized(CPU, 8), sizes, 3, net)
    reptile, same = federation(Reptile(local._replace(steps=0)), Vectorized(CPU, 8), sizes, 3, net)
    for a, b in zip(servers(ours, start, 2), servers(reptile, same, 2), strict=True):
        for name in b.params:
            torch.testing.assert_close(a.params[name], b.params[name], rtol=1e-5, atol=1e-6)


def test_clients_personalize_by_alpha() -> None:
    method = PerFedAvg(0.3, local=Recipe(lr=0.05))
    assert (method.local.lr, method.personal.lr) == (0.05, 0.3)
    assert (method.personal.batch_size, method.personal.steps) == (0, 1)
    assert PerFedAvg(0.3, personal=Recipe(lr=0.3, steps=4)).personal.steps == 4


def test_what_it_refuses() -> None:
    with pytest.raises(ApieceError, match=r"personal.lr=0.2 must be alpha=0.3"):
        PerFedAvg(0.3, personal=Recipe(lr=0.2))
    with pytest.raises(ApieceError, match="unknown hessian 'exact'"):
        PerFedAvg(hessian="exact")
    for settings in ({"alpha": -0.1}, {"delta": 0.0}):
        with pytest.raises(ApieceError, match="out of range"):
            PerFedAvg(**settings)  # type: ignore[arg-type]
    for name in ("local", "personal"):
        with pytest.raises(ApieceError, match=f"{name} must be plain gradient descent"):
            PerFedAvg(**{name: Recipe(momentum=0.9)})  # type: ignore[arg-type]


def test_hessian_free_keeps_every_rule() -> None:
    check_method(PerFedAvg(hessian="hf"))
