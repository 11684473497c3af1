"""What a model may not do in a federation: refused with the reason and the fix, before round 0."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.overrides import TorchFunctionMode

from apiece import random, tree
from apiece.errors import ApieceError
from apiece.params import Params
from apiece.shard import Batch
from apiece.task import Dropout, Task
from apiece.tree import Tree

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
_CHANNEL_DROPOUTS = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
_ALPHA_DROPOUTS = (nn.AlphaDropout, nn.FeatureAlphaDropout)
_DROPOUTS = (nn.Dropout, *_CHANNEL_DROPOUTS, *_ALPHA_DROPOUTS)
_DROPOUT_FUNCTIONS = (
    F.dropout,
    F.dropout1d,
    F.dropout2d,
    F.dropout3d,
    F.alpha_dropout,
    F.feature_alpha_dropout,
)
_RECURRENT = (nn.RNN, nn.LSTM, nn.GRU)

_BY_FIX = "`return apiece.models.fix(model)` in your factory"
_NO_DRAWS = "is switched off here: it would draw from a global generator, and engines would disagree"
_NO_ALPHA = "there is no keyed alpha dropout: use apiece.task.Dropout, or leave it out"
_EXAMPLES = 3


class Problem(NamedTuple):
    where: str
    why: str
    fix: str

    def __str__(self) -> str:
        return f"{self.where}: {self.why}. Fix: {self.fix}"


Rows = tuple[Tree, Tensor]  # x and y of some examples


def validate(
    task: Task, engine: str, input_shape: tuple[int, ...], classes: int, like: Rows | None = None
) -> None:
    """Raise an ApieceError that lists every problem; `auto` is held to what the sequential engine needs."""
    found = problems(task, engine, input_shape, classes, like)
    if found:
        listed = "\n".join(f"  {problem}" for problem in found)
        raise ApieceError(f"this model cannot be trained with the {engine} engine:\n{listed}")


def problems(
    task: Task, engine: str, input_shape: tuple[int, ...], classes: int, like: Rows | None = None
) -> list[Problem]:
    """All that is wrong with the task's model, by looking at its layers and by trying one step.

    `like`: x and y of one example or more, where x is not one array of floats and y not one class.
    """
    vectorized = engine in ("vectorized", "processes(vectorized)")
    found = [
        problem
        for name, module in task.module.named_modules()
        for problem in _in_layer(name or "the model", module, vectorized)
    ]
    if next(task.module.parameters(), None) is None:
        return [*found, Problem("the model", "has no parameters: there is nothing to train", "add a layer")]
    layers = list(task.module.modules())
    look_for_dropout = not any(isinstance(layer, _DROPOUTS) for layer in layers)
    under_vmap = vectorized and not any(isinstance(layer, _RECURRENT) for layer in layers)
    like = (torch.zeros(1, *input_shape), torch.zeros(1, dtype=torch.int64)) if like is None else like
    x, y = _examples(like, classes, task.device)
    return [*found, *_when_tried(task, x, y, classes, look_for_dropout, under_vmap)]


def _examples(like: Rows, classes: int, device: torch.device) -> Rows:
    """Examples of two clients: floats and pixels at random, categories all 0, each label in turn."""
    draw = torch.Generator().manual_seed(0)

    def made(leaf: Tensor) -> Tensor:
        shape = (2, _EXAMPLES, *leaf.shape[1:])
        if leaf.dtype is torch.uint8:
            return torch.randint(0, 256, shape, dtype=torch.uint8, generator=draw).to(device)
        if leaf.is_floating_point():
            return torch.rand(shape, generator=draw).to(device)
        return torch.zeros(shape, dtype=leaf.dtype, device=device)

    x, y = like
    labels = torch.arange(_EXAMPLES, device=device).reshape(-1, *[1] * (y.ndim - 1)) % classes
    return tree.map(made, x), labels.expand(_EXAMPLES, *y.shape[1:])


def _in_layer(name: str, module: nn.Module, vectorized: bool) -> Iterator[Problem]:
    kind = type(module).__name__
    if isinstance(module, _BATCH_NORMS):
        shared = (
            "keeps running statistics, a state that clients would share"
            if module.track_running_stats
            else "normalizes over the batch, padding included"
        )
        yield Problem(name, f"{kind} {shared}", f"GroupNorm: {_BY_FIX}")
    elif isinstance(module, _INSTANCE_NORMS) and module.track_running_stats:
        why = f"{kind} keeps running statistics, a state that clients would share"
        yield Problem(name, why, "track_running_stats=False")
    elif isinstance(module, _DROPOUTS) and module.p > 0:
        cure = _NO_ALPHA if isinstance(module, _ALPHA_DROPOUTS) else f"apiece.task.Dropout: {_BY_FIX}"
        yield Problem(name, f"{kind} {_NO_DRAWS}", cure)
    elif isinstance(module, _RECURRENT) and vectorized:
        yield Problem(name, f"vmap cannot run the forward pass of {kind}", "--engine sequential")


def _when_tried(
    task: Task, x: Tree, y: Tensor, classes: int, look_for_dropout: bool, under_vmap: bool
) -> Iterator[Problem]:
    """Two tiny clients take one step; the first step that fails is the last that is tried."""
    params = task.init(0)
    first = tree.take(x, 0)
    key = random.as_key(0, task.device)

    def forward(w: Params, x: Tree) -> Any:
        return task.predict(w, x)

    def step(w: Params, x: Tree) -> Params:
        batch = Batch(x, y, torch.ones(_EXAMPLES, device=task.device), None, key)
        gradient: Params = grad(task.objective)(w, batch)
        return w - gradient

    calls = _DropoutCalls()
    try:
        with calls:
            outputs = forward(params, first)
    except Exception as error:
        takes = f"the model must take {_described(x)}"
        yield Problem("forward pass", _first_line(error), takes)
        return
    dropouts = sorted(calls.names) if look_for_dropout else []
    for name in dropouts:
        yield Problem(f"torch.nn.functional.{name}", _NO_DRAWS, "an apiece.task.Dropout layer")

    shape = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
    if shape != (*y.shape, classes):
        why = f"is {shape} for {_EXAMPLES} examples of {classes} classes"
        wanted = ", ".join(map(str, ("n", *y.shape[1:], "classes")))
        yield Problem("output", why, f"return one score per class, of shape ({wanted})")
        return

    if not torch.allclose(outputs, forward(params, first), equal_nan=True):
        if not dropouts:
            why = "draws from a global generator: the same inputs gave two outputs"
            yield Problem("forward pass", why, "apiece.task.Dropout, or a rule without chance")
        return

    try:
        step(params, first)
    except Exception as error:
        yield Problem(
            "training step", _first_line(error), "the loss must be differentiable by torch.func.grad"
        )
        return

    if under_vmap:
        both = tree.stack([params, params])
        try:
            vmap(forward)(both, x)
            vmap(step)(both, x)
        except Exception as error:
            cure = "--engine sequential, or rewrite without .item() and control flow that depends on data"
            yield Problem("training step under vmap", _first_line(error), cure)


def _described(x: Tree) -> str:
    """What a model is given."""

    def shape(leaf: Tensor) -> str:
        return f"({', '.join(map(str, ('n', *leaf.shape[2:])))})"

    if isinstance(x, Tensor):
        return f"a batch of shape {shape(x)}"
    return "a batch of " + ", ".join(f"{name} {shape(leaf)}" for name, leaf in tree.flatten(x).items())


class _DropoutCalls(TorchFunctionMode):
    """Notes which functional dropouts a forward pass calls: in evaluation mode they silently do nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in _DROPOUT_FUNCTIONS:
            self.names.add(func.__name__)
        return func(*args, **(kwargs or {}))


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


class ChannelDropout(nn.Module):
    """Keyed dropout of whole channels, for inputs of shape (n, channels, ...)."""

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        self.dropout = Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        scale: Tensor = self.dropout(torch.ones_like(x.flatten(2)[..., 0]))
        return x * scale.reshape(*scale.shape, *[1] * (x.ndim - 2))


def fix(model: nn.Module) -> nn.Module:
    """`model`, changed in place: BatchNorm becomes GroupNorm with the same affine parameters, dropout keyed.

    A layer used in several places stays one layer.
    """
    replaced: dict[nn.Module, nn.Module] = {}
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if module not in replaced:
            replaced[module] = _replacement(name, module)
        if name and replaced[module] is not module:
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, replaced[module])
    return replaced[model]


def _replacement(name: str, module: nn.Module) -> nn.Module:
    if isinstance(module, _BATCH_NORMS):
        return _group_norm(module)
    if isinstance(module, _ALPHA_DROPOUTS):
        raise ApieceError(f"cannot fix {name or type(module).__name__}: {_NO_ALPHA}")
    if isinstance(module, nn.Dropout):
        return Dropout(module.p)
    if isinstance(module, _CHANNEL_DROPOUTS):
        return ChannelDropout(module.p)
    return module


def _group_norm(norm: Any) -> nn.GroupNorm:
    """BatchNorm1d becomes one group: on flat inputs a group of one channel is always normalized to 0."""
    channels = norm.num_features
    groups = 1 if isinstance(norm, nn.BatchNorm1d) else _largest_divisor(channels, 32)
    fixed = nn.GroupNorm(groups, channels, eps=norm.eps, affine=norm.affine)
    if norm.affine:
        fixed.weight, fixed.bias = norm.weight, norm.bias
    return fixed


def _largest_divisor(number: int, most: int) -> int:
    return max(divisor for divisor in range(1, min(number, most) + 1) if number % divisor == 0)
