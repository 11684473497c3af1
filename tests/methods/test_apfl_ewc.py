"""APFL-EWC against FedAvg, against hand sums and against a plain PyTorch loop."""

import math
from statistics import fmean, pstdev
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from apiece import ApieceError, Params, Recipe, Task, check_method, tree
from apiece.engines.base import Engine
from apiece.engines.sequential import Sequential
from apiece.engines.vectorized import Vectorized
from apiece.evaluate import models
from apiece.methods.apfl_ewc import Answer, ApflEwc, Own, compose, join
from apiece.methods.fedavg import FedAvg
from apiece.train import Closed, Training
from tests.methods.test_fedavg import cohort_batches
from tests.worlds import CPU, federation, linear_net, servers

SIZES = (7, 23, 1, 12)
ENGINES = pytest.mark.parametrize("engine", [Sequential(CPU), Vectorized(CPU, 8)], ids=lambda e: e.name)
NEVER = 10**6


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))


def conv_net() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 5)), nn.Conv1d(1, 4, 2), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(16, 3)
    )


def closed_rounds(training: Training, server: Any, rounds: int) -> list[Closed]:
    with torch.no_grad():
        return list(training.rounds(server, 0, rounds))


def close(ours: Any, reference: dict[str, Tensor]) -> None:
    assert ours.keys() == reference.keys()
    for name, value in reference.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=1e-6)


def test_it_keeps_every_rule_when_decomposed_from_the_first_round() -> None:
    """The suite runs four rounds, of which the default decomposes one."""
    check_method(ApflEwc(z=-1, preserving=True))


@ENGINES
def test_without_penalty_and_decomposition_it_is_fedavg(engine: Engine) -> None:
    recipe = Recipe(lr=0.2, momentum=0.5, batch_size=5, epochs=2)
    found = []
    for method in (FedAvg(local=recipe), ApflEwc(mu=0.0, z=NEVER, local=recipe)):
        training, server = federation(method, engine, SIZES, 3)
        params = [after.params for after in servers(training, server, 4)]
        broadcast = training.broadcast(server._replace(params=params[-1]), 4)
        with torch.no_grad():
            found.append((params, models(engine, training.federation, broadcast, [0, 1, 2, 3], 4)))
    for ours, theirs in zip(*(tree.leaves(result) for result in found), strict=True):
        assert torch.equal(ours, theirs)


def softmax_squares(w: Params, data: Any, clients: tuple[int, ...]) -> dict[str, Tensor]:
    """Σ p_k (mean gradient)² of multinomial logistic regression, whose gradient is (softmax − y) xᵀ."""
    total = {"weight": np.zeros((3, 5)), "bias": np.zeros(3)}
    n = sum(len(data.train[k]) for k in clients)
    for k in clients:
        rows = data.train[k]
        x, y = data.x[rows].double().numpy(), np.eye(3)[data.y[rows]]
        scores = x @ w["weight"].double().numpy().T + w["bias"].double().numpy()
        p = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
        total["weight"] += len(rows) / n * ((p - y).T @ x / len(rows)) ** 2
        total["bias"] += len(rows) / n * (p - y).mean(0) ** 2
    return {name: torch.as_tensor(value, dtype=torch.float32) for name, value in total.items()}


@ENGINES
def test_importance_is_the_sum_over_two_triggers(engine: Engine) -> None:
    """Asked in rounds 1 and 3: F is 0, then S(w¹), then λS(w¹) + S(w³), S by hand at the broadcast model."""
    method = ApflEwc(lam=0.5, z=1, preset=(1, 3), delta_mu=0.0, local=Recipe(lr=0.2, batch_size=5, epochs=1))
    training, server = federation(method, engine, (7, 12, 3), 3, linear_net)
    after = [server, *servers(training, server, 5)]
    at = [softmax_squares(s.params, training.federation.data, (0, 1, 2)) for s in after]
    twice = {name: 0.5 * at[1][name] + at[3][name] for name in at[1]}
    nothing = {name: torch.zeros_like(value) for name, value in at[1].items()}
    for server, expected in zip(after, (nothing, nothing, at[1], at[1], twice, twice), strict=True):
        close(server.importance, expected)


def algorithm_1(curve: list[float], window: int, delta_mu: float, delta_sigma: float) -> list[tuple]:
    """Lines 9-16 round by round: (plateau?, p, μ_old, σ_old)."""
    win: list[float] = []
    p, mu_old, sigma_old, out = False, 0.0, 0.0, []
    for loss in curve:
        win = [*win, loss][-window:]
        mu, sigma = fmean(win), pstdev(win)
        plateau = p and mu < delta_mu and sigma < delta_sigma
        if plateau:
            mu_old, sigma_old, p = mu, sigma, False
        if not p and mu > mu_old + sigma_old:
            p = True
        out.append((plateau, p, mu_old, sigma_old))
    return out


# Falls to a plateau, a peak above the threshold, one below it, one that never settles, a last plateau.
CURVE = [2.3, 1.8, 1.2, 0.8, 0.5, 0.42, 0.4, 0.41, 0.4, 1.9, 1.5, 0.9, 0.63, 0.5, 0.48, 0.47, 0.46]
CURVE += [0.7, 0.75, 0.6, 0.5, 0.45, 2.0, 0.2, 2.1, 0.3, 2.2, 0.4, 0.42, 0.41, 0.4, 0.4, 0.39]


@pytest.mark.parametrize(
    ("window", "thresholds", "curve", "plateaus"),
    [
        (3, (1.0, 0.5), CURVE, [4, 13, 29]),
        (5, (1.0, 0.5), CURVE, [6, 14, 31]),
        (1, (0.45, 0.5), CURVE, [5, 23, 25, 27, 29]),
        (3, (1.0, 0.05), CURVE, [6, 15, 29]),
        # Round 0 raises the peak after its plateau test, however low the loss is; a constant never rises.
        (2, (1.0, 0.5), [0.3] * 6, [1]),
        # A window that is not full counts what it holds: rounds 0-1 are 0.8 ± 0.1, 0-3 rise to 1.125.
        (5, (1.0, 0.5), [0.9, 0.7, 0.8, 2.1, 0.6, 0.5, 0.5, 0.5, 0.5], [1, 8]),
    ],
)
def test_plateaus_are_found_where_algorithm_1_says(
    window: int, thresholds: tuple[float, float], curve: list[float], plateaus: list[int]
) -> None:
    """The round after a plateau asks; F counts the rounds that asked (λ = 1, gradients of 1)."""
    reference = algorithm_1(curve, window, *thresholds)
    assert [t for t, step in enumerate(reference) if step[0]] == plateaus
    task = Task(linear_net)
    method = ApflEwc(window=window, delta_mu=thresholds[0], delta_sigma=thresholds[1], preset=(0, 2))
    training, server = federation(method, Sequential(CPU), SIZES, 3, linear_net)
    one = server.params.map(torch.ones_like)
    asked = []
    for t, (loss, (plateau, p, mu_old, sigma_old)) in enumerate(zip(curve, reference, strict=True)):
        ask = method.broadcast(server, training.round(t)).ask
        asked += [t] if ask else []
        answer = Answer(one.zeros(), torch.tensor(loss), one if ask else ())
        server = method.server_update(task, server, answer, training.round(t))
        assert (bool(server.flag), bool(server.watch.peak)) == (plateau, p)
        assert float(server.watch.mean) == pytest.approx(mu_old, abs=1e-6)
        assert float(server.watch.std) == pytest.approx(sigma_old, abs=1e-6)
        assert torch.equal(server.importance["bias"], torch.full((3,), float(len(asked))))
    assert asked == sorted({0, 2} | {t + 1 for t in plateaus if t + 1 < len(curve)})


def test_gradients_are_sent_only_when_asked_for() -> None:
    """A linear model of 18 floats: up go it and a loss, twice it when asked; down go it and F, always.

    Preset is round 1. The thresholds hold from the start: round 0 raises a peak, round 1 finds a plateau,
    round 2 is asked; the loss falls, so no peak comes after it.
    """
    method = ApflEwc(preset=(1,), delta_mu=100.0, delta_sigma=100.0, window=1, z=0, local=Recipe(lr=0.05))
    training, server = federation(method, Vectorized(CPU, 8), SIZES, 4, linear_net)
    closed = closed_rounds(training, server, 4)
    model, loss, clients = 18 * 4, 4, 4
    assert [done.bytes_up for done in closed] == [
        clients * (copies * model + loss) for copies in (1, 2, 2, 1)
    ]
    assert [done.bytes_down for done in closed] == [clients * 2 * model] * 4


def test_the_papers_start_jumps_and_the_preserving_one_does_not() -> None:
    """A linear model's outputs become 1 + σ(1) times as large with the paper's, and stay with the other."""
    outputs = {}
    for preserving in (False, True):
        method = ApflEwc(z=0, preserving=preserving, personal=Recipe(epochs=0))
        training, server = federation(method, Sequential(CPU), SIZES, 3, linear_net)
        f = training.federation
        pair = models(training.engine, f, training.broadcast(server, 1), [1], 1)[0]
        outputs[preserving] = [f.task.predict(params, f.data.x[:20]) for params in pair]
    before, after = outputs[True]
    assert (after - before).abs().max() < 1e-6
    before, after = outputs[False]
    torch.testing.assert_close(after, (1 + 1 / (1 + math.exp(-1))) * before)
    assert (after - before).abs().max() > 0.1


def test_a_convolution_is_decomposed_by_output_channel() -> None:
    """σ(±ln 3) = ¾, ¼. On an image of ones, channel 1 of w_S gives 10 + 1 and channel 2 of it −4 + 2;
    w_k adds 4·1 + 0.5 and 0 − 1: the outputs are ¾·11 + 4.5 = 12.75 and −¼·2 − 1 = −1.5.
    ∂output/∂m is σ(1 − σ) times w_S's own output: 3/16 · 11 and 3/16 · (−2).
    """
    task = Task(lambda: nn.Sequential(nn.Conv2d(1, 2, 2)))
    shared = Params(
        {
            "0.weight": torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]], [[[-1.0, -1.0], [-1.0, -1.0]]]]),
            "0.bias": torch.tensor([1.0, 2.0]),
        }
    )
    own = Params(
        {
            "0.weight": torch.stack([torch.ones(1, 2, 2), torch.zeros(1, 2, 2)]),
            "0.bias": torch.tensor([0.5, -1.0]),
        }
    )
    (name,) = ApflEwc().first(shared)[0]

    def outputs(m: Tensor) -> Tensor:
        joined = join(shared=shared, transfer=Params({name: m}), own=own)
        return task.predict(compose(joined), torch.ones(1, 1, 2, 2)).flatten()

    m = torch.tensor([math.log(3), -math.log(3)])
    torch.testing.assert_close(outputs(m), torch.tensor([12.75, -1.5]))
    slope: Any = torch.func.jacrev(outputs)(m)
    torch.testing.assert_close(slope, torch.diag(torch.tensor([33 / 16, -6 / 16])))


def test_engines_agree_on_convolutions_and_norms() -> None:
    """Transfer vectors: 4 channels of the convolution, 4 of the norm, 3 units of the dense layer."""
    method = ApflEwc(z=-1, local=Recipe(lr=0.1, batch_size=5, epochs=2))
    ends = []
    for engine in (Sequential(CPU), Vectorized(CPU, 8)):
        training, server = federation(method, engine, SIZES, 4, conv_net)
        *_, last = closed_rounds(training, server, 3)
        ends.append((last.server, training.federation.store.get([0, 1, 2, 3])))
    assert [tuple(m.shape) for m in ends[0][1].m.values()] == [(4, 4), (4, 4), (4, 3)]
    assert all((m != 1).any(1).all() for m in ends[0][1].m.values())
    for a, b in zip(*(tree.leaves(end) for end in ends), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_a_client_without_examples_stays_undecomposed() -> None:
    training, server = federation(ApflEwc(z=-1), Vectorized(CPU, 8), (0, 5), 2, linear_net)
    (last,) = closed_rounds(training, server, 1)
    assert training.federation.store.get([0, 1]).known.tolist() == [0.0, 1.0]
    empty, _ = models(training.engine, training.federation, training.broadcast(last.server, 1), [0], 1)[0]
    close(empty, dict(last.server.params))


def test_an_empty_window_is_refused() -> None:
    with pytest.raises(ApieceError, match="window must be at least 1"):
        ApflEwc(window=0)


LAYER = {"0.weight": "0", "0.bias": "0", "2.weight": "2", "2.bias": "2"}


def forward(w: dict[str, Tensor], x: Tensor) -> Tensor:
    return F.linear(F.relu(F.linear(x, w["0.weight"], w["0.bias"])), w["2.weight"], w["2.bias"])


def composed(w_s: dict[str, Tensor], m: dict[str, Tensor], w_k: dict[str, Tensor]) -> dict[str, Tensor]:
    if not m:
        return w_s
    scale = {name: torch.sigmoid(m[layer]) for name, layer in LAYER.items()}
    return {
        name: w * (scale[name][:, None] if w.dim() == 2 else scale[name]) + w_k[name]
        for name, w in w_s.items()
    }


def leaves(values: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().clone().requires_grad_() for name, value in values.items()}


MU, LAM, LR, WINDOW, Z = 30.0, 0.7, 0.2, 2, 2
Pair = tuple[dict[str, Tensor], dict[str, Tensor]]  # m_k, w_k


def squared_gradient(w: dict[str, Tensor], x: Tensor, y: Tensor) -> dict[str, Tensor]:
    point = leaves(w)
    F.cross_entropy(forward(point, x), y).backward()
    return {name: p.grad**2 for name, p in point.items()}  # type: ignore[operator]


def trained(
    w_t: dict[str, Tensor], importance: dict[str, Tensor], pair: Pair, batches: list[tuple[Tensor, Tensor]]
) -> tuple[dict[str, Tensor], Pair]:
    """Eq. (6) by torch.optim over w_S, m and w_k; over w_S alone where the pair is empty."""
    w_s, m, w_k = leaves(w_t), leaves(pair[0]), leaves(pair[1])
    sgd = torch.optim.SGD([*w_s.values(), *m.values(), *w_k.values()], lr=LR)
    for x, y in batches:
        sgd.zero_grad()
        value = F.cross_entropy(forward(composed(w_s, m, w_k), x), y)
        for name, w in w_s.items():
            value = value + MU / 2 * (importance[name] * (w - w_t[name]) ** 2).sum()
        value.backward()
        sgd.step()
    w_s, m, w_k = ({name: w.detach() for name, w in part.items()} for part in (w_s, m, w_k))
    return w_s, (m, w_k)


@ENGINES
@pytest.mark.parametrize("preserving", [False, True])
def test_equals_a_plain_loop(engine: Engine, preserving: bool) -> None:
    """Six rounds, 3-5 decomposed; gradients are asked for in round 0 and after the plateau of round 1."""
    method = ApflEwc(
        mu=MU,
        lam=LAM,
        z=Z,
        window=WINDOW,
        delta_mu=10.0,
        delta_sigma=10.0,
        preset=(0,),
        preserving=preserving,
        local=Recipe(lr=LR, batch_size=5, epochs=2),
    )
    training, server = federation(method, engine, SIZES, 3, two_layers)
    x, y = training.federation.data.x, training.federation.data.y
    w_t = dict(server.params)
    importance = {name: torch.zeros_like(w) for name, w in w_t.items()}
    kept: dict[int, Pair] = {}
    born: dict[int, int] = {}  # client → the round that made its m_k and w_k
    losses: list[float] = []
    asked: list[int] = []
    flag = False
    factor = 1 - 1 / (1 + math.exp(-1)) if preserving else 1.0

    for t, done in enumerate(closed_rounds(training, server, 6)):
        cohort = cohort_batches(training, t, 2)
        total = sum(size for size, _ in cohort)
        average, squares = ({name: torch.zeros_like(w) for name, w in w_t.items()} for _ in range(2))
        losses.append(0.0)
        for k, (size, order) in zip(done.ids, cohort, strict=True):
            rows, p_k = torch.as_tensor(training.federation.data.train[k]), size / total
            before = composed(w_t, *kept.get(k, ({}, {})))
            losses[-1] += p_k * float(F.cross_entropy(forward(before, x[rows]), y[rows]))
            if t - Z > 0 and k not in kept:
                kept[k] = ({"0": torch.ones(4), "2": torch.ones(3)}, {n: factor * w for n, w in w_t.items()})
                born[k] = t
            batches = [(x[batch], y[batch]) for batch in order]
            w_s, pair = trained(w_t, importance, kept.get(k, ({}, {})), batches)
            for name, g2 in squared_gradient(w_t, x[rows], y[rows]).items():
                average[name] += p_k * w_s[name]
                squares[name] += p_k * g2
            if k in kept:
                kept[k] = pair
        w_t = average
        if t == 0 or flag:
            asked.append(t)
            importance = {name: LAM * old + squares[name] for name, old in importance.items()}
        flag = algorithm_1(losses, WINDOW, 10.0, 10.0)[-1][0]

        close(done.server.params, w_t)
        close(done.server.importance, importance)
        assert done.server.watch.losses.tolist() == pytest.approx([0.0, *losses][-WINDOW:], abs=1e-5)
        assert bool(done.server.flag) == flag
        known = sum(born.get(k, t) < t for k in done.ids)
        assert float(done.metrics["known"]) == pytest.approx(known / 3)

    assert asked == [0, 2]
    assert sorted(born.values()) == [3, 3, 3, 5]
    states: Own = training.federation.store.get([0, 1, 2, 3])
    broadcast = training.broadcast(done.server, 6)
    with torch.no_grad():
        found = models(engine, training.federation, broadcast, [0, 1, 2, 3], 6)
    for k, (m, w_k) in kept.items():
        close(tree.take(states.m, k), {f"{layer}[{len(v)}]": v for layer, v in m.items()})
        close(tree.take(states.w, k), w_k)
        close(found[k][0], composed(w_t, m, w_k))
