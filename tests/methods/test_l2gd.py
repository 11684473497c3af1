"""L2GD against Algorithm 1 in plain PyTorch, which shares nothing with our code but batch order and coins."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch.func import grad

from apiece import ApieceError, Params, Recipe, Reply, Round, Task, check_method, random, tree
from apiece.data.federated import Federated
from apiece.engines.base import Engine
from apiece.evaluate import models
from apiece.methods.l2gd import L2GD, Mean, Own, Sent
from apiece.methods.local import Local
from apiece.train import Closed, Training
from tests.methods.test_ditto import (
    COHORT,
    ENGINES,
    SIZES,
    Vector,
    assert_close,
    evaluation_shard,
    net,
    one_client,
    rows_of,
    train,
)
from tests.worlds import cohort_shards, federation, servers

EVERYONE = list(range(len(SIZES)))
GRADIENT = Recipe(lr=0.12, batch_size=0, steps=1)  # the paper's
EPOCHS = Recipe(lr=0.12, batch_size=5, epochs=2)


def next_round(training: Training, server: Mean, index: int) -> Closed:
    with torch.no_grad():
        return next(training.rounds(server, index, index + 1))


def heads(training: Training, server: Mean, index: int) -> bool:
    answer: bool = training.broadcast(server, index).heads
    return answer


def mean(models: list[Vector]) -> Vector:
    return {k: torch.stack([x[k] for x in models]).mean(0) for k in models[0]}


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: e.name)
def test_with_everybody_it_is_the_papers_loop(engine: Engine) -> None:
    """Every x_i and x̄ over six rounds with both faces of the coin, in the paper's α and n.

    x_i ← x_i − α/(n(1 − p)) ∇f_i(x_i) or x_i ← x_i − αλ/(np) (x_i − x̄); the mean counts each client once.
    """
    lam, p, n = 1.5, 0.75, len(SIZES)
    training, server = federation(L2GD(lam, p, GRADIENT), engine, SIZES, n, net)
    alpha = n * GRADIENT.lr
    rows = [rows_of(shard, GRADIENT) for _, shard in cohort_shards(training, 0)]
    x: list[Vector] = [dict(server.params) for _ in EVERYONE]
    coins = []
    for k in range(6):
        coins.append(heads(training, server, k))
        if coins[-1]:
            x_bar = mean(x)
            x = [{j: x_i[j] - alpha * lam / (n * p) * (x_i[j] - x_bar[j]) for j in x_i} for x_i in x]
        else:
            x = [train(training, x[i], rows[i], alpha / (n * (1 - p))) for i in EVERYONE]
        server = next_round(training, server, k).server
        assert int(server.n) == n
        assert_close(server.params, mean(x))
        states = training.federation.states(engine, training.broadcast(server, k + 1), EVERYONE)
        for i in EVERYONE:
            assert_close(tree.take(states.x, i), x[i])
    assert coins == [True, False, True, False, False, True]


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: e.name)
def test_partial_cohorts_and_lost_replies(engine: Engine) -> None:
    """x̄ is the mean of what the clients that ever replied hold; the others' x_i stand still.

    Replies are lost in a client's first round, in later ones and from all of a cohort that have examples:
    their data are NaN.
    """
    lam, p = 1.5, 0.75
    training, server = federation(L2GD(lam, p, EPOCHS), engine, SIZES, COHORT, net)
    data = training.federation.data
    assert isinstance(data, Federated)
    x: dict[int, Vector] = {}
    first: dict[int, Vector] = {}  # the x̄ that a client was first sent
    ill, lost, coins = {1: [5], 3: [6], 4: EVERYONE}, [], []
    for t in range(9):
        shards = cohort_shards(training, t)
        broken = data.x.clone()
        for i, shard in shards:
            if i in ill.get(t, []):
                broken[shard.all().x] = torch.nan
        poisoned = replace(training.federation, data=replace(data, x=broken))
        coins.append(heads(training, server, t))
        x_bar: Vector = dict(server.params)
        closed = next_round(replace(training, federation=poisoned), server, t)
        for (i, shard), fine in zip(shards, closed.finite.tolist(), strict=True):
            old = x.get(i, first.setdefault(i, x_bar))
            if not fine:
                lost.append((t, i))
            elif coins[-1]:
                x[i] = {k: old[k] - EPOCHS.lr * lam / p * (old[k] - x_bar[k]) for k in old}
            else:
                x[i] = train(training, old, rows_of(shard, EPOCHS), EPOCHS.lr / (1 - p))
        server = closed.server
        assert int(server.n) == len(x)
        assert_close(server.params, mean(list(x.values())))
        broadcast = training.broadcast(server, t + 1)
        states = training.federation.states(engine, broadcast, EVERYONE)
        for i in EVERYONE:
            assert_close(tree.take(states.x, i), x.get(i, first.get(i, dict(server.params))))
    assert [t for t, face in enumerate(coins) if face] == [0, 2, 5, 6, 8]
    assert lost == [(1, 5), (3, 6), (4, 4), (4, 6)]

    for i, (initial, personalized) in enumerate(models(engine, training.federation, broadcast, EVERYONE, 9)):
        own = x.get(i, first.get(i, dict(server.params)))
        assert_close(initial, own)
        batches = rows_of(evaluation_shard(training, i, 9), EPOCHS)
        assert_close(personalized, train(training, own, batches, EPOCHS.lr))


@pytest.mark.parametrize("p", [0.0, 1e-7])
def test_never_heads_is_local(p: float) -> None:
    """p → 0: nobody hears of anybody. Three rounds of two full-batch steps are Local's training of six."""
    whole = Recipe(lr=0.3, batch_size=0, epochs=2)
    engine = ENGINES[1]
    training, server = federation(L2GD(1.0, p, whole), engine, SIZES, len(SIZES), net)
    *_, last = servers(training, server, 3)
    ours = training.federation.states(engine, training.broadcast(last, 3), EVERYONE)
    alone, start = federation(Local(personal=whole._replace(epochs=6)), engine, SIZES, COHORT, net)
    found = models(engine, alone.federation, alone.broadcast(start, 0), EVERYONE, 0)
    for i, (_, personalized) in enumerate(found):
        assert_close(tree.take(ours.x, i), dict(personalized))


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: e.name)
def test_always_heads_never_trains(engine: Engine) -> None:
    """p = 1: no gradient step at all, so everybody stays at the start, up to the mean's rounding."""
    training, server = federation(L2GD(0.5, 1.0, EPOCHS), engine, SIZES, COHORT, net)
    start = server.params
    for after in servers(training, server, 5):
        states = training.federation.states(engine, training.broadcast(after, 5), EVERYONE)
        for k in start:
            torch.testing.assert_close(after.params[k], start[k], rtol=1e-6, atol=1e-7)
            assert all(torch.allclose(x, start[k], rtol=1e-6, atol=1e-7) for x in states.x[k])


def test_without_a_pull_heads_change_nothing() -> None:
    method = L2GD(0.0, 0.5, EPOCHS)
    own = Own(Params({"w": torch.randn(4)}), torch.ones(()))
    reply = method.client_update(Task(net), Sent(Params({"w": torch.randn(4)}), True), own, one_client(6))
    assert torch.equal(reply.state.x["w"], own.x["w"])
    assert not reply.update.x["w"].any()


@pytest.mark.parametrize("p", [0.2, 0.7])
def test_a_round_is_a_gradient_step_on_average(p: float) -> None:
    """(1 − p) × tails + p × heads = −lr [∇f_i(x_i) + λ(x_i − x̄)]: −α times the objective's slope by x_i."""
    method, task, data = L2GD(1.7, p, GRADIENT), Task(net), one_client(9)
    x, x_bar = task.init(2), task.init(3)

    def step(face: bool) -> Params:
        own = Own(x, torch.ones(()))
        reply: Reply = method.client_update(task, Sent(x_bar, face), own, data)
        moved: Params = reply.state.x - x
        assert reply.model is reply.state.x
        for k in moved:
            assert torch.equal(reply.update.x[k], moved[k])
        return moved

    found = (1 - p) * step(False) + p * step(True)
    expected = -0.12 * (grad(task.objective)(x, data.all()) + 1.7 * (x - x_bar))
    assert_close(found, dict(expected))


def test_the_coin_is_the_rounds() -> None:
    """A share p of heads (600 of 2000 ± 4 deviations), the same whoever asks, whatever the server holds."""
    method, server = L2GD(p=0.3), Mean(Params({"w": torch.zeros(2)}), torch.zeros(()))
    other = Mean(Params({"w": torch.ones(2)}), torch.ones(()))
    rounds = [Round(t, random.fold(8, "round", t), 3, 7, 68) for t in range(2000)]
    coins = [method.broadcast(server, r).heads for r in rounds]
    assert all(type(face) is bool for face in coins)
    assert abs(sum(coins) - 600) < 4 * (2000 * 0.3 * 0.7) ** 0.5
    assert coins[:50] == [method.broadcast(other, r._replace(cohort_size=1)).heads for r in rounds[:50]]
    turns = sum(a != b for a, b in pairwise(coins))
    assert abs(turns - 2000 * 2 * 0.3 * 0.7) < 100


def test_both_faces_and_the_papers_gradient_step_keep_every_rule() -> None:
    check_method(L2GD(p=0.5, local=GRADIENT))


def test_settings_that_make_no_sense_are_refused() -> None:
    for p in (-0.1, 1.1, float("nan")):
        with pytest.raises(ApieceError, match="p is a probability"):
            L2GD(p=p)
    for lam in (-1.0, float("inf"), float("nan")):
        with pytest.raises(ApieceError, match="lam must be finite"):
            L2GD(lam=lam)
