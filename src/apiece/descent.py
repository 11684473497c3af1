"""A step of plain gradient descent, w − lr·∇, in few passes over the weights.

The gradient of a linear layer's weights is a product, dyᵀ x, as large as they are: to write it down, and to
read it and the weights again to add them up, costs more than the product. Here a layer takes its weights for
constants and leaves its inputs and outputs behind; autograd is asked for the outputs' gradients, and the
product goes straight onto the weights. What else the objective makes of them is differentiated as usual.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C._functorch import TransformType, _unwrap_for_grad, _wrap_for_grad
from torch._functorch.eager_transforms import enable_inplace_requires_grad, grad_increment_nesting
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

from apiece import products, tree
from apiece.batched import clients_first, clients_of, each_client, levels, memory
from apiece.params import Params

LOOKING: frozenset[Any] = frozenset(
    (torch.autograd.grad, Tensor.backward, Tensor.register_hook, vars(torch._C.TensorBase)["grad"].__get__)
)
# Layers of fewer weights are left alone, for nothing is gained: of many clients together, of a client alone.
SMALL, SMALL_ALONE = 1 << 12, 1 << 17


class _Use(NamedTuple):
    """Of a linear layer's weights in a step: x wᵀ, before the bias, which no layer but this one sees."""

    name: str
    x: Tensor
    version: int  # of x, when it was used
    product: Tensor


class _Step:
    """The weights of a step, and where linear layers have used them."""

    def __init__(self, params: Params, w: Params, together: bool) -> None:
        self._weights = {id(t): (name, params[name]) for name, t in w.items()}
        self._together, self.depth = together, len(levels())
        self.uses: list[_Use] = []

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        """The layer's output, if the step can do without its weights' gradient."""
        name, constant = self._weights.get(id(weight), ("", weight))
        if not name or weight.numel() < (SMALL if self._together else SMALL_ALONE):
            return None
        if bias is None or x.dim() < 2 or not weight.is_floating_point():
            return None
        # Inside a transformation of its own the objective may differentiate by these weights, too.
        if len(levels()) != self.depth or forward_ad._current_level >= 0 or not torch.is_grad_enabled():
            return None
        rows = x.flatten(0, -2)
        product = products.product(rows, constant)
        if product.dtype is not constant.dtype:  # autocast
            return None
        if not product.requires_grad:
            product = _required(product)
        self.uses.append(_Use(name, rows, rows._version, product))
        y: Tensor = (product + bias).unflatten(0, x.shape[:-1])
        return y

    def holds(self) -> bool:
        """Is what layers left behind enough? What they were given may have been written over since."""
        return all(use.x._version == use.version for use in self.uses)


class _Watch(TorchFunctionMode):
    """Does an objective differentiate by itself, or look at gradients? It must see the weights then.

    depth: of the step; inside a transformation of its own it does see them.
    """

    def __init__(self, depth: int) -> None:
        super().__init__()
        self._depth, self.seen = depth, False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.seen = self.seen or (func in LOOKING and len(levels()) == self._depth)
        return func(*args, **(kwargs or {}))


_current: ContextVar[_Step | None] = ContextVar("step", default=None)


class Linear(nn.Linear):
    """The same layer, which a step may ask to keep its weights out of the gradient."""

    def forward(self, x: Tensor) -> Tensor:
        step = _current.get()
        y = None if step is None else step.linear(x, self.weight, self.bias)
        return products.linear(x, self.weight, self.bias) if y is None else y


class Descent:
    """Steps of plain gradient descent, w − lr·∇, from `start`.

    Params that are not those of `start` are written over: nobody else may read them, nor an objective keep
    what it is given. What it does in the first step it does in all.
    """

    def __init__(self, lr: float, start: Params) -> None:
        self._lr, self._start = lr, start
        self._told = True  # may layers know of a step? Not if an objective was met that does not bear it
        self._first = True  # what an objective does is watched

    def step(
        self, objective: Callable[[Params], Tensor], params: Params, live: Tensor | None = None
    ) -> Params:
        """params − lr · ∇objective(params); params where a `live` of 0-d is false."""
        under = levels()
        together = under == [TransformType.Vmap]
        if (under and not together) or torch.is_grad_enabled():  # someone may differentiate what comes out
            with torch.enable_grad():
                nabla: Params = torch.func.grad(objective)(params)
            after = params - self._lr * nabla
            return after if live is None else tree.where(live, after, params)
        parts, uses = self._gradient(objective, params, together)
        if live is not None:
            # Dropped, for 0 times what is not finite would be NaN.
            nothing = torch.zeros((), device=live.device)
            parts = [None if part is None else torch.where(live, part, nothing) for part in parts]
            uses = [use._replace(x=torch.where(live, use.x, nothing)) for use in uses]
        return self._moved(params, parts, uses, together)

    def _moved(self, params: Params, parts: list[Tensor | None], uses: list[_Use], together: bool) -> Params:
        """The params a step further: parts are gradients by the params, then by the uses' products."""
        moved, lr = dict(params), self._lr
        # Params may be among what they are moved by: a layer's input, say.
        read = {memory(t) for t in (*parts, *(use.x for use in uses)) if t is not None}

        def free(name: str) -> bool:
            mine = moved[name] is not self._start[name] and memory(moved[name]) not in read
            return mine and (not together or torch._C._functorch.is_batchedtensor(moved[name]))

        for name, part in zip(params, parts, strict=False):
            if part is not None:
                before = moved[name]
                moved[name] = (
                    before.add_(part, alpha=-lr) if free(name) else torch.sub(before, part, alpha=lr)
                )
        for use, dy in zip(uses, parts[len(params) :], strict=True):
            if dy is not None:
                moved[use.name] = _added(moved[use.name], dy, use.x, -lr, free(use.name))
        return Params(moved)

    def _gradient(
        self, objective: Callable[[Params], Tensor], params: Params, together: bool
    ) -> tuple[list[Tensor | None], list[_Use]]:
        """By all params, and by the products of all uses; if layers are not to know of the step, none."""
        if self._told:
            found = _found(objective, params, together, told=True, watched=self._first)
            self._first = False
            if found is not None:
                return found
            self._told = False
        found = _found(objective, params, together, told=False)
        assert found is not None
        return found


def _found(
    objective: Callable[[Params], Tensor], params: Params, together: bool, told: bool, watched: bool = False
) -> tuple[list[Tensor | None], list[_Use]] | None:
    """None if what layers that know of the step left behind is not enough."""
    with _differentiable(params, together) as (w, plain):
        step = _Step(params, w, together)
        watch, token = _Watch(step.depth), _current.set(step if told else None)
        try:
            with watch if watched else nullcontext():
                value = objective(w)
        except Exception:
            # A gradient, perhaps, by weights that a layer has used and kept out; else it is raised again.
            if told and (watch.seen or not watched):
                return None
            raise
        finally:
            _current.reset(token)
        if watch.seen or not step.holds():
            return None
        if not value.requires_grad:  # of no param, or of none that matters
            return [None] * len(params), []
        found = torch.autograd.grad(
            value, [*w.values(), *(use.product for use in step.uses)], allow_unused=True
        )
        parts: list[Tensor | None] = [None if part is None else plain(part) for part in found]
        return parts, [use._replace(x=plain(use.x)) for use in step.uses]


def _required(tensor: Tensor) -> Tensor:
    with enable_inplace_requires_grad(True):
        return tensor.requires_grad_()


@contextmanager
def _differentiable(params: Params, together: bool) -> Iterator[tuple[Params, Callable[[Tensor], Tensor]]]:
    """The same params, that autograd follows; and how what comes of them is taken out."""
    if not together:
        with torch.enable_grad():
            yield params.map(lambda p: p.detach().requires_grad_()), torch.Tensor.detach
        return
    with grad_increment_nesting() as level, torch.enable_grad():
        yield (
            params.map(lambda p: _required(_wrap_for_grad(p, level))),
            lambda tensor: _unwrap_for_grad(tensor, level),
        )


def _added(weight: Tensor, dy: Tensor, x: Tensor, alpha: float, in_place: bool) -> Tensor:
    """weight + alpha · dyᵀ x of (out, in), (B, out), (B, in); in place where it may be."""
    clients = clients_of(weight, dy, x)
    if clients is None:
        return (weight.addmm_ if in_place else weight.addmm)(dy.mT, x, alpha=alpha)
    each, dy, x = (clients_first(tensor, clients) for tensor in (weight, dy, x))
    if in_place:
        each.baddbmm_(dy.mT, x, alpha=alpha)
        return weight
    return each_client(each.baddbmm(dy.mT, x, alpha=alpha))
