import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad

from apiece import ApieceError, Batch, Dropout, Params, Task
from apiece.penalty import Memory, check_elastic, elastic, kl

ONE = torch.ones(())


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def batch(n: int = 6) -> Batch:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(n, 5, generator=draw, dtype=torch.float64)
    y = torch.randint(3, (n,), generator=draw)
    return Batch(x, y, torch.ones(n), None, torch.zeros((), dtype=torch.int64))


def assert_close(a: Params, b: Params, tolerance: float) -> None:
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=tolerance, atol=tolerance)


def test_kl_by_hand() -> None:
    """KL((1/2, 1/2) ‖ (1/4, 3/4)) = ½ ln 2 + ½ ln ⅔; the other way round it would be ¼ ln ½ + ¾ ln 3/2.

    The second example equals its target (0); the third is padding.
    """
    half, quarter, anything = torch.zeros(2), torch.tensor([1.0, 3.0]).log(), torch.tensor([9.0, -9.0])
    target, outputs = torch.stack([half, half, half]), torch.stack([quarter, half, anything])
    value = kl(target, outputs, torch.tensor([1.0, 1.0, 0.0]))
    assert float(value) == pytest.approx((0.5 * math.log(2) + 0.5 * math.log(2 / 3)) / 2)


def test_kl_of_certain_predictions_is_finite() -> None:
    outputs = torch.tensor([[200.0, -200.0]])
    value, slope = kl(-outputs, outputs, torch.ones(1)), grad(kl, argnums=1)(-outputs, outputs, torch.ones(1))
    assert float(value) == pytest.approx(400.0)
    assert slope.isfinite().all()


@pytest.mark.parametrize("alpha", [0.1, 1.0, 7.0])
def test_the_constrained_loss_is_cross_entropy_with_smoothed_targets(alpha: float) -> None:
    """Eq. 13: CE(y, p) + α KL(p̂ ‖ p) = (1 + α) CE(q, p) + α Σ p̂ log p̂ with q = (y + α p̂) / (1 + α)."""
    task, data = Task(net), batch()
    theta, theta_hat = task.init(1), task.init(2)
    p_hat = task.predict(theta_hat, data.x).softmax(-1)
    q = (F.one_hot(data.y, 3) + alpha * p_hat) / (1 + alpha)
    constant = alpha * (p_hat * p_hat.log()).sum(-1).mean()

    def smoothed(w: Params) -> Tensor:
        return (1 + alpha) * -(q * task.predict(w, data.x).log_softmax(-1)).sum(-1).mean()

    objective = elastic(task, Memory(theta_hat, ONE), alpha, "kl").objective
    torch.testing.assert_close(objective(theta, data), smoothed(theta) + constant, rtol=1e-12, atol=0)
    assert_close(grad(objective)(theta, data), grad(smoothed)(theta), 1e-12)


def test_l2_adds_twice_alpha_times_the_distance_to_the_gradient() -> None:
    task, data = Task(net), batch()
    theta, theta_hat = task.init(1), task.init(2)
    with_l2 = grad(elastic(task, Memory(theta_hat, ONE), 0.3, "l2").objective)(theta, data)
    assert_close(with_l2, grad(task.objective)(theta, data) + 0.6 * (theta - theta_hat), 1e-12)


def test_the_remembered_model_predicts_without_dropout() -> None:
    task, data = Task(lambda: nn.Sequential(Dropout(0.5), nn.Linear(5, 3).double())), batch()
    theta, theta_hat = task.init(1), task.init(2)
    added = elastic(task, Memory(theta_hat, ONE), 2.0, "kl").objective(theta, data) - task.objective(
        theta, data
    )
    outputs = task.predict(theta, data.x, data.key)
    torch.testing.assert_close(added, 2.0 * kl(task.predict(theta_hat, data.x), outputs, data.weight))
    assert not torch.equal(outputs, task.predict(theta, data.x))


@pytest.mark.parametrize("constraint", ["kl", "l2"])
def test_what_is_not_known_adds_exactly_nothing(constraint: str) -> None:
    task, data = Task(net), batch()
    theta, nothing = task.init(1), Memory(task.init(2), torch.zeros(()))
    gradient = grad(elastic(task, nothing, 1e3, constraint).objective)(theta, data)
    expected = grad(task.objective)(theta, data)
    assert all(torch.equal(gradient[name], expected[name]) for name in expected)


def test_without_weight_the_task_is_left_alone() -> None:
    task = Task(net)
    assert elastic(task, Memory(task.init(2), ONE), 0.0, "kl") is task


def test_a_memory_changes_only_when_its_client_took_part() -> None:
    task = Task(net)
    old, new = task.init(1), task.init(2)
    memory = Memory(old, torch.zeros(()))
    missed, took = (memory.updated(new, torch.tensor(part)) for part in (False, True))
    assert (float(missed.known), float(took.known)) == (0.0, 1.0)
    assert all(torch.equal(missed.theta[n], old[n]) and torch.equal(took.theta[n], new[n]) for n in old)


@pytest.mark.parametrize(
    ("alpha", "constraint", "told"),
    [
        (0.5, "l1", "unknown constraint 'l1'"),
        (-0.1, "kl", "alpha"),
        (math.nan, "kl", "alpha"),
        (math.inf, "l2", "alpha"),
    ],
)
def test_what_makes_no_sense_is_refused(alpha: float, constraint: str, told: str) -> None:
    with pytest.raises(ApieceError, match=told):
        check_elastic(alpha, constraint)
