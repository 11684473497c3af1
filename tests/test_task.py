import math

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.func import grad, vmap

from apiece.errors import ApieceError
from apiece.params import Params
from apiece.random import as_key
from apiece.shard import Batch, Rows, Shard
from apiece.task import Dropout, Task, cross_entropy, hinge, weighted_mean


def batch_of(x, y, weight=None, key=0):
    y = torch.as_tensor(y)
    weight = torch.ones(len(y)) if weight is None else torch.tensor(weight)
    return Batch(torch.as_tensor(x), y, weight, None, as_key(key))


def linear(**changes):
    return Task(lambda: nn.Linear(2, 3), **changes)


class Summed(nn.Module):
    """Two dropouts side by side on the same input, so that their masks can be compared."""

    def __init__(self, p=0.5):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.first, self.second = Dropout(p), Dropout(p)

    def forward(self, x):
        return self.scale * torch.stack([self.first(x), self.second(x)], -1)


# Loss and padding


def test_criterion_is_the_mean_over_real_examples():
    """Scores (0, ln 3), label 1: −ln(3/4) = ln(4/3). Label 0: ln 4. The third row is padding.
    Mean of the two: (ln(4/3) + ln 4) / 2 = ln(16/3) / 2."""
    task = Task(lambda: nn.Linear(2, 2))
    outputs = torch.tensor([[0.0, math.log(3)], [0.0, math.log(3)], [50.0, -50.0]])
    batch = batch_of(torch.zeros(3, 2), [1, 0, 1], [1.0, 1.0, 0.0])
    assert task.criterion(outputs, batch).item() == pytest.approx(math.log(16 / 3) / 2, rel=1e-6)


def test_weighted_mean_ignores_what_padding_computes():
    values = torch.tensor([1.0, 4.0, math.nan, math.inf])
    assert weighted_mean(values, torch.tensor([1.0, 1.0, 0.0, 0.0])).item() == 2.5
    assert weighted_mean(values, torch.zeros(4)).item() == 0.0


def test_an_example_of_several_values_counts_their_mean():
    """(1 + 3) / 2 and (5 + 7) / 2; what padding computes may be anything."""
    values = torch.tensor([[1.0, 3.0], [5.0, 7.0], [torch.nan, 9.0]])
    assert weighted_mean(values, torch.tensor([1.0, 1.0, 0.0])).item() == 4.0


@pytest.mark.parametrize("losses", [cross_entropy, hinge])
def test_padding_changes_neither_objective_nor_gradient(losses):
    task = Task(lambda: nn.Sequential(nn.Linear(2, 8), Dropout(0.5), nn.Linear(8, 3)), losses)
    params = task.init(1)
    x = torch.tensor([[1.0, -2.0], [0.5, 3.0]])
    filler = torch.tensor([[100.0, -70.0], [9.0, 9.0]])
    plain = batch_of(x, [0, 2], key=5)
    padded = batch_of(torch.cat([x, filler]), [0, 2, 1, 1], [1.0, 1.0, 0.0, 0.0], key=5)
    torch.testing.assert_close(task.objective(params, padded), task.objective(params, plain))
    torch.testing.assert_close(task.loss(params, padded), task.loss(params, plain))
    expected, *others = (grad(task.objective)(params, b) for b in (plain, padded, plain._replace(full=True)))
    for got in others:
        torch.testing.assert_close(dict(got), dict(expected))


def test_a_batch_of_padding_has_no_loss_and_no_gradient():
    task = linear()
    params = task.init(0)
    empty = batch_of(torch.ones(2, 2), [0, 1], [0.0, 0.0])
    assert task.loss(params, empty).item() == 0.0
    assert grad(task.objective)(params, empty).sqnorm().item() == 0.0


@pytest.mark.parametrize(
    ("scores", "label", "loss"),
    [
        ((2.0, 0.5, -1.0), 0, 0.0),  # 1 + 0.5 − 2 < 0: outside the margin
        ((2.0, 1.5, -1.0), 0, 0.5),  # 1 + 1.5 − 2
        ((2.0, 1.5, -1.0), 2, 4.0),  # 1 + 2 − (−1)
        ((0.0, 0.0, 0.0), 1, 1.0),
    ],
)
def test_hinge(scores, label, loss):
    assert hinge(torch.tensor([scores]), torch.tensor([label])).tolist() == pytest.approx([loss])


def test_hinge_of_two_classes_is_the_binary_one():
    """max(0, 1 − t·f) with margin f = s₁ − s₀ and t = ±1."""
    scores = torch.randn(50, 2, generator=torch.Generator().manual_seed(0))
    y = torch.arange(50) % 2
    f, t = (scores[:, 1] - scores[:, 0]).tolist(), (2 * y - 1).tolist()
    binary = [max(0.0, 1.0 - ti * fi) for ti, fi in zip(t, f, strict=True)]
    assert min(binary) == 0.0 < max(binary)
    assert hinge(scores, y).tolist() == pytest.approx(binary, abs=1e-6)


# Metrics


def test_accuracy_counts_real_examples_only():
    """Predictions 0, 1, 1, 0 for labels 0, 1, 0, 0; the last is padding: 2 of 3."""
    outputs = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0], [1.0, 0.0]])
    batch = batch_of(torch.zeros(4, 2), [0, 1, 0, 0], [1.0, 1.0, 1.0, 0.0])
    task = Task(lambda: nn.Linear(2, 2))
    values = task.metrics(outputs, batch)
    assert values["accuracy"].item() == pytest.approx(2 / 3)
    # Cross-entropy of scores one apart: ln(1 + 1/e) where right, ln(1 + e) where wrong.
    expected = (2 * math.log(1 + math.exp(-1)) + math.log(1 + math.e)) / 3
    assert values["loss"].item() == pytest.approx(expected, rel=1e-6)
    assert list(values) == ["accuracy", "loss"]


@pytest.mark.parametrize("rows", [0, 2])
def test_metrics_of_an_empty_shard_are_nan(rows):
    """Also a measure that would answer 0."""
    task = linear(measures={"hits": lambda outputs, batch: (outputs.argmax(-1) == batch.y).float().sum()})
    batch = batch_of(torch.zeros(rows, 2), torch.zeros(rows, dtype=torch.long), [0.0] * rows)
    values = task.metrics(task.predict(task.init(0), batch.x), batch)
    assert set(values) == {"hits", "loss"}
    assert all(value.isnan() for value in values.values())


def test_the_headline_is_the_first_measure():
    assert linear().headline == "accuracy"


# Objective


def test_penalties_change_the_objective_and_not_the_loss():
    """λ‖w‖²/2 adds λ·w to the gradient; two penalties add up; the outputs are those of the forward pass."""
    task = linear()
    params = task.init(3)
    batch = batch_of(torch.tensor([[1.0, 2.0]]), [1])
    seen = []

    def ridge(w, b, outputs):
        seen.append(outputs)
        return 0.25 * w.sqnorm()

    penalized = task.penalized(ridge).penalized(lambda w, b, outputs: 3.0 * b.weight.sum())
    loss = task.loss(params, batch)
    assert penalized.loss(params, batch).item() == loss.item()
    assert task.objective(params, batch).item() == loss.item()
    assert penalized.objective(params, batch).item() == pytest.approx(
        loss.item() + 0.25 * params.sqnorm().item() + 3.0, rel=1e-6
    )
    torch.testing.assert_close(seen[0], task.predict(params, batch.x))
    expected = grad(task.loss)(params, batch) + 0.5 * params
    torch.testing.assert_close(dict(grad(penalized.objective)(params, batch)), dict(expected))


# Dropout


def test_without_a_key_dropout_is_off():
    task = Task(Summed)
    x = torch.rand(20, 5)
    outputs = task.predict(task.init(0), x)
    assert torch.equal(outputs, torch.stack([x, x], -1))
    batch = batch_of(x, torch.zeros(20, dtype=torch.long), key=1)
    on = Task(lambda: nn.Sequential(nn.Linear(5, 4), Dropout(0.5)))
    params = on.init(0)
    assert on.loss(params, batch).item() != on.objective(params, batch).item()
    assert on.loss(params, batch).item() == on.loss(params, batch._replace(key=as_key(2))).item()


def test_dropout_outside_a_task_is_off():
    assert torch.equal(Dropout(0.9)(torch.ones(10)), torch.ones(10))


def test_a_key_is_a_mask():
    task = Task(Summed)
    params, x = task.init(0), torch.rand(20, 5) + 1.0
    draw = lambda key: task.predict(params, x, as_key(key))  # noqa: E731
    assert torch.equal(draw(7), draw(7))
    assert not torch.equal(draw(7), draw(8))
    first, second = draw(7).unbind(-1)
    assert not torch.equal(first, second)


def test_kept_values_are_scaled_and_dropped_at_the_rate():
    """With p = 0.25 and 40 000 draws the standard error of the rate is √(p(1−p)/n) ≈ 0.0022."""
    task = Task(lambda: Summed(0.25))
    outputs = task.predict(task.init(0), torch.ones(400, 50), as_key(3))
    assert outputs.unique().tolist() == pytest.approx([0.0, 4 / 3])
    rate = (outputs == 0).float().mean().item()
    assert rate == pytest.approx(0.25, abs=5 * 0.0022)
    assert outputs.mean().item() == pytest.approx(1.0, abs=5 * 0.0022 * 4 / 3)


def test_the_mask_of_the_first_rows_does_not_depend_on_their_number():
    task = Task(Summed)
    params, x = task.init(0), torch.ones(9, 4)
    long, short = task.predict(params, x, as_key(1)), task.predict(params, x[:5], as_key(1))
    assert torch.equal(long[:5], short)


def test_dropout_under_vmap_is_the_loop():
    task = Task(Summed)
    params = task.init(0)
    x = torch.rand(3, 6, 4) + 1.0
    keys = torch.tensor([11, -5, 2**40])
    together = vmap(lambda x, key: task.predict(params, x, key))(x, keys)
    for i in range(3):
        assert torch.equal(together[i], task.predict(params, x[i], keys[i]))


def test_a_forward_pass_inside_another_does_not_move_its_mask():
    """A penalty that predicts with another key leaves the objective's own draws alone."""
    task = Task(Summed)
    params, x = task.init(0), torch.ones(4, 4)

    class Nested(Summed):
        def forward(self, x):
            first = self.first(x)
            task.predict(params, x, as_key(99))
            return self.scale * torch.stack([first, self.second(x)], -1)

    nested = Task(Nested)
    assert torch.equal(nested.predict(params, x, as_key(1)), task.predict(params, x, as_key(1)))


@pytest.mark.parametrize("p", [-0.1, 1.0, math.nan])
def test_impossible_rates_are_refused(p):
    with pytest.raises(ValueError, match="dropout probability"):
        Dropout(p)


# Initialisation and the server's own


def test_init_is_a_function_of_the_key():
    task = linear()
    first, again, other = task.init(5), task.init(5), task.init(6)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["weight"], other["weight"])
    assert all(torch.isfinite(t).all() for t in task.init(-1).values())


def test_init_leaves_the_global_generator_alone():
    torch.manual_seed(4)
    expected = torch.rand(3)
    torch.manual_seed(4)
    linear().init(123)
    assert torch.equal(torch.rand(3), expected)


def test_init_does_not_depend_on_the_global_generator():
    task = linear()
    torch.manual_seed(1)
    first = task.init(9)
    torch.manual_seed(2)
    assert torch.equal(first["weight"], task.init(9)["weight"])


def test_init_gives_parameters_of_its_own():
    task = linear()
    params = task.init(0)
    params["weight"].zero_()
    assert task.init(0)["weight"].abs().sum() > 0
    assert not params["weight"].requires_grad


def test_predict_reads_the_given_params():
    """x·Wᵀ + b with W = 2·(rows of ones), b = 1: x = (1, 3) gives 2·4 + 1 = 9 for each class."""
    params = Params({"weight": torch.full((3, 2), 2.0), "bias": torch.ones(3)})
    assert linear().predict(params, torch.tensor([[1.0, 3.0]])).tolist() == [[9.0, 9.0, 9.0]]


def test_a_parameter_in_two_places_is_given_to_both():
    """Tied: (x W) Wᵀ with W = (1, 2), of the one name W has: x (1 + 4)."""

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.down, self.up = nn.Linear(2, 1, bias=False), nn.Module()
            self.up.weight = self.down.weight

        def forward(self, x):
            return self.down(x) @ self.up.weight

    task = Task(Tied)
    w = Params({"down.weight": torch.tensor([[1.0, 2.0]])})
    assert task.predict(w, torch.tensor([[1.0, 0.0]])).tolist() == [[1.0, 2.0]]
    assert task.predict(w, torch.tensor([[0.0, 1.0]])).tolist() == [[2.0, 4.0]]


def test_an_error_in_the_model_leaves_its_own_parameters_in_place():
    task = linear()
    before = {name: id(p) for name, p in task.module.named_parameters()}
    with pytest.raises(RuntimeError, match="shapes"):
        task.predict(task.init(0), torch.zeros(1, 5))
    assert {name: id(p) for name, p in task.module.named_parameters()} == before


def test_clients_get_neither_proxy_nor_prior():
    index = torch.arange(2)
    proxy = Shard(torch.zeros(2, 2), index, Rows(index, torch.tensor(2), as_key(0), as_key(0)), True)
    task = linear(proxy=proxy, prior=linear().init(0)).penalized(lambda w, b, outputs: w.sqnorm())
    client = task.for_clients()
    assert client.proxy is None
    assert client.prior is None
    assert (client.module, client.losses, client.penalties) == (task.module, task.losses, task.penalties)
    assert task.proxy is proxy


def test_a_forward_that_is_computed_anew_in_the_backward_is_refused() -> None:
    """By then the module's own parameters are back in their places: the gradient would be theirs."""

    class Thrifty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            again: torch.Tensor = torch.utils.checkpoint.checkpoint(self.layer, x, use_reentrant=False)
            return again

    task = Task(Thrifty)
    params = task.init(0).map(lambda p: p.requires_grad_())
    with pytest.raises(RuntimeError, match=r"models cannot use torch\.utils\.checkpoint"):
        task.predict(params, torch.ones(4, 3))


def test_a_model_is_called_with_all_of_its_params() -> None:
    """A layer that is left out would be the one that the task was built with."""
    task = Task(lambda: nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)))
    w = task.init(0)
    body, _ = w.split(("0",))
    with pytest.raises(ApieceError, match=r"not without 1\.bias, 1\.weight$"):
        task.predict(body, torch.zeros(1, 3))
    with pytest.raises(ApieceError, match=r"not with 2\.bias$"):
        task.predict(w | Params({"2.bias": torch.zeros(2)}), torch.zeros(1, 3))
