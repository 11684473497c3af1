"""A step of plain gradient descent, w − r·∇, in few passes over the weights.

The gradient of a linear layer's weights is a product, dyᵀ x, as large as they are: to write it down, and to
read it and the weights again to add them up, costs more than the product. Here a layer takes its weights for
constants and leaves its inputs and outputs behind; autograd is asked for the outputs' gradients, times −r,
and the product goes straight onto the weights. What else the objective makes of them is differentiated as
usual.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._functorch import TransformType
from torch._functorch.eager_transforms import (
    _create_differentiable,
    _undo_create_differentiable,
    _wrap_all_tensors,
    grad_increment_nesting,
)

from apiece.params import Params

SMALL = 1 << 14  # weights: with fewer, a client alone gains nothing


class _Use(NamedTuple):
    """Of a linear layer's weights in a step: y = x wᵀ + b."""

    name: str
    x: Tensor
    y: Tensor


class _Step:
    """The weights of a step, and where linear layers have used them."""

    def __init__(self, params: Params, w: Params, together: bool) -> None:
        self._known = {id(t): (name, params[name]) for name, t in w.items()}
        self._depth = len(_levels())
        self._least = 0 if together else SMALL
        self.uses: list[_Use] = []

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        """The layer's output, if the step can do without its weights' gradient."""
        name, constant = self._known.get(id(weight), ("", weight))
        # Inside a transformation of its own the objective may differentiate by these weights, too.
        if not name or bias is None or weight.numel() < self._least or len(_levels()) != self._depth:
            return None
        rows = x.flatten(0, -2)
        y = rows @ constant.mT + bias  # vmap's own `linear` would multiply the bias by 1
        self.uses.append(_Use(name, rows, y))
        whole: Tensor = y.unflatten(0, x.shape[:-1])
        return whole


_current: ContextVar[_Step | None] = ContextVar("step", default=None)


class Linear(nn.Linear):
    """The same layer."""

    def forward(self, x: Tensor) -> Tensor:
        step = _current.get()
        y = None if step is None or x.dim() < 2 else step.linear(x, self.weight, self.bias)
        return F.linear(x, self.weight, self.bias) if y is None else y


def _levels() -> list[TransformType]:
    return [level.key() for level in torch._C._functorch.get_interpreter_stack() or ()]


def descend(
    objective: Callable[[Params], Tensor], params: Params, rate: float | Tensor, owned: bool
) -> Params:
    """params − rate · ∇objective(params); `owned`: nobody else reads them, they may be written over."""
    levels = _levels()
    together = levels == [TransformType.Vmap]
    if (levels and not together) or torch.is_grad_enabled():  # someone may differentiate what comes out
        nabla: Params = torch.func.grad(objective)(params)
        return params - rate * nabla
    with _differentiable(params, together) as (w, plain):
        step = _Step(params, w, together)
        token = _current.set(step)
        try:
            value = objective(w)
        finally:
            _current.reset(token)
        if not value.requires_grad:  # of no param, or of none that matters
            return params
        sources = [*w.values(), *(use.y for use in step.uses)]
        seed = -rate.expand_as(value) if isinstance(rate, Tensor) else torch.full_like(value, -rate)
        parts = [
            None if part is None else plain(part)
            for part in torch.autograd.grad(value, sources, seed, allow_unused=True)
        ]
        uses = [use._replace(x=plain(use.x)) for use in step.uses]
    moved = dict(params)
    for name, part in zip(w, parts, strict=False):
        if part is not None:
            moved[name] = moved[name].add_(part) if owned else moved[name] + part
    for use, dy in zip(uses, parts[len(w) :], strict=True):
        if dy is not None:
            before = moved[use.name]
            in_place = owned or before is not params[use.name]
            after = _Added.apply(before, dy, use.x, in_place)
            moved[use.name] = before if in_place else after
    return Params(moved)


@contextmanager
def _differentiable(params: Params, together: bool) -> Iterator[tuple[Params, Callable[[Tensor], Tensor]]]:
    """The same params, that autograd follows; and how what comes of them is taken out."""
    if not together:
        with torch.enable_grad():
            yield params.map(lambda p: p.detach().requires_grad_()), torch.Tensor.detach
        return
    with grad_increment_nesting() as level, torch.enable_grad():
        yield (
            _create_differentiable(_wrap_all_tensors(params, level), level),
            lambda tensor: _undo_create_differentiable(tensor, level),
        )


class _Added(torch.autograd.Function):
    """weight + dyᵀ x of (out, in), (B, out), (B, in); in place where it may be"""

    @staticmethod
    def forward(weight: Tensor, dy: Tensor, x: Tensor, in_place: bool) -> Tensor:
        return (weight.addmm_ if in_place else weight.addmm)(dy.mT, x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def vmap(
        info: Any, dims: Any, weight: Tensor, dy: Tensor, x: Tensor, in_place: bool
    ) -> tuple[Tensor, int]:
        weight, dy, x = (
            tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
            for tensor, dim in zip((weight, dy, x), dims, strict=False)
        )
        return (weight.baddbmm_ if in_place else weight.baddbmm)(dy.mT, x), 0
