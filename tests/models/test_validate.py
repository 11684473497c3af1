import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from apiece.errors import ApieceError
from apiece.models import MODELS, build, fix
from apiece.models.validate import problems, validate
from apiece.random import as_key
from apiece.task import Dropout, Task

ENGINES = ["sequential", "vectorized", "auto"]


class Net(nn.Module):
    """One layer, and whatever `trick` does to its outputs."""

    def __init__(self, trick):
        super().__init__()
        self.fc = nn.Linear(6, 3)
        self.trick = trick

    def forward(self, x):
        return self.trick(self.fc(x))


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.cell = kind(2, 3, batch_first=True)

    def forward(self, x):
        return self.cell(x.reshape(-1, 3, 2))[0][:, -1]


def found(model, engine="sequential", input_shape=(6,), classes=3):
    return problems(Task(lambda: model), engine, input_shape, classes)


def conv(*layers):
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), *layers, nn.Flatten(), nn.Linear(4 * 16, 3))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", [*sorted({*MODELS} - {"din", "lstm"}), "mlp(norm=True)", "cnn(norm=True)"])
def test_the_registered_models_are_sound(name, engine):
    validate(build(name, (144,), 10), engine, (144,), 10)


def rows(history=4):
    """One viewer and one film, as movielens gives them."""
    names = ("user", "gender", "age", "occupation", "zip", "item")
    x = {name: torch.zeros(1, dtype=torch.int16) for name in names}
    return {**x, "history": torch.zeros(1, history, dtype=torch.int16)}, torch.zeros(1, dtype=torch.int64)


TEXT = torch.zeros(1, 7, dtype=torch.int8), torch.zeros(1, 7, dtype=torch.int64)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("name", "classes", "like"), [("din", 2, rows()), ("lstm(hidden=5)", 10, TEXT)])
def test_the_models_of_other_inputs_are_sound(name, classes, like, engine):
    validate(build(name, (), classes), engine, (), classes, like)


@pytest.mark.parametrize(
    ("name", "like", "message"),
    [
        ("mlp", rows(), r"the model must take a batch of user \(n\), .*history \(n, 4\)"),
        ("din", (torch.zeros(1, 6), torch.zeros(1)), r"the model must take a batch of shape \(n, 6\)"),
        ("lstm(hidden=5)", (TEXT[0], torch.zeros(1)), r"is \(3, 7, 2\) .*of shape \(n, classes\)"),
        ("logistic", (torch.zeros(1, 1), TEXT[1]), r"is \(3, 2\) .*of shape \(n, 7, classes\)"),
    ],
)
def test_a_model_for_other_data_is_told_what_it_must_take(name, like, message):
    with pytest.raises(ApieceError, match=message):
        validate(build(name, (), 2), "auto", (), 2, like)


def test_bytes_are_tried_as_pixels():
    """All bytes 0 would hide what a layer does to them; the model is given numbers from 0 to 1."""
    seen = []
    task = Task(lambda: Net(lambda h: seen.append(h) or h))
    assert problems(task, "sequential", (), 3, (torch.zeros(1, 6, dtype=torch.uint8), TEXT[1][:, 0])) == []
    assert seen[0].dtype is torch.float32
    assert seen[0].std() > 0


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("layer", "why", "cure"),
    [
        (nn.BatchNorm2d(4), "BatchNorm2d keeps running statistics", "GroupNorm"),
        (nn.BatchNorm2d(4, track_running_stats=False), "over the batch, padding included", "GroupNorm"),
        (
            nn.InstanceNorm2d(4, track_running_stats=True),
            "keeps running statistics",
            "track_running_stats=False",
        ),
        (nn.Dropout(0.2), "Dropout .*global generator", "apiece.task.Dropout: `return apiece.models.fix"),
        (nn.Dropout2d(0.2), "Dropout2d .*global generator", "apiece.models.fix"),
        (nn.AlphaDropout(0.2), "AlphaDropout .*global generator", "no keyed alpha dropout"),
    ],
)
def test_layers_refused_on_every_engine(layer, why, cure, engine):
    (problem,) = found(conv(layer), engine, (1, 4, 4))
    assert problem.where == "1"
    assert re.search(why, problem.why)
    assert cure in problem.fix


@pytest.mark.parametrize(
    "layer",
    [nn.GroupNorm(2, 4), nn.InstanceNorm2d(4), nn.Dropout(0.0), Dropout(0.3), nn.LayerNorm((4, 4, 4))],
)
def test_layers_allowed_on_every_engine(layer):
    assert found(conv(layer), "vectorized", (1, 4, 4)) == []


@pytest.mark.parametrize("function", ["dropout", "alpha_dropout"])
@pytest.mark.parametrize("training", [False, True])
def test_functional_dropout_is_refused(function, training):
    class Functional(Net):
        def forward(self, x):
            return getattr(F, function)(self.fc(x), 0.5, training=training)

    (problem,) = found(Functional(None))
    assert problem.where == f"torch.nn.functional.{function}"
    assert "apiece.task.Dropout" in problem.fix


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("trick", [lambda h: h + torch.rand(3), lambda h: h * torch.randn_like(h)])
def test_draws_from_the_global_generator_are_refused(trick, engine):
    (problem,) = found(nn.Sequential(nn.Dropout(0.0), Net(trick)), engine)
    assert problem.where == "forward pass"
    assert "global generator" in problem.why


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_need_the_sequential_engine(kind):
    for engine in ("sequential", "auto"):
        assert found(Recurrent(kind), engine) == []
    (problem,) = found(Recurrent(kind), "vectorized")
    assert problem.where == "cell"
    assert problem.fix == "--engine sequential"


@pytest.mark.parametrize(
    "trick",
    [
        lambda h: h * h.sum().item(),
        lambda h: h if h.sum() > 0 else -h,
        lambda h: h * (h.detach().numpy() > 0).mean(),
    ],
    ids=["item", "if", "numpy"],
)
def test_what_vmap_cannot_run_is_found_by_trying(trick):
    (problem,) = found(Net(trick), "vectorized")
    assert problem.where.startswith("training step")
    assert "\n" not in problem.why
    assert "Error: " in problem.why


def test_what_only_vmap_cannot_run_is_left_to_the_sequential_engine():
    branching = Net(lambda h: h if h.sum() > 0 else -h)
    for engine in ("sequential", "auto"):
        assert found(branching, engine) == []
    (problem,) = found(branching, "vectorized")
    assert problem.where == "training step under vmap"
    assert problem.why.startswith("RuntimeError: vmap: ")
    assert "--engine sequential" in problem.fix
    assert ".item()" in problem.fix


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("model", "where", "why"),
    [
        (nn.Flatten(), "the model", "no parameters"),
        (nn.Linear(6, 4), "output", r"is (3, 4) for 3 examples of 3 classes"),
        (Net(lambda h: h.sum(-1)), "output", "is (3,) for"),
        (Net(lambda h: (h, h)), "output", "is tuple for"),
        (nn.Linear(5, 3), "forward pass", "RuntimeError: mat1 and mat2"),
        (Net(lambda h: h.detach().numpy()), "output", "is ndarray for"),
    ],
)
def test_models_that_cannot_be_trained(model, where, why, engine):
    (problem,) = found(model, engine)
    assert problem.where == where
    assert why in problem.why


def test_a_step_that_fails_is_found_on_the_sequential_engine():
    class Stuck(torch.autograd.Function):
        @staticmethod
        def forward(x):
            return x.clone()

        @staticmethod
        def setup_context(context, inputs, output):
            pass

        @staticmethod
        def backward(context, gradient):
            raise NotImplementedError("no way back\nat all")

    (problem,) = found(Net(Stuck.apply))
    assert (problem.where, problem.why) == ("training step", "NotImplementedError: no way back")


def test_a_backward_pass_that_vmap_cannot_run_is_found():
    class Measured(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x):
            return x.clone()

        @staticmethod
        def setup_context(context, inputs, output):
            pass

        @staticmethod
        def backward(context, gradient):
            return gradient * min(1.0, gradient.norm().item())

    assert found(Net(Measured.apply)) == []
    (problem,) = found(Net(Measured.apply), "vectorized")
    assert problem.where == "training step under vmap"


def test_validate_lists_every_problem_with_its_fix():
    model = conv(nn.BatchNorm2d(4), nn.Dropout(0.5))
    with pytest.raises(ApieceError) as raised:
        validate(Task(lambda: model), "vectorized", (1, 4, 4), 5)
    first, *lines = str(raised.value).splitlines()
    assert "vectorized engine" in first
    assert [line.split(":")[0].strip() for line in lines] == ["1", "2", "output"]
    assert all("Fix: " in line for line in lines)


def test_validating_draws_nothing_from_the_global_generator():
    before = torch.get_rng_state()
    validate(build("mlp(dropout=0.5)", (6,), 3), "vectorized", (6,), 3)
    assert torch.equal(torch.get_rng_state(), before)


# fix


def test_a_fixed_model_is_sound():
    def factory():
        return fix(conv(nn.BatchNorm2d(4), nn.Dropout(0.5), nn.Dropout2d(0.5)))

    validate(Task(factory), "vectorized", (1, 4, 4), 3)


@pytest.mark.parametrize(
    ("channels", "groups"),
    [(64, 32), (48, 24), (100, 25), (7, 7), (37, 1), (32, 32), (1, 1)],
)
def test_group_norm_has_the_largest_divisor_up_to_32(channels, groups):
    fixed = fix(nn.BatchNorm2d(channels))
    assert (fixed.num_groups, fixed.num_channels) == (groups, channels)


def test_group_norm_keeps_the_affine_parameters():
    norm = nn.BatchNorm2d(6, eps=0.25)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    model = nn.Sequential(nn.Conv2d(1, 6, 1), norm)
    names = [name for name, _ in model.named_parameters()]
    fixed = fix(model)
    assert fixed is model
    assert [name for name, _ in fixed.named_parameters()] == names
    assert fixed[1].weight is norm.weight
    assert fixed[1].bias is norm.bias
    assert fixed[1].eps == 0.25
    assert fix(nn.BatchNorm2d(6, affine=False)).weight is None


def test_flat_features_are_not_normalized_away():
    """With one channel in a group, (x − mean) = 0 and every example would come out alike."""
    fixed = fix(nn.BatchNorm1d(8))
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    expected = (x - x.mean(1, keepdim=True)) / (x.var(1, unbiased=False, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(fixed(x), expected)


def test_fix_reaches_nested_and_shared_layers():
    shared, norm = nn.Dropout(0.3), nn.BatchNorm1d(4)
    block = nn.Sequential(nn.Linear(4, 4), norm, shared)
    model = nn.Sequential(block, nn.ModuleDict({"again": norm, "drop": shared}), shared)
    fixed = fix(model)
    kinds = {type(module) for module in fixed.modules()}
    assert kinds.isdisjoint({nn.BatchNorm1d, nn.Dropout})
    assert fixed[0][1] is fixed[1]["again"]
    assert fixed[0][2] is fixed[1]["drop"] is fixed[2]
    assert (type(fixed[2]), fixed[2].p) == (Dropout, 0.3)


def test_fix_leaves_a_sound_model_as_it_is():
    model = nn.Sequential(nn.Linear(2, 2), Dropout(0.1), nn.GroupNorm(1, 2))
    layers = list(model)
    assert list(fix(model)) == layers


@pytest.mark.parametrize("kind", [nn.AlphaDropout, nn.FeatureAlphaDropout])
def test_alpha_dropout_has_no_fix(kind):
    with pytest.raises(ApieceError, match="cannot fix 1: there is no keyed alpha dropout"):
        fix(nn.Sequential(nn.Linear(2, 2), kind(0.1)))


@pytest.mark.parametrize(
    ("layer", "shape"),
    [(nn.Dropout1d, (6,)), (nn.Dropout2d, (3, 4)), (nn.Dropout3d, (2, 3, 2))],
)
def test_channel_dropout_drops_whole_channels(layer, shape):
    """Each of 200·50 channels is zero or doubled as a whole; the rate's standard error is 0.005."""
    model = nn.Sequential(fix(layer(0.5)), nn.Identity())
    task = Task(lambda: model)
    x = torch.rand(200, 50, *shape) + 1.0
    none = task.init(0)
    assert torch.equal(task.predict(none, x), x)
    scale = (task.predict(none, x, as_key(4)) / x).flatten(2)
    torch.testing.assert_close(scale, scale[..., :1].expand_as(scale))
    per_channel = scale[..., 0]
    dropped = per_channel.abs() < 1e-6
    torch.testing.assert_close(per_channel[~dropped], torch.full_like(per_channel[~dropped], 2.0))
    assert dropped.float().mean().item() == pytest.approx(0.5, abs=0.025)
    assert 0 < dropped[0].float().mean() < 1
    assert 0 < dropped[:, 0].float().mean() < 1
