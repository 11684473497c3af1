"""APFL against Algorithm 1 in plain PyTorch, its derivatives by autograd, and α at both ends."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from apiece import ApieceError, Model, Params, Recipe, Shard, Task, tree
from apiece.engines.base import Engine
from apiece.evaluate import models
from apiece.method import Method
from apiece.methods.apfl_mixture import ApflMixture, Own
from apiece.methods.fedavg import FedAvg
from apiece.methods.reptile import Reptile
from apiece.train import Training
from apiece.tree import Tree
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
    minus,
    net,
    one_client,
    rows_of,
    slope,
    train,
)
from tests.worlds import cohort_shards, dropout_net, federation, servers

EVERYONE = list(range(len(SIZES)))
LOCAL = Recipe(lr=0.3, batch_size=5, epochs=2)
PERSONAL = Recipe(lr=0.1, batch_size=4, epochs=1)


def mix(alpha: float, v: Vector, w: Vector) -> Vector:
    return {k: alpha * v[k] + (1 - alpha) * w[k] for k in w}


def plain(
    training: Training, w: Vector, v: Vector, alpha: float, batches: list[Tensor], lr: float
) -> tuple[Vector, Vector, float]:
    """(w_i, v_i, α_i) after the local steps; α_i moves on the first batch. All move by what was before it."""
    for j, rows in enumerate(batches):
        at_mixture, at_w = slope(training, mix(alpha, v, w), rows), slope(training, w, rows)
        by_alpha = sum(float(((v[k] - w[k]) * at_mixture[k]).sum()) for k in w)
        w, v = minus(w, lr, at_w), minus(v, lr * alpha, at_mixture)
        if j == 0:
            alpha = min(max(alpha - lr * by_alpha, 0.0), 1.0)
    return w, v, alpha


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: e.name)
def test_equals_algorithm_1(engine: Engine) -> None:
    """w, every v_i and α_i, round by round; then every client's initial and personalized mixture."""
    training, server = federation(ApflMixture(0.6, True, LOCAL, PERSONAL), engine, SIZES, COHORT, net)
    w: Vector = dict(server.params)
    own: dict[int, tuple[Vector, float]] = {}
    met = []
    for t, ours in enumerate(servers(training, server, ROUNDS)):
        clients = cohort_shards(training, t)
        met.append(tuple(i for i, _ in clients))
        sent = []
        for i, shard in clients:
            v, alpha = own.get(i, (w, 0.6))
            w_i, *own[i] = plain(training, w, v, alpha, rows_of(shard, LOCAL), LOCAL.lr)  # type: ignore[assignment]
            sent.append(w_i)
        w = {k: torch.stack([w_i[k] for w_i in sent]).mean(0) for k in w}
        assert_close(ours.params, w)
        broadcast = training.broadcast(ours, t + 1)
        states = training.federation.states(engine, broadcast, EVERYONE)
        for i in EVERYONE:
            v, alpha = own.get(i, (w, 0.6))
            assert_close(tree.take(states.v, i), v)
            assert float(states.alpha[i]) == pytest.approx(alpha, abs=1e-5)
    assert met == IDS
    assert sum(abs(alpha - 0.6) > 1e-3 for _, alpha in own.values()) >= 3  # α did move

    for i, (initial, personalized) in enumerate(
        models(engine, training.federation, broadcast, EVERYONE, ROUNDS)
    ):
        v, alpha = own.get(i, (w, 0.6))
        batches = rows_of(evaluation_shard(training, i, ROUNDS), PERSONAL)
        w_i, v_i, alpha_i = plain(training, w, v, alpha, batches, PERSONAL.lr)
        assert_close(initial, mix(alpha, v, w))
        assert_close(personalized, mix(alpha_i, v_i, w_i))


def play(method: Method, sizes: tuple[int, ...], engine: Engine) -> Tree:
    """w after every round, and every client's initial and personalized model at the end."""
    training, server = federation(method, engine, sizes, COHORT, dropout_net)
    played = [after.params for after in servers(training, server, ROUNDS)]
    broadcast = training.broadcast(server._replace(params=played[-1]), ROUNDS)
    return played, models(engine, training.federation, broadcast, list(range(len(sizes))), ROUNDS)


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: e.name)
def test_alpha_0_is_the_averaged_model(engine: Engine) -> None:
    """To round-off Reptile with outer lr 1, the unweighted mean; v is of no account, once deployed too."""
    ours = play(ApflMixture(0.0, False, LOCAL, PERSONAL), SIZES, engine)
    theirs = play(Reptile(LOCAL, PERSONAL), SIZES, engine)
    assert tree.same_structure(ours, theirs)
    for a, b in zip(tree.tensors(ours), tree.tensors(theirs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_alpha_0_with_equal_clients_is_fedavg() -> None:
    ours = play(ApflMixture(0.0, False, LOCAL, PERSONAL), (11,) * 7, ENGINES[1])
    theirs = play(FedAvg(LOCAL, PERSONAL), (11,) * 7, ENGINES[1])
    for a, b in zip(tree.tensors(ours), tree.tensors(theirs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: e.name)
def test_alpha_1_is_training_alone(engine: Engine) -> None:
    """From the w that it was first sent, v̄_i = v_i has seen its own batches and nothing else."""
    training, server = federation(ApflMixture(1.0, False, LOCAL, PERSONAL), engine, SIZES, COHORT, net)
    first: dict[int, Vector] = {}
    seen: dict[int, list[Tensor]] = {}
    for t, ours in enumerate(servers(training, server, ROUNDS)):
        for i, shard in cohort_shards(training, t):
            first.setdefault(i, dict(server.params))
            seen.setdefault(i, []).extend(rows_of(shard, LOCAL))
        server = ours
    broadcast = training.broadcast(server, ROUNDS)
    found = models(engine, training.federation, broadcast, EVERYONE, ROUNDS)
    for i, start in first.items():
        alone = train(training, start, seen[i], LOCAL.lr)
        assert_close(found[i][0], alone)
        batches = rows_of(evaluation_shard(training, i, ROUNDS), PERSONAL)
        assert_close(found[i][1], train(training, alone, batches, PERSONAL.lr))


def one_step(alpha: float, lr: float, v: int = 2, w: int = 1) -> tuple[Own, Params, Own, Params, Shard]:
    """(v, α) and w before and after a round of one full-batch step."""
    data = one_client(9)
    method, task = ApflMixture(alpha, local=Recipe(lr=lr, batch_size=0, steps=1)), Task(net)
    sent, before = task.init(w), Own(task.init(v), torch.full((), alpha))
    reply = method.client_update(task, Model(sent), before, data)
    return before, sent, reply.state, sent + reply.update, data


def test_each_moves_against_its_own_derivative() -> None:
    """w against df(w)/dw; v and α against the derivatives of f(αv + (1 − α)w) by v and α, by autograd."""
    before, w, after, w_after, data = one_step(0.3, 0.05)
    v_leaf = {k: p.clone().requires_grad_() for k, p in before.v.items()}
    w_leaf = {k: p.clone().requires_grad_() for k, p in w.items()}
    alpha = before.alpha.clone().requires_grad_()

    def f(at: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(functional_call(net(), at, (data._x,)), data._y)

    mixed = f({k: alpha * v_leaf[k] + (1 - alpha) * w[k] for k in w})
    *by_v, by_alpha = torch.autograd.grad(mixed, [*v_leaf.values(), alpha])
    by_w = torch.autograd.grad(f(w_leaf), list(w_leaf.values()))
    assert_close(after.v, minus(dict(before.v), 0.05, dict(zip(v_leaf, by_v, strict=True))))
    assert_close(w_after, minus(dict(w), 0.05, dict(zip(w_leaf, by_w, strict=True))))
    assert float(after.alpha) == pytest.approx(0.3 - 0.05 * float(by_alpha), abs=1e-6)
    assert abs(float(by_alpha)) > 0.01


def test_alpha_stays_between_0_and_1() -> None:
    """A step of any length ends at 0 or 1; with v and w exchanged and α = ½, the slope has the other sign."""
    assert float(one_step(0.5, 1e4, v=2, w=1)[2].alpha) == 1.0
    assert float(one_step(0.5, 1e4, v=1, w=2)[2].alpha) == 0.0


def test_the_replys_model_is_the_personal_one() -> None:
    assert_deploys_what_it_replies(ApflMixture())


def test_settings_that_make_no_sense_are_refused() -> None:
    for alpha in (-0.1, 1.1, float("nan")):
        with pytest.raises(ApieceError, match=r"alpha must lie in \[0, 1\]"):
            ApflMixture(alpha)
