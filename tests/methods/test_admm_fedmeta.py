"""ADMM-FedMeta: a plain loop of the paper's equations, exact Hessian products, closed forms on quadratics."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp

from apiece import (
    ApieceError,
    Dropout,
    Params,
    Recipe,
    Reply,
    Round,
    Shard,
    Task,
    check_method,
    random,
    tree,
)
from apiece.engines.base import Engine
from apiece.engines.sequential import Sequential
from apiece.engines.vectorized import Vectorized
from apiece.evaluate import models
from apiece.methods.admm_fedmeta import ADMMFedMeta, Consensus, Dual, Sent
from apiece.sample import uniform
from apiece.shard import Rows
from apiece.store import Store
from apiece.train import Closed, Training, assemble
from tests.worlds import CPU, ROOT, linear_net, ragged

SIZES = (7, 23, 1, 0, 12)
EXAMPLES = 43
ENGINES = [Sequential(CPU), Vectorized(CPU, 8)]
Net = Callable[[], nn.Module]
Vector = dict[str, Tensor]


def world(
    method: ADMMFedMeta, engine: Engine, cohort: int, net: Net = linear_net, prior: Params | None = None
) -> tuple[Training, Consensus]:
    task, data = Task(net, prior=prior), ragged(SIZES)

    def store(state: tree.Tree) -> Store:
        return Store(state, data.population, CPU, None, mapped=False)

    return assemble(engine, method, task, task.init(1), data, cohort, ROOT, uniform, store)


def next_round(training: Training, server: Consensus, index: int) -> Closed:
    with torch.no_grad():
        return next(training.rounds(server, index, index + 1))


def parts(training: Training, client: int, fraction: float) -> tuple[Tensor, Tensor]:
    """Rows of the client's support and query."""
    f = training.federation
    rows, even = f.rows(f.data.train, [client], [client], 0)
    shard = Shard(torch.arange(len(f.data.y)), f.data.y, Rows(*(leaf[0] for leaf in rows)), even)
    support, query = (part.all() for part in shard.split(fraction))
    return support.x[support.weight > 0], query.x[query.weight > 0]


class Plain:
    """The paper's algorithm: each client hands over θ_i and y_i, the server sums them."""

    def __init__(self, training: Training, theta: Params, prior: Params | None = None) -> None:
        method = training.federation.method
        assert isinstance(method, ADMMFedMeta)
        self.method, self.model, data = method, linear_net(), training.federation.data
        self.x, self.y_true, self.theta, self.prior = data.x, data.y, dict(theta), prior
        self.parts = [parts(training, i, method.support) for i in range(len(SIZES))]
        self.theta_i: list[Vector] = [dict(theta) for _ in SIZES]
        self.y: list[Vector] = [{k: torch.zeros_like(v) for k, v in theta.items()} for _ in SIZES]

    def slope(self, at: Vector, rows: Tensor) -> Vector:
        if not len(rows):
            return {k: torch.zeros_like(v) for k, v in at.items()}
        leaves = {k: v.clone().requires_grad_() for k, v in at.items()}
        with torch.enable_grad():
            loss = F.cross_entropy(functional_call(self.model, leaves, (self.x[rows],)), self.y_true[rows])
        return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))

    def round(self, t: int, answering: list[int]) -> Vector:
        alpha, rho, lam = self.method.local.lr, self.method.rho, self.method.lam
        delta = 1 / (t + 100)
        for i in answering:
            S, Q = self.parts[i]
            at, d = self.theta, self.slope(self.theta, S)
            phi = {k: at[k] - alpha * d[k] for k in at}
            r = self.slope(phi, Q)
            ahead = self.slope({k: at[k] + delta * r[k] for k in at}, S)
            behind = self.slope({k: at[k] - delta * r[k] for k in at}, S)
            for k in at:
                g = (ahead[k] - behind[k]) / (2 * delta)
                self.theta_i[i][k] = at[k] - (self.y[i][k] + SIZES[i] / EXAMPLES * (r[k] - alpha * g)) / rho
                self.y[i][k] = self.y[i][k] + rho * (self.theta_i[i][k] - at[k])
        for k in self.theta:
            total = sum(y[k] + rho * th[k] for y, th in zip(self.y, self.theta_i, strict=True))
            pull = 2 * lam * (self.theta[k] - self.prior[k]) if self.prior else 0.0
            self.theta[k] = (total - pull) / (rho * len(SIZES))
        return self.theta


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: e.name)
@pytest.mark.parametrize("lam", [0.0, 0.2])
def test_with_everybody_it_is_the_papers_loop(engine: Engine, lam: float) -> None:
    """Three rounds of all five clients, one without examples and one without a query."""
    method = ADMMFedMeta(local=Recipe(lr=0.3, batch_size=0, steps=1), lam=lam, support=0.4)
    prior = Task(linear_net).init(9) if lam else None
    training, server = world(method, engine, len(SIZES), prior=prior)
    plain = Plain(training, server.params, prior)
    for t in range(3):
        server = next_round(training, server, t).server
        expected = plain.round(t, [0, 1, 2, 3, 4])
        states = training.federation.states(engine, training.broadcast(server, t + 1), range(5))
        for k, theta in expected.items():
            torch.testing.assert_close(server.params[k], theta, rtol=1e-5, atol=5e-6)
            for i in range(5):
                torch.testing.assert_close(states.y[k][i], plain.y[i][k], rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: e.name)
def test_partial_cohorts_and_lost_replies(engine: Engine) -> None:
    """The server's sum is that of what each client last sent, or of its start; a lost reply changes nothing.

    Replies are lost in a client's first round, in a later one and from a whole cohort: their data are NaN.
    """
    method = ADMMFedMeta(local=Recipe(lr=0.3, batch_size=0, steps=1))
    training, server = world(method, engine, cohort=3)
    plain, data = Plain(training, server.params), training.federation.data
    ill, lost = {0: [1], 3: [1, 4], 6: [0, 1, 2, 3, 4]}, []
    for t in range(11):
        x = data.x.clone()
        for i in ill.get(t, []):
            x[data.train[i]] = torch.nan
        poisoned = replace(training.federation, data=replace(data, x=x))
        before, closed = server, next_round(replace(training, federation=poisoned), server, t)
        server = closed.server
        answered = [i for i, fine in zip(closed.ids, closed.finite.tolist(), strict=True) if fine]
        lost += [(t, i) for i in closed.ids if i not in answered]
        expected = plain.round(t, answered)
        states = training.federation.states(engine, training.broadcast(server, t + 1), range(5))
        for k in expected:
            last_sent = states.y[k] + method.rho * states.theta[k]
            torch.testing.assert_close(5 * server.mean[k], last_sent.sum(0), rtol=1e-5, atol=5e-6)
            torch.testing.assert_close(server.params[k], expected[k], rtol=1e-5, atol=5e-6)
            assert answered or torch.equal(server.params[k], before.params[k])
    assert lost == [(0, 1), (3, 1), (3, 4), (6, 0), (6, 1), (6, 2)]


def smooth() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def smooth_dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), Dropout(0.4), nn.Linear(6, 3)).double()


def one_client(size: int) -> Shard:
    draw = torch.Generator().manual_seed(4)
    x = torch.randn(size, 5, generator=draw, dtype=torch.float64)
    y = torch.randint(3, (size,), generator=draw)
    return Shard(x, y, Rows(torch.arange(size), torch.tensor(size), random.as_key(3), random.as_key(4)), True)


def a_reply(net: Net, t: int) -> tuple[Task, Sent, Shard, Dual, Reply]:
    """A client with 21 of the population's 60 examples: what it works with and what it answers."""
    method = ADMMFedMeta(local=Recipe(lr=0.5, batch_size=0, steps=1), rho=0.7)
    task, data = Task(net), one_client(21)
    before = Dual(task.init(2), 0.1 * task.init(3))
    server = method.init(task, task.init(1), 0)
    broadcast = method.broadcast(server, Round(t, 0, 3, 3, examples=60))
    return task, broadcast, data, before, method.client_update(task, broadcast, before, data)


def error_of_product(net: Net, t: int) -> float:
    """‖g − Hr‖ / ‖Hr‖, with g read off the dual: y = −w(r − αg), so g = (r + y/w)/α."""
    task, broadcast, data, _, reply = a_reply(net, t)
    S, Q = (part.all() for part in data.split(0.5))
    theta, nabla = broadcast.params, grad(task.objective)
    r = nabla(theta - 0.5 * nabla(theta, S), Q)
    g = (r + reply.state.y / (21 / 60)) / 0.5
    _, exact = jvp(lambda at: nabla(at, S), (theta,), (r,))
    return float(((g - exact).sqnorm() / exact.sqnorm()).sqrt())


@pytest.mark.parametrize("net", [smooth, smooth_dropout], ids=["tanh", "dropout"])
def test_finite_differences_give_the_hessian_product(net: Net) -> None:
    """Central differences err by O(δ²): from δ = 1/100 to 1/400, 16 times less."""
    first, later = error_of_product(net, 0), error_of_product(net, 300)
    assert first < 1e-3
    assert first / later == pytest.approx(16, rel=0.05)


def test_what_a_client_keeps_and_sends() -> None:
    """θ_i = θ − (y + w(r − αg))/ρ puts y + ρ(θ_i − θ) at −w(r − αg), whatever y was; one vector is sent."""
    task, broadcast, data, before, reply = a_reply(smooth, 0)
    S, Q = (part.all() for part in data.split(0.5))
    assert int(S.weight.sum()) == 11
    theta, delta, w, nabla = broadcast.params, 0.01, 21 / 60, grad(task.objective)
    phi = theta - 0.5 * nabla(theta, S)
    r = nabla(phi, Q)
    g = (nabla(theta + delta * r, S) - nabla(theta - delta * r, S)) / (2 * delta)
    y = -w * (r - 0.5 * g)
    theta_i = theta - (before.y - y) / 0.7
    change = (y + 0.7 * theta_i) - (before.y + 0.7 * before.theta)
    wanted = Reply(change, Dual(theta_i, y), model=phi)
    assert tree.same_structure(wanted[:4], reply[:4])
    for a, b in zip(tree.tensors(wanted[:4]), tree.tensors(reply[:4]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def number(value: float) -> Params:
    return Params({"theta": torch.full((), value, dtype=torch.float64)})


def server_step(lam: float, exact: bool) -> float:
    """From θ = 2 to the θ after three replies: y = 1, −2, 4 and θ_i = 2, 0, 3 with ρ = ½, θ_p = 8."""
    method = ADMMFedMeta(rho=0.5, lam=lam, exact=exact)
    task = Task(linear_net, prior=number(8.0))
    sent = [1 + 0.5 * 2, -2 + 0.5 * 0, 4 + 0.5 * 3]
    before = 0.25
    update = number(sum(sent) / 3 - before)
    round = Round(4, 0, 3, 3, examples=9, replies=3)
    after = method.server_update(task, Consensus(number(2.0), number(before)), update, round)
    assert float(after.mean["theta"]) == pytest.approx(5.5 / 3)
    return float(after.params["theta"])


def test_the_server_minimises_the_augmented_lagrangian() -> None:
    """The part of Eq. 5 that depends on θ: Σ −y_i θ + (ρ/2)(θ_i − θ)² + λ(θ − θ_p)².

    Zero derivative: −Σ(y_i + ρθ_i) + nρθ + 2λ(θ − θ_p) = 0, with Σ(y_i + ρθ_i) = 5.5 and nρ = 1.5.
    λ = 0: θ = 5.5/1.5. λ = ¼: θ = (2λθ_p + 5.5)/(2λ + 1.5) = 9.5/2 = 4.75.
    Eq. 11 has λ(θ − θ_p)² replaced by its tangent at θ = 2: θ = (5.5 − 2λ(2 − 8))/1.5 = 8.5/1.5.
    """

    def lagrangian(theta: float, lam: float) -> float:
        clients = ((1, 2), (-2, 0), (4, 3))
        penalties = sum(y * (th - theta) + 0.25 * (th - theta) ** 2 for y, th in clients)
        return penalties + lam * (theta - 8) ** 2

    assert server_step(0.0, exact=False) == server_step(0.0, exact=True) == pytest.approx(5.5 / 1.5)
    assert server_step(0.25, exact=True) == pytest.approx(4.75)
    assert server_step(0.25, exact=False) == pytest.approx(8.5 / 1.5)
    for lam in (0.0, 0.25):
        best = server_step(lam, exact=True)
        assert all(lagrangian(best, lam) < lagrangian(best + step, lam) for step in (-1e-3, 1e-3))


class Location(nn.Module):
    """Outputs θ − x: with half its square as loss, L(θ, S) is a parabola around the mean of S."""

    def __init__(self) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        return self.theta - x


@pytest.mark.parametrize(
    ("cohort", "lam", "exact"),
    [(5, 0.0, False), (5, 0.3, False), (5, 0.3, True), (5, 30.0, True), (2, 0.0, False), (2, 0.3, False)],
)
def test_it_ends_at_the_minimum_of_the_meta_objective(cohort: int, lam: float, exact: bool) -> None:
    """With L_i(θ, A) = ½‖θ − mean(A)‖² + const, Eq. 1's derivative is
    Σ w_i (1 − α)((1 − α)θ + αs_i − q_i) + 2λ(θ − θ_p), s_i and q_i the means of S_i and Q_i. So, over the
    clients with a query,

        θ* = [Σ w_i (1 − α)(q_i − αs_i) + 2λθ_p] / [(1 − α)² Σ w_i + 2λ].

    Cohorts of two of the five clients lead to the same point in 200 rounds; λ = 30 puts it near θ_p.
    """
    alpha, theta_p = 0.2, Params({"theta": torch.arange(5.0)})
    method = ADMMFedMeta(Recipe(lr=alpha, batch_size=0, steps=1), rho=0.6, lam=lam, exact=exact)
    training, server = world(method, Vectorized(CPU, 8), cohort, Location, theta_p)
    task = replace(training.federation.task, losses=lambda out, y: 0.5 * out.square().sum(-1))
    training = replace(training, federation=replace(training.federation, task=task))
    with torch.no_grad():
        for closed in training.rounds(server, 0, 400 // cohort):
            server = closed.server

    x, top, bottom = training.federation.data.x, 2 * lam * theta_p["theta"], 2 * lam
    for i, size in enumerate(SIZES):
        S, Q = parts(training, i, 0.5)
        if len(Q):
            top = top + size / EXAMPLES * (1 - alpha) * (x[Q].mean(0) - alpha * x[S].mean(0))
            bottom += size / EXAMPLES * (1 - alpha) ** 2
    torch.testing.assert_close(server.params["theta"], top / bottom, rtol=1e-4, atol=1e-4)
    if lam == 30.0:
        assert (server.params["theta"] - theta_p["theta"]).abs().max() < 0.1


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: e.name)
def test_a_client_adapts_by_one_gradient_step_on_its_training_data(engine: Engine) -> None:
    method = ADMMFedMeta(local=Recipe(lr=0.3, batch_size=0, steps=1))
    training, server = world(method, engine, cohort=2)
    plain, data = Plain(training, server.params), training.federation.data
    with torch.no_grad():
        pairs = models(engine, training.federation, training.broadcast(server, 0), [0, 1, 2], 0)
    for i, (initial, personalized) in enumerate(pairs):
        slope = plain.slope(dict(server.params), torch.as_tensor(data.train[i]))
        for k in slope:
            assert torch.equal(initial[k], server.params[k])
            torch.testing.assert_close(personalized[k], (initial[k] - 0.3 * slope[k]).detach())


def test_delta_and_the_number_of_examples_are_sent() -> None:
    method = ADMMFedMeta()
    server = method.init(Task(linear_net), Task(linear_net).init(1), 0)
    for t, delta in ((0, 0.01), (25, 0.008), (100, 0.005)):
        sent = method.broadcast(server, Round(t, 0, 2, 5, examples=43))
        assert float(sent.delta) == pytest.approx(delta)
        assert float(sent.examples) == 43


def test_what_it_refuses() -> None:
    with pytest.raises(ApieceError, match="there is none"):
        ADMMFedMeta(lam=0.5).init(Task(linear_net), Task(linear_net).init(1), 0)
    whole = {"batch_size": 0, "steps": 1}
    for recipe in (
        Recipe(momentum=0.9, **whole),
        Recipe(optimizer="adam", **whole),
        Recipe(batch_size=0, steps=2),
        Recipe(batch_size=5, steps=1),
    ):
        with pytest.raises(ApieceError, match="one plain gradient step"):
            ADMMFedMeta(local=recipe)


@pytest.mark.parametrize("exact", [False, True])
def test_keeps_every_rule_with_a_prior(exact: bool) -> None:
    check_method(ADMMFedMeta(lam=0.5, exact=exact, local=Recipe(lr=0.1, batch_size=0, steps=1)))
