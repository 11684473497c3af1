"""FedDyn against Algorithm 1 in a plain loop, under lost replies, and where its minima lie."""

import pytest
import torch
from torch import Tensor, nn

from apiece import ApieceError, Params, Recipe, tree
from apiece.engines.base import Engine
from apiece.engines.vectorized import Vectorized
from apiece.methods.feddyn import FedDyn
from apiece.train import Training
from tests.methods.test_scaffold import (
    ENGINES,
    ETA,
    ILL,
    LOCAL,
    LOST,
    ROUNDS,
    SIZES,
    batches,
    check_personalized,
    close,
    cohort_with,
    least_squares,
    net,
    play,
    regression,
    same_bits,
    slope,
    states,
    with_losses,
    zeros,
)
from tests.worlds import CPU, federation

ALPHA = 0.4


class Plain:
    """Algorithm 1: clients hand over θ_k; the minimum is approached by SGD."""

    def __init__(self, training: Training, theta: Params) -> None:
        self.training, self.theta, self.h = training, dict(theta), zeros(dict(theta))
        self.g = [zeros(dict(theta)) for _ in SIZES]

    def round(self, index: int, answering: list[int]) -> None:
        before, total = self.theta, zeros(self.theta)
        for k in answering:
            theta = dict(before)
            for rows in batches(self.training, index)[k]:
                nabla = slope(self.training, theta, rows)
                theta = {
                    n: w - ETA * (nabla[n] - self.g[k][n] + ALPHA * (w - before[n])) for n, w in theta.items()
                }
            self.g[k] = {n: self.g[k][n] - ALPHA * (w - before[n]) for n, w in theta.items()}
            total = {n: total[n] + w for n, w in theta.items()}
        if P := len(answering):
            self.h = {n: h - ALPHA / len(SIZES) * (total[n] - P * before[n]) for n, h in self.h.items()}
            self.theta = {n: total[n] / P - h / ALPHA for n, h in self.h.items()}


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: e.name)
def test_equals_algorithm_1_also_when_replies_are_lost(engine: Engine) -> None:
    """θ, h and every g_k, round by round, three of five clients at a time; h is the mean of all g_k.

    Replies are lost in a client's first round, in later ones and from a whole cohort.
    """
    training, server = federation(FedDyn(ALPHA, LOCAL), engine, SIZES, 3, net)
    plain, lost = Plain(training, server.params), []
    for t in range(ROUNDS):
        before = server
        closed, heard = play(training, server, t, ILL.get(t, []))
        server = closed.server
        lost += [(t, k) for k in closed.ids if k not in heard]
        plain.round(t, heard)
        close(server.params, plain.theta)
        close(server.h, plain.h)
        g = states(training, server, t + 1).g
        for k, g_k in enumerate(plain.g):
            close(tree.take(g, k), g_k)
        close(server.h, {n: v.mean(0) for n, v in g.items()})
        assert heard or same_bits(server, before)
    assert lost == LOST
    check_personalized(training, server, ROUNDS)


def test_it_ends_at_the_minimum_of_the_mean_loss() -> None:
    """Every client's mean loss counts alike, though two of four take part at a time, in several steps each.

    The minimum over all examples together lies elsewhere.
    """
    method = FedDyn(1.0, Recipe(lr=0.3, batch_size=0, epochs=5))
    training, server = federation(method, Vectorized(CPU, 8), (9, 23, 6, 12), 2, lambda: nn.Linear(5, 1))
    training = regression(training)
    with torch.no_grad():
        for closed in training.rounds(server, 0, 40):
            server = closed.server
    close(server.params, least_squares(training, lambda n: 1 / n), atol=1e-4)
    assert (server.params["weight"] - least_squares(training, lambda n: 1.0)["weight"]).abs().max() > 0.01


class Location(nn.Module):
    """Outputs θ − x: with half its square as loss, a client's L is ½‖θ − a‖² + const, a the mean of its x."""

    def __init__(self) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        return self.theta - x


def test_one_client_by_hand() -> None:
    """α = ½, θ^0 = 0, exact minima: θ_1 solves θ − a − g + ½(θ − θ^{t−1}) = 0, and h = g for one client.

    t = 1: θ_1 = ⅔a, g = −½·⅔a = −⅓a (which is ∇L(θ_1)), θ^1 = ⅔a + ⅔a = 4/3 a.
    t = 2: θ_1 = ⅔(a − ⅓a + ½·4/3 a) = 8/9 a, g = −⅓a − ½(8/9 − 12/9)a = −1/9 a, θ^2 = 8/9 a + 2/9 a = 10/9 a.
    So θ_1 = (a + ½θ_1′)/(1 + ½) of the θ_1′ before: the proximal point method.
    """
    method = FedDyn(0.5, Recipe(lr=0.5, batch_size=0, epochs=12))
    training, server = federation(method, Vectorized(CPU, 8), (12,), 1, Location)
    training = with_losses(training, lambda out, y: 0.5 * out.square().sum(-1))
    a = training.federation.data.x[:12].mean(0)
    for t, (theta, h) in enumerate([(4 / 3, -1 / 3), (10 / 9, -1 / 9)]):
        server = play(training, server, t, [])[0].server
        close(server.params, {"theta": theta * a})
        close(server.h, {"theta": h * a})
        close(states(training, server, t).g, {"theta": h * a[None]})


def test_a_cohort_without_examples_changes_nobody() -> None:
    """Its θ_k are the θ it was sent: h and every g_k stay, and θ moves by −h/α, as the paper has it."""
    training, server = federation(FedDyn(ALPHA, LOCAL), Vectorized(CPU, 8), (0, 9, 0), 2, net)
    server = play(training, server, cohort_with(training, 1, True), [])[0].server
    before = server.h, states(training, server, 0)
    after = play(training, server, cohort_with(training, 1, False), [])[0].server
    assert same_bits(before, (after.h, states(training, after, 0)))
    close(after.params, {n: w - server.h[n] / ALPHA for n, w in server.params.items()})


def test_what_is_sent() -> None:
    """One model down, one up; one is kept."""
    training, server = federation(FedDyn(ALPHA, LOCAL), ENGINES[0], SIZES, 3, net)
    one, broadcast = tree.nbytes(server.params), training.broadcast(server, 0)
    shape = training.shapes.of(broadcast)
    assert (tree.nbytes(broadcast), shape.bytes_up, tree.nbytes(shape.state)) == (one, one, one)


def test_settings_that_make_no_sense_are_refused() -> None:
    for alpha in (0.0, -1.0):
        with pytest.raises(ApieceError, match="alpha"):
            FedDyn(alpha)
