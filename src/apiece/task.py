"""Task: a model, what training minimises and what evaluation measures."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks

from apiece import random, tree
from apiece.augment import Augment
from apiece.descent import Linear
from apiece.errors import ApieceError
from apiece.params import Params
from apiece.random import Key
from apiece.shard import Batch, Shard
from apiece.tree import Tree

Penalty = Callable[[Params, Batch, Tensor], Tensor]
Losses = Callable[[Tensor, Tree], Tensor]  # outputs, y → one loss per example
Metric = Callable[[Tensor, Batch], Tensor]  # outputs, a whole test shard → one number
Pooled = Callable[[Tensor, Tensor], Tensor]  # outputs, y of many clients' test examples → one number


_UNBUILT: Any = None


@dataclass
class _Stream:
    """The dropout key of one forward pass, and how many layers have drawn from it."""

    key: Key
    drawn: int = 0

    def next(self) -> Key:
        self.drawn += 1
        return random.fold(self.key, self.drawn)


_stream: contextvars.ContextVar[_Stream | None] = contextvars.ContextVar("dropout stream", default=None)


@contextmanager
def _drawing_from(key: Key | None) -> Iterator[None]:
    token = _stream.set(None if key is None else _Stream(key))
    try:
        yield
    finally:
        _stream.reset(token)


class Dropout(nn.Module):
    """Dropout whose mask is a hash of the batch's key: the same in every engine; off in evaluation."""

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        if not 0.0 <= p < 1.0:
            raise ValueError(f"dropout probability must lie in [0, 1), got {p}")
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        stream = _stream.get()
        if stream is None or self.p == 0.0:
            return x
        keep = random.uniform(stream.next(), x.shape) >= self.p
        return x * (keep.to(x.dtype) * (1.0 / (1.0 - self.p)))

    def extra_repr(self) -> str:
        return f"p={self.p}"


# By a parameter's name: the dicts of the layers that hold it, and its name in each.
_Places = Mapping[str, list[tuple[dict[str, Any], str]]]
_places: WeakKeyDictionary[nn.Module, _Places] = WeakKeyDictionary()


def _placed(module: nn.Module) -> _Places:
    if module not in _places:
        names = {id(p): name for name, p in module.named_parameters()}
        places: dict[str, list[tuple[dict[str, Any], str]]] = {name: [] for name in names.values()}
        for layer in module.modules():
            held: dict[str, Any] = layer._parameters
            for name, p in held.items():
                if p is not None:
                    places[names[id(p)]].append((held, name))
        _places[module] = places
    return _places[module]


def _called(module: nn.Module, params: Params, x: Tree) -> Tensor:
    """`torch.func.functional_call`, but that one looks for the places at every call: 0.1 ms of a step."""
    places = _placed(module)
    if params.keys() != places.keys():
        absent, strange = sorted(places.keys() - params.keys()), sorted(params.keys() - places.keys())
        told = [
            f"{what} {', '.join(names)}" for what, names in (("without", absent), ("with", strange)) if names
        ]
        raise ApieceError(
            f"a model can be called with all of its params and no others, not {' and '.join(told)}"
        )
    own = [(held, name, held[name]) for path in params for held, name in places[path]]
    try:
        for path, tensor in params.items():
            for held, name in places[path]:
                held[name] = tensor
        # The params are in their places for this call alone: what is computed anew later would find others.
        with disable_saved_tensors_hooks("models cannot use torch.utils.checkpoint or save_on_cpu here"):
            outputs: Tensor = module(x)
        return outputs
    finally:
        for held, name, tensor in own:
            held[name] = tensor


def _channels_last(layer: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor] | None:
    """Images as a CPU's convolutions like them, in up to a third less time; vmap knows no such layout."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return None
    return (inputs[0].to(memory_format=torch.channels_last),)


def _pixels(leaf: Tensor) -> Tensor:
    return leaf / 255.0 if leaf.dtype is torch.uint8 else leaf


def by_example(values: Tensor, weight: Tensor) -> Tensor:
    """One value for each example: of several its mean, of padding 0."""
    values = values if values.ndim == weight.ndim else values.flatten(weight.ndim).mean(-1)
    return values.masked_fill(weight <= 0, 0.0)


def weighted_mean(values: Tensor, weight: Tensor) -> Tensor:
    """Mean over the real examples; 0 where there are none."""
    return by_example(values, weight).sum() / weight.sum().clamp(min=1.0)


_NO_LABEL = torch.iinfo(torch.int64).min  # PyTorch passes over -100, which is a mistake here


def cross_entropy(outputs: Tensor, y: Tensor) -> Tensor:
    if outputs.ndim == 2 and torch._C._functorch.peek_interpreter_stack() is None:  # in fewer kernels
        return F.cross_entropy(outputs, y, reduction="none", ignore_index=_NO_LABEL)
    return -F.log_softmax(outputs, -1).gather(-1, y[..., None]).squeeze(-1)


def hinge(outputs: Tensor, y: Tensor) -> Tensor:
    """Crammer and Singer's: max(0, 1 + best wrong score − right score); for two classes, the usual one."""
    right = (y[..., None] == torch.arange(outputs.shape[-1], device=y.device)).to(outputs.dtype)
    wrong_best = (outputs - right * 1e9).amax(-1)
    return F.relu(1.0 + wrong_best - (outputs * right).sum(-1))


def accuracy(outputs: Tensor, batch: Batch) -> Tensor:
    hits = (outputs.argmax(-1) == batch.y).float()
    return torch.where(batch.weight > 0, hits, 0.0).sum() / batch.weight.sum()


ACCURACY: Mapping[str, Metric] = {"accuracy": accuracy}


@dataclass(frozen=True)
class Task:
    """Model + criterion + metrics. `proxy` and `prior` are the server's own: clients get a task without."""

    factory: Callable[[], nn.Module]
    losses: Losses = cross_entropy
    measures: Mapping[str, Metric] = field(default_factory=lambda: ACCURACY)
    pooled: Mapping[str, Pooled] = field(default_factory=dict)  # measured over all clients' examples together
    device: torch.device = torch.device("cpu")
    proxy: Shard | None = None
    prior: Params | None = None
    penalties: tuple[Penalty, ...] = ()
    augment: Augment | None = None  # what training sees of a batch's x
    precision: torch.dtype = torch.float32  # of the model's arithmetic; params and losses stay as they are
    # May a CPU lay images out so between the layers? A model that views its images as rows cannot bear it.
    channels_last: bool = False
    # Structure and constant buffers, built once: copies of a task share it. Its parameters are never read.
    module: nn.Module = _UNBUILT

    def __post_init__(self) -> None:
        if self.module is None:
            object.__setattr__(self, "module", self._build(0))

    @property
    def headline(self) -> str:
        """The first measure: the one that tables and targets speak of."""
        return next(iter(self.measures))

    def _build(self, seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            module = self.factory().eval().to(self.device)
        for layer in module.modules():
            if type(layer) is nn.Linear:
                layer.__class__ = Linear
        if self.channels_last and self.device.type == "cpu":
            for layer in module.modules():
                if isinstance(layer, nn.Conv2d):
                    layer.register_forward_pre_hook(_channels_last)
        return module

    def init(self, key: int) -> Params:
        """Fresh parameters, as the model's own factory draws them under `key`."""
        module = self._build(key & (2**63 - 1))
        return Params({name: p.detach().clone() for name, p in module.named_parameters()})

    def predict(self, params: Params, x: Tree, key: Key | None = None) -> Tensor:
        """Outputs for `x`; without a key, in evaluation mode. Bytes in `x` are pixels: 255 stands for 1."""
        x = tree.map(_pixels, x)
        if self.precision is not torch.float32:
            params, x = tree.map(self._rounded, (params, x))
        with _drawing_from(key):
            outputs = _called(self.module, params, x)
        return outputs if self.precision is torch.float32 else outputs.float()

    def _rounded(self, leaf: Tensor) -> Tensor:
        return leaf.to(self.precision) if leaf.is_floating_point() else leaf

    def criterion(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Weighted mean over the real examples."""
        losses = self.losses(outputs, batch.y)
        return losses.mean() if batch.full else weighted_mean(losses, batch.weight)

    def loss(self, params: Params, batch: Batch) -> Tensor:
        """The data loss in evaluation mode: what is measured."""
        return self.criterion(self.predict(params, batch.x), batch)

    def objective(self, params: Params, batch: Batch) -> Tensor:
        """What training minimises: the data loss under augmentation and dropout, plus penalties."""
        if self.augment is not None:
            batch = batch._replace(x=self.augment(batch.x, random.fold(batch.key, "augment")))
        outputs = self.predict(params, batch.x, batch.key)
        value = self.criterion(outputs, batch)
        for penalty in self.penalties:
            value = value + penalty(params, batch, outputs)
        return value

    def penalized(self, penalty: Penalty) -> Task:
        """This task with `penalty(params, batch, outputs of the same forward)` added to the objective."""
        return replace(self, penalties=(*self.penalties, penalty))

    def metrics(self, outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Every measure and the loss, on a whole test shard; NaN where it is empty."""
        values = {name: measure(outputs, batch) for name, measure in self.measures.items()}
        values["loss"] = self.criterion(outputs, batch)
        empty = batch.weight.sum() == 0
        return {name: torch.where(empty, torch.nan, value) for name, value in values.items()}

    def need_proxy(self) -> Shard:
        """The proxy, of methods that cannot do without."""
        if self.proxy is None:
            raise ApieceError(
                "the method trains on data of the server's own, and there is none: "
                "set a share of the training data aside for it, for example with --proxy 0.02"
            )
        return self.proxy

    def for_clients(self) -> Task:
        return replace(self, proxy=None, prior=None)

    def on(self, device: torch.device) -> Task:
        return replace(self, device=device, module=_UNBUILT)
