"""FedCurv against its objective, pair by pair, in a plain loop, under lost replies, and its limits."""

from itertools import pairwise

import pytest
import torch
from torch import nn

from apiece import ApieceError, Params, Recipe, Shard, Task, random, tree
from apiece.engines.base import Engine
from apiece.engines.vectorized import Vectorized
from apiece.methods.fedavg import FedAvg
from apiece.methods.fedcurv import FedCurv, fisher
from apiece.shard import Rows
from apiece.train import Training
from tests.methods.test_scaffold import (
    ENGINES,
    ETA,
    ILL,
    LOCAL,
    LOST,
    ROUNDS,
    SIZES,
    Vector,
    batches,
    check_personalized,
    close,
    cohort_with,
    net,
    play,
    population,
    same_bits,
    slope,
    states,
    zeros,
)
from tests.worlds import CPU, dropout_net, federation, linear_net, servers

LAM = 0.3


class Plain:
    """(w_j, F_j) of the last round's clients; the penalty is the sum over the others, pair by pair."""

    def __init__(self, training: Training, w: Params) -> None:
        self.training, self.w = training, dict(w)
        self.last: dict[int, tuple[Vector, Vector]] = {}
        self.held: dict[int, tuple[Vector, Vector]] = {}  # by each client since it last answered

    def trained(self, index: int, k: int) -> Vector:
        w = dict(self.w)
        for rows in batches(self.training, index)[k]:
            g = slope(self.training, w, rows)
            for j, (w_j, F_j) in self.last.items():
                if j != k:
                    g = {n: g[n] + LAM * 2 * F_j[n] * (w[n] - w_j[n]) for n in g}
            w = {n: w[n] - ETA * g[n] for n in w}
        return w

    def round(self, index: int, answering: list[int]) -> None:
        models = {k: self.trained(index, k) for k in answering if SIZES[k]}
        n = sum(SIZES[k] for k in models)
        total, last = zeros(self.w), {}
        for k, w in models.items():
            rows = population(self.training).train[k]
            F = zeros(w)
            for row in rows:
                g = slope(self.training, w, torch.tensor([row]))
                F = {name: F[name] + g[name] ** 2 / len(rows) for name in F}
            last[k] = (w, F)
            total = {name: total[name] + len(rows) / n * w[name] for name in w}
        if models:
            self.w, self.last = total, last
        self.held |= last


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: e.name)
def test_equals_its_objective_also_when_replies_are_lost(engine: Engine) -> None:
    """w, every F_k and F_k ⊙ w_k and the last round's sums, round by round, three of five clients at a time.

    Replies are lost in a client's first round, in later ones and from a whole cohort. Some clients take part
    in two rounds on end, others after a pause.
    """
    training, server = federation(FedCurv(LAM, LOCAL), engine, SIZES, 3, net)
    plain, lost = Plain(training, server.params), []
    answered: list[set[int]] = []
    for t in range(ROUNDS):
        before = server
        closed, heard = play(training, server, t, ILL.get(t, []))
        server = closed.server
        lost += [(t, k) for k in closed.ids if k not in heard]
        plain.round(t, heard)
        answered.append(set(heard))
        close(server.params, plain.w)
        kept = states(training, server, t + 1).share
        for k in range(len(SIZES)):
            w_k, F_k = plain.held.get(k, (plain.w, zeros(plain.w)))
            close(tree.take(kept.F, k), F_k)
            close(tree.take(kept.Fw, k), {n: F_k[n] * w_k[n] for n in F_k})
        for n in plain.w:
            close({n: server.total.F[n]}, {n: sum(F[n] for _, F in plain.last.values())})
            close({n: server.total.Fw[n]}, {n: sum(F[n] * w[n] for w, F in plain.last.values())})
        assert heard or same_bits(server, before)
    assert lost == LOST
    assert any(before & now for before, now in pairwise(answered))
    assert any(answered[t] & answered[t - 2] - answered[t - 1] for t in range(2, ROUNDS))
    check_personalized(training, server, ROUNDS)


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: e.name)
@pytest.mark.parametrize(("lam", "sizes"), [(0.0, SIZES), (5.0, (12,))], ids=["no penalty", "one client"])
def test_without_others_to_keep_to_it_is_fedavg(lam: float, sizes: tuple[int, ...], engine: Engine) -> None:
    """λ = 0, or a population of one; with momentum and dropout."""
    local = LOCAL._replace(momentum=0.5)
    ends = []
    for method in (FedCurv(lam, local), FedAvg(local)):
        training, server = federation(method, engine, sizes, min(3, len(sizes)), dropout_net)
        ends.append([dict(after.params) for after in servers(training, server, 4)])
    for ours, theirs in zip(*ends, strict=True):
        close(ours, theirs, atol=1e-6)


def shard(size: int, capacity: int) -> tuple[Shard, torch.Tensor, torch.Tensor]:
    """A client's examples padded with rows of zeros, and the examples alone."""
    draw = torch.Generator().manual_seed(4)
    x, y = torch.randn(capacity, 5, generator=draw), torch.randint(3, (capacity,), generator=draw)
    x[size:] = 0.0
    rows = Rows(torch.arange(capacity), torch.tensor(size), random.as_key(3), random.as_key(4))
    return Shard(x, y, rows, size == capacity), x[:size], y[:size]


@pytest.mark.parametrize("batch_size", [0, 1, 4, 9])
@pytest.mark.parametrize("capacity", [9, 14])
def test_the_fisher_of_logistic_regression_in_closed_form(batch_size: int, capacity: int) -> None:
    """An example's gradient is (p − e_y) xᵀ and p − e_y; whatever the batches and the padding."""
    data, x, y = shard(9, capacity)
    task = Task(linear_net)
    w = task.init(1)
    off = (x @ w["weight"].T + w["bias"]).softmax(-1) - torch.eye(3)[y]
    wanted = {"weight": (off[:, :, None] * x[:, None, :]).square().mean(0), "bias": off.square().mean(0)}
    close(fisher(task, w, data, batch_size), wanted, atol=1e-7)


def plain_net() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Identity(), nn.Linear(7, 3))


def test_the_fisher_is_of_the_data_loss_without_dropout() -> None:
    """As of the same network without its dropout layer; penalties do not enter."""
    data, _, _ = shard(9, 9)
    w = Task(dropout_net).init(1)
    task = Task(dropout_net).penalized(lambda w, batch, outputs: w.sqnorm())
    close(fisher(task, w, data, 4), dict(fisher(Task(plain_net), w, data, 4)), atol=1e-7)


def test_a_cohort_without_examples_changes_nothing() -> None:
    training, server = federation(FedCurv(LAM, LOCAL), Vectorized(CPU, 8), (0, 9, 0), 2, net)
    server = play(training, server, cohort_with(training, 1, True), [])[0].server
    before = server, states(training, server, 0)
    after = play(training, server, cohort_with(training, 1, False), [])[0].server
    assert same_bits(before, (after, states(training, after, 0)))


def test_a_client_that_lost_its_examples_has_no_share() -> None:
    method, task = FedCurv(LAM, LOCAL), Task(net)
    server = method.init(task, task.init(1), 0)
    share = type(server.total)(task.init(2), task.init(3))
    held = method.init_client(task, server, server.params, random.as_key(0))._replace(share=share)
    reply = method.client_update(task, server._replace(total=share), held, shard(0, 4)[0])
    assert all(not leaf.any() for leaf in tree.leaves(reply.update))
    assert same_bits(held, reply.state)


def test_what_is_sent() -> None:
    """Three models and a number down and up; two and a number are kept."""
    training, server = federation(FedCurv(LAM, LOCAL), ENGINES[0], SIZES, 3, net)
    one, broadcast = tree.nbytes(server.params), training.broadcast(server, 0)
    shape = training.shapes.of(broadcast)
    assert (tree.nbytes(broadcast), shape.bytes_up, tree.nbytes(shape.state)) == (
        3 * one + 4,
        3 * one + 4,
        2 * one + 4,
    )


def test_settings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ApieceError, match="lam"):
        FedCurv(-1.0)
    assert FedCurv(local=Recipe(optimizer="adam")).personal.optimizer == "adam"
