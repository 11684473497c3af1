"""SCAFFOLD against Algorithm 1 in a plain loop, under lost replies, and at the minimum it promises."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from apiece import ApieceError, Params, Recipe, Shard, random, tree
from apiece.data.federated import Federated
from apiece.engines.base import Engine
from apiece.engines.sequential import Sequential
from apiece.engines.vectorized import Vectorized
from apiece.evaluate import models
from apiece.method import Server
from apiece.methods.scaffold import Scaffold
from apiece.train import Closed, Training
from tests.worlds import CPU, cohort_shards, federation

ENGINES = [Sequential(CPU), Vectorized(CPU, 8)]
SIZES = (7, 23, 1, 0, 12)
ROUNDS, ETA, ETA_G = 9, 0.2, 0.7
LOCAL = Recipe(lr=ETA, batch_size=5, epochs=2)
ILL = {0: [1], 3: [1, 4], 6: [0, 1, 2, 4]}  # whose data are NaN, by round
LOST = [(0, 1), (3, 1), (3, 4), (6, 0), (6, 1), (6, 2)]  # what that does to cohorts of three
Vector = dict[str, Tensor]


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def zeros(like: Vector) -> Vector:
    return {k: torch.zeros_like(v) for k, v in like.items()}


def population(training: Training) -> Federated:
    data = training.federation.data
    assert isinstance(data, Federated)
    return data


def slope(training: Training, at: Vector, rows: Tensor) -> Vector:
    """∇ of the mean cross-entropy of `net` on some rows, by plain autograd."""
    data, leaves = population(training), {k: v.clone().requires_grad_() for k, v in at.items()}
    with torch.enable_grad():
        loss = F.cross_entropy(functional_call(net(), leaves, (data.x[rows],)), data.y[rows])
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


def close(ours: Params | Vector, theirs: Vector, atol: float = 5e-6) -> None:
    assert ours.keys() == theirs.keys()
    for k, value in theirs.items():
        torch.testing.assert_close(ours[k], value, rtol=1e-5, atol=atol)


def play(training: Training, server: Server, index: int, ill: list[int]) -> tuple[Closed, list[int]]:
    """One round in which the clients `ill` have NaN for data, and who of the cohort was heard."""
    data = population(training)
    x = data.x.clone()
    for i in ill:
        x[data.train[i]] = torch.nan
    federation = replace(training.federation, data=replace(data, x=x))
    with torch.no_grad():
        closed = next(replace(training, federation=federation).rounds(server, index, index + 1))
    return closed, [i for i, fine in zip(closed.ids, closed.finite.tolist(), strict=True) if fine]


def states(training: Training, server: Server, index: int) -> tree.Tree:
    """Every client's state as one tree."""
    f = training.federation
    return f.states(training.engine, training.broadcast(server, index), range(f.data.population))


def batches(training: Training, index: int) -> dict[int, list[Tensor]]:
    """Rows of every batch, by client of the round's cohort."""
    shards = cohort_shards(training, index)
    return {i: [batch.x for batch in shard.batches(5, 2)] for i, shard in shards}


def fine_tuned(training: Training, at: Vector, client: int, index: int) -> Vector:
    """Two epochs of plain SGD on the client's training examples, in the order of evaluation `index`."""
    f, data = training.federation, population(training)
    rows, even = f.rows(data.train, [client], [client], random.fold(f.root, "personalize", index))
    shard = Shard(torch.arange(len(data.y)), data.y, tree.take(rows, 0), even)
    for batch in shard.batches(5, 2):
        g = slope(training, at, batch.x)
        at = {k: at[k] - ETA * g[k] for k in at}
    return at


def check_personalized(training: Training, server: Server, index: int) -> None:
    """Everybody, met or not, gets the server's model, and fine-tunes it."""
    ids = list(range(training.federation.data.population))
    broadcast = training.broadcast(server, index)
    with torch.no_grad():
        found = models(training.engine, training.federation, broadcast, ids, index)
    for i, (initial, personalized) in enumerate(found):
        close(initial, dict(server.params), atol=0)
        close(personalized, fine_tuned(training, dict(server.params), i, index))


class Plain:
    """Algorithm 1. Option II is used in its meaning: c_i⁺ is the mean of the gradients the client saw."""

    def __init__(self, training: Training, x: Params) -> None:
        self.training, self.x, self.c = training, dict(x), zeros(dict(x))
        self.c_i = [zeros(dict(x)) for _ in range(training.federation.data.population)]

    def round(self, index: int, answering: list[int]) -> None:
        N, S = len(self.c_i), len(answering)
        dy, dc = zeros(self.x), zeros(self.x)
        for i in answering:
            y, seen = dict(self.x), []
            for rows in batches(self.training, index)[i]:
                g = slope(self.training, y, rows)
                seen.append(g)
                y = {k: y[k] - ETA * (g[k] - self.c_i[i][k] + self.c[k]) for k in y}
            c_plus = {k: torch.stack([g[k] for g in seen]).mean(0) for k in y} if seen else self.c_i[i]
            for k in y:
                dy[k] += (y[k] - self.x[k]) / S
                dc[k] += (c_plus[k] - self.c_i[i][k]) / S
            self.c_i[i] = c_plus
        if S:
            self.x = {k: self.x[k] + ETA_G * dy[k] for k in dy}
            self.c = {k: self.c[k] + S / N * dc[k] for k in dc}


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: e.name)
def test_equals_algorithm_1_also_when_replies_are_lost(engine: Engine) -> None:
    """x, c and every c_i, round by round, three of five clients at a time; c is the mean of all c_i.

    Replies are lost in a client's first round, in later ones and from a whole cohort.
    """
    training, server = federation(Scaffold(LOCAL, outer_lr=ETA_G), engine, SIZES, 3, net)
    plain, lost = Plain(training, server.params), []
    for t in range(ROUNDS):
        before = server
        closed, heard = play(training, server, t, ILL.get(t, []))
        server = closed.server
        lost += [(t, i) for i in closed.ids if i not in heard]
        plain.round(t, heard)
        close(server.params, plain.x)
        close(server.c, plain.c)
        c = states(training, server, t + 1).c
        for i, c_i in enumerate(plain.c_i):
            close(tree.take(c, i), c_i)
        close(server.c, {k: v.mean(0) for k, v in c.items()})
        assert heard or same_bits(server, before)
    assert lost == LOST
    check_personalized(training, server, ROUNDS)


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: e.name)
def test_one_client_is_plain_sgd(engine: Engine) -> None:
    """c = c_1 in every round: the corrections cancel."""
    training, server = federation(Scaffold(LOCAL), engine, (12,), 1, net)
    y = dict(server.params)
    for t in range(4):
        server = play(training, server, t, [])[0].server
        for rows in batches(training, t)[0]:
            g = slope(training, y, rows)
            y = {k: y[k] - ETA * g[k] for k in y}
        close(server.params, y)
    assert max(float(c.abs().max()) for c in server.c.values()) > 0.01


def with_losses(training: Training, losses: Callable[[Tensor, Tensor], Tensor]) -> Training:
    """The same federation under another loss per example."""
    f = training.federation
    return replace(training, federation=replace(f, task=replace(f.task, losses=losses)))


def regression(training: Training) -> Training:
    """The labels are to be met by one output in least squares."""
    return with_losses(training, lambda out, y: 0.5 * (out.squeeze(-1) - y).square())


def least_squares(training: Training, weight: Callable[[int], float]) -> Vector:
    """The minimum of Σ_i weight(n_i) Σ_rows ½(⟨w, x⟩ + b − y)², by the normal equations."""
    data = population(training)
    A, r = torch.zeros(6, 6, dtype=torch.float64), torch.zeros(6, dtype=torch.float64)
    for rows in (data.train[i] for i in range(data.population)):
        x, y = torch.cat([data.x[rows], torch.ones(len(rows), 1)], 1).double(), data.y[rows].double()
        A, r = A + weight(len(rows)) * x.T @ x, r + weight(len(rows)) * x.T @ y
    w = torch.linalg.solve(A, r).float()
    return {"weight": w[None, :5], "bias": w[5:]}


def test_it_ends_at_the_minimum_of_the_mean_loss() -> None:
    """Every client's mean loss counts alike, though two of four take part at a time, in several steps each.

    The minimum over all examples together lies elsewhere.
    """
    local = Recipe(lr=0.1, batch_size=0, epochs=5)
    training, server = federation(
        Scaffold(local), Vectorized(CPU, 8), (9, 23, 6, 12), 2, lambda: nn.Linear(5, 1)
    )
    training = regression(training)
    with torch.no_grad():
        for closed in training.rounds(server, 0, 40):
            server = closed.server
    close(server.params, least_squares(training, lambda n: 1 / n), atol=1e-4)
    assert (server.params["weight"] - least_squares(training, lambda n: 1.0)["weight"]).abs().max() > 0.01


def cohort_with(training: Training, client: int, there: bool) -> int:
    """A round in whose cohort the client is, or is not."""
    data = training.federation.data
    return next(t for t in range(50) if (client in training.sampler(data, training.round(t)).ids) == there)


def same_bits(a: tree.Tree, b: tree.Tree) -> bool:
    return all(torch.equal(x, y) for x, y in zip(tree.leaves(a), tree.leaves(b), strict=True))


def test_a_cohort_without_examples_changes_nothing() -> None:
    """Not even its own c_i, though c is not 0."""
    training, server = federation(Scaffold(LOCAL), Vectorized(CPU, 8), (0, 9, 0), 2, net)
    server = play(training, server, cohort_with(training, 1, True), [])[0].server
    assert server.c["0.bias"].abs().max() > 0
    before = server, states(training, server, 0)
    after = play(training, server, cohort_with(training, 1, False), [])[0].server
    assert same_bits(before, (after, states(training, after, 0)))


def test_what_is_sent() -> None:
    """Two models down, two up; one is kept."""
    training, server = federation(Scaffold(LOCAL), ENGINES[0], SIZES, 3, net)
    one, broadcast = tree.nbytes(server.params), training.broadcast(server, 0)
    shape = training.shapes.of(broadcast)
    assert (tree.nbytes(broadcast), shape.bytes_up, tree.nbytes(shape.state)) == (2 * one, 2 * one, one)


def test_settings_that_make_no_sense_are_refused() -> None:
    for recipe in (Recipe(momentum=0.9), Recipe(optimizer="adam"), Recipe(weight_decay=0.1), Recipe(lr=0.0)):
        with pytest.raises(ApieceError, match="plain SGD"):
            Scaffold(local=recipe)
    with pytest.raises(ApieceError, match="outer_lr"):
        Scaffold(outer_lr=0.0)
    assert Scaffold(personal=Recipe(optimizer="adam")).personal.optimizer == "adam"
