"""Training on one client: the loop over batches that padding cannot disturb."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from torch import Tensor
from torch.func import grad

from apiece import tree
from apiece.optim import Recipe
from apiece.params import Params
from apiece.shard import Batch, Shard

Carry = TypeVar("Carry")


def loop(step: Callable[[Carry, Batch], Carry], carry: Carry, batches: Iterable[Batch]) -> Carry:
    """The client's `for`: a batch of padding leaves the whole carry unchanged."""
    for batch in batches:
        after = step(carry, batch)
        carry = after if batch.live is None else tree.where(batch.live, after, carry)
    return carry


def sgd(objective: Callable[[Params, Batch], Tensor], params: Params, data: Shard, recipe: Recipe) -> Params:
    """`params` trained on `data` by the recipe's optimizer, which starts afresh."""
    optimizer = recipe.rule.build()
    gradient = grad(objective)

    def step(carry: tuple[Params, object], batch: Batch) -> tuple[Params, object]:
        w, state = carry
        return optimizer.update(gradient(w, batch), state, w)

    batches = data.batches(recipe.batch_size, recipe.epochs, recipe.steps)
    trained, _ = loop(step, (params, optimizer.init(params)), batches)
    return trained
