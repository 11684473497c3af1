"""Training on one client: the loop over batches that padding cannot disturb."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import Tensor

from apiece import tree
from apiece.descent import Descent
from apiece.optim import Recipe, Rule
from apiece.params import Params
from apiece.shard import Batch, Shard

Carry = TypeVar("Carry")


Looper = Callable[[Callable[[Any, Batch], Any], Any, Iterable[Batch]], Any]

_looper: ContextVar[Looper | None] = ContextVar("looper", default=None)


@contextmanager
def looping(looper: Looper | None) -> Iterator[None]:
    """Have an engine run the steps of outermost loops its own way."""
    token = _looper.set(looper)
    try:
        yield
    finally:
        _looper.reset(token)


def loop(step: Callable[[Carry, Batch], Carry], carry: Carry, batches: Iterable[Batch]) -> Carry:
    """The client's `for`: a batch of padding leaves the whole carry unchanged."""

    def after(carry: Carry, batch: Batch) -> Carry:
        found: Carry = step(carry, batch)
        return found if batch.live is None else tree.where(batch.live, found, carry)

    return _over(after, carry, batches)


def _over(step: Callable[[Carry, Batch], Carry], carry: Carry, batches: Iterable[Batch]) -> Carry:
    """Every batch in turn, in the engine's own way if it has one."""
    looper = _looper.get()
    if looper is not None:
        with looping(None):
            carry = looper(step, carry, batches)
            return carry
    for batch in batches:
        carry = step(carry, batch)
    return carry


def grad(objective: Callable[..., Tensor]) -> Callable[..., Params]:
    """`torch.func.grad`, by the params that come first; of a client alone by plain autograd, in less time."""

    def gradient(params: Params, *rest: Any) -> Params:
        # Under vmap or grad there is a stack; with autograd on, someone may differentiate what comes out.
        if torch._C._functorch.peek_interpreter_stack() is not None or torch.is_grad_enabled():
            found: Params = torch.func.grad(objective)(params, *rest)
            return found
        w = params.map(lambda p: p.detach().requires_grad_())
        with torch.enable_grad():
            value = objective(w, *rest)
            if not value.requires_grad:  # of no param, or of none that matters
                return params.zeros()
            parts = torch.autograd.grad(value, list(w.values()), materialize_grads=True)
        # A convolution may give its weights' with the channels last: no params are to be laid out so.
        return Params({name: part.contiguous() for name, part in zip(w, parts, strict=True)})

    return gradient


def sgd(objective: Callable[[Params, Batch], Tensor], params: Params, data: Shard, recipe: Recipe) -> Params:
    """`params` trained on `data` by the recipe's optimizer, which starts afresh."""
    batches = data.batches(recipe.batch_size, recipe.epochs, recipe.steps)
    if recipe.rule == Rule(lr=recipe.lr):
        return _descended(objective, params, batches, recipe.lr)
    optimizer, nabla = recipe.rule.build(), grad(objective)

    def step(carry: tuple[Params, object], batch: Batch) -> tuple[Params, object]:
        w, state = carry
        return optimizer.update(nabla(w, batch), state, w)

    trained, _ = loop(step, (params, optimizer.init(params)), batches)
    return trained


def _descended(
    objective: Callable[[Params, Batch], Tensor], params: Params, batches: Iterable[Batch], lr: float
) -> Params:
    """Plain steps, of which all but the first write over what the one before has made."""
    descent = Descent(lr, params)

    def step(w: Params, batch: Batch) -> Params:
        return descent.step(lambda w: objective(w, batch), w, batch.live)

    return _over(step, params, batches)
