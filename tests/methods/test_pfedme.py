"""pFedMe against Algorithm 1 in plain PyTorch, closed forms on parabolas, and the limit of a stiff pull."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from apiece import ApieceError, Params, Recipe
from apiece.engines.base import Engine
from apiece.evaluate import models
from apiece.method import Method, Model
from apiece.methods.pfedme import PFedMe
from apiece.methods.reptile import Reptile
from apiece.train import Training
from tests.methods.test_ditto import (
    COHORT,
    ENGINES,
    IDS,
    ROUNDS,
    SIZES,
    Vector,
    assert_close,
    assert_deploys_what_it_replies,
    evaluation_shard,
    net,
    rows_of,
    slope,
)
from tests.worlds import cohort_shards, federation, servers

LOCAL = Recipe(lr=0.15, batch_size=5, epochs=2)
PERSONAL = Recipe(lr=0.1, batch_size=4, epochs=1)


def plain(
    training: Training, method: PFedMe, w: Vector, batches: list[Tensor], lr: float
) -> tuple[Vector, Vector]:
    """(w_{i,R}, the last θ̃), lines 5–9 of Algorithm 1 with gradient descent on h̃_i from w_{i,r}."""
    theta = w
    for rows in batches:
        theta = w
        for _ in range(method.inner_steps):
            g = slope(training, theta, rows)
            theta = {k: theta[k] - method.inner_lr * (g[k] + method.lam * (theta[k] - w[k])) for k in theta}
        w = {k: w[k] - lr * method.lam * (w[k] - theta[k]) for k in w}
    return w, theta


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: e.name)
def test_equals_algorithm_1(engine: Engine) -> None:
    """w round by round, then every client's θ̃; the cohorts' mean is unweighted, the empty client in it."""
    method = PFedMe(4.0, 0.1, 3, 0.6, LOCAL, PERSONAL)
    training, server = federation(method, engine, SIZES, COHORT, net)
    w: Vector = dict(server.params)
    met = []
    for t, ours in enumerate(servers(training, server, ROUNDS)):
        clients = cohort_shards(training, t)
        met.append(tuple(i for i, _ in clients))
        sent = [plain(training, method, w, rows_of(shard, LOCAL), LOCAL.lr)[0] for _, shard in clients]
        w = {k: 0.4 * w[k] + 0.6 * sum(w_i[k] for w_i in sent) / COHORT for k in w}
        assert_close(ours.params, w)
    assert met == IDS

    broadcast = training.broadcast(ours, ROUNDS)
    everyone = list(range(len(SIZES)))
    found = models(engine, training.federation, broadcast, everyone, ROUNDS)
    for i, (initial, personalized) in enumerate(found):
        batches = rows_of(evaluation_shard(training, i, ROUNDS), PERSONAL)
        assert_close(initial, w)
        assert_close(personalized, plain(training, method, w, batches, PERSONAL.lr)[1])


def test_any_optimizer_may_step_w() -> None:
    """Momentum 0.5 over two whole-shard batches: velocities e₀ and ½e₀ + e₁, e the envelope's slopes."""
    method = PFedMe(4.0, 0.1, 3, local=Recipe(lr=0.1, momentum=0.5, batch_size=0, epochs=2))
    training, server = federation(method, ENGINES[0], (9,), 1, net)
    (after,) = servers(training, server, 1)
    w0: Vector = dict(server.params)
    rows = torch.arange(9)
    theta0 = plain(training, method, w0, [rows], 0.1)[1]
    e0 = {k: 4.0 * (w0[k] - theta0[k]) for k in w0}
    w1 = {k: w0[k] - 0.1 * e0[k] for k in w0}
    theta1 = plain(training, method, w1, [rows], 0.1)[1]
    assert_close(after.params, {k: w1[k] - 0.1 * (0.5 * e0[k] + 4.0 * (w1[k] - theta1[k])) for k in w0})


class Location(nn.Module):
    """Outputs θ − x: with half its square as loss, f is a parabola of curvature 1 around the mean of x."""

    def __init__(self) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        return self.theta - x


def parabolas(method: PFedMe, sizes: tuple[int, ...]) -> tuple[Training, Model, list[Tensor]]:
    """A federation of everybody, its server, and the means m_i of the clients' examples."""
    training, server = federation(method, ENGINES[1], sizes, len(sizes), Location)
    task = replace(training.federation.task, losses=lambda out, y: 0.5 * out.square().sum(-1))
    training = replace(training, federation=replace(training.federation, task=task))
    x = training.federation.data.x
    return training, server, [x[shard.all().x].mean(0) for _, shard in cohort_shards(training, 0)]


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_one_batch_by_hand(steps: int) -> None:
    """On ½‖θ − m‖² a step multiplies θ's distance to (m + λw)/(1 + λ) by 1 − a(1 + λ), a the inner rate:
    θ̃ = w − s(w − m) with s = [1 − (1 − a(1 + λ))^K]/(1 + λ), and w moves by −ηλs(w − m).
    """
    lam, a, eta = 3.0, 0.15, 0.2
    method = PFedMe(lam, a, steps, local=Recipe(lr=eta, batch_size=0, epochs=1))
    training, server, (m,) = parabolas(method, (8,))
    w, s = server.params["theta"], (1 - (1 - a * (1 + lam)) ** steps) / (1 + lam)
    (after,) = servers(training, server, 1)
    ((_, personalized),) = models(ENGINES[1], training.federation, server, [0], 0)
    torch.testing.assert_close(after.params["theta"], w - eta * lam * s * (w - m))
    torch.testing.assert_close(personalized["theta"], w - s * (w - m))


def test_it_ends_where_the_envelopes_do() -> None:
    """All curvatures are equal: mean F_i is smallest at the plain mean of the m_i, whatever the sizes.
    The deployed θ_i lies at (m_i + λw)/(1 + λ), between the client's own m_i and w.
    """
    lam = 3.0
    method = PFedMe(lam, 0.2, 8, local=Recipe(lr=1.0, batch_size=0, epochs=1))
    training, server, m = parabolas(method, (3, 20, 9))
    *_, last = servers(training, server, 12)
    w = last.params["theta"]
    torch.testing.assert_close(w, torch.stack(m).mean(0), rtol=1e-4, atol=1e-4)
    for (_, theta), m_i in zip(models(ENGINES[1], training.federation, last, [0, 1, 2], 12), m, strict=True):
        torch.testing.assert_close(theta["theta"], (m_i + lam * w) / (1 + lam), rtol=1e-4, atol=1e-4)


class Precise(nn.Module):
    """64-bit: λ(w − θ̃) is a difference of nearly equal numbers, times λ."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = net().double()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x.double())
        return out


def end(method: Method) -> Params:
    training, server = federation(method, ENGINES[1], SIZES, COHORT, Precise)
    *_, last = servers(training, server, 3)
    params: Params = last.params
    return params


@pytest.mark.parametrize("steps", [1, 3])
def test_a_stiff_pull_is_plain_sgd(steps: int) -> None:
    """λ → ∞ with the inner rate 1/(1 + λ): the first inner step gives w − θ̃ = ∇f(w)/(1 + λ), the others
    change it by O(1/λ²). So w ← w − ηλ(w − θ̃) = w − η∇f(w) + O(1/λ), whatever K: plain SGD, and its
    unweighted mean, which is Reptile's.
    """
    sgd = end(Reptile(local=LOCAL))

    def gap(lam: float) -> float:
        return float((end(PFedMe(lam, 1 / (1 + lam), steps, local=LOCAL)) - sgd).sqnorm().sqrt())

    assert gap(1e4) < 1e-3
    assert gap(1e2) / gap(1e3) == pytest.approx(10, rel=0.1)
    assert gap(1e3) / gap(1e4) == pytest.approx(10, rel=0.1)


def test_the_replys_model_is_the_personal_one() -> None:
    assert_deploys_what_it_replies(PFedMe())


def test_settings_that_make_no_sense_are_refused() -> None:
    for name in ("lam", "inner_lr", "inner_steps", "beta"):
        for value in (0, -1, float("inf"), float("nan")):
            with pytest.raises(ApieceError, match=f"{name} must be positive"):
                replace(PFedMe(), **{name: value})  # type: ignore[arg-type]
    with pytest.raises(ApieceError, match=r"diverges .* inner_lr=0.024, 1 / \(1 \+ lam\)"):
        PFedMe(lam=40.0, inner_lr=0.05)
