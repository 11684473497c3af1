"""Ragged clients under `vmap`, on a CPU: a step is computed for those alone who have a batch for it.

The clients of a chunk are in the order of their steps, so they are its first ones; where they are not, as
in a chunk of replicas, steps are masked. What a step reads is narrowed to their rows: the carry and the batch
before it begins, what it closes over when an operation is given it. The rows of the others stay as they are,
and nothing needs a mask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from torch import Tensor
from torch._C._functorch import TransformType, is_batchedtensor
from torch.overrides import TorchFunctionMode

from apiece import tree
from apiece.batched import clients_first, each_client, first_clients, innermost, levels, physical
from apiece.engines.stepwise import copy
from apiece.shard import Batch
from apiece.tree import Tree

LEAST = 2  # clients: one alone would be stretched to all, unnoticed, where something was not narrowed


class _First(NamedTuple):
    """The first few of a chunk's clients."""

    few: int
    clients: int
    level: int  # of the `vmap` over them

    def of(self, values: Tree) -> Tree:
        """Their rows of what is different for each."""
        return tree.map(lambda leaf: self.rows(leaf) if isinstance(leaf, Tensor) else leaf, values)

    def rows(self, tensor: Tensor) -> Tensor:
        return first_clients(tensor, self.clients, self.few, self.level)


def narrowing(step: Callable[[Any, Batch], Any], carry: Any, batches: Iterable[Batch]) -> Any:
    """A looper (`apiece.local.looping`) of clients' outermost loops."""
    able = levels() == [TransformType.Vmap]
    own = False  # is the carry in places that nobody else reads?
    for batch in batches:
        live, axis = (None, None) if batch.live is None else physical(batch.live)
        if live is None or axis is None or not able:
            carry, own = step(carry, batch), False
            continue
        count = int(live.sum())
        first = _First(max(count, LEAST), len(live), innermost())
        if first.few < first.clients and bool(live[:count].all()):
            mine = carry if own else tree.map(lambda leaf, n=first.clients: _apart(leaf, n), carry)
            try:
                _narrowed(step, mine, _settled(first.of(batch), count), first)
            except Exception:
                # Some of what the step reads was kept from us, as what it takes a gradient by; sizes differ.
                # What is wrong anyhow will be found again.
                if own:
                    raise
                able, carry = False, step(carry, batch)
            else:
                carry, own = mine, True
        else:
            carry, own = step(carry, _settled(batch, count)), False
    return carry


def _narrowed(step: Callable[[Any, Batch], Any], carry: Any, batch: Batch, first: _First) -> None:
    """A step of the first few clients, written into their rows of the carry."""
    mine = first.of(carry)
    with _Rows(first):
        after = step(mine, batch)
    if [leaf.dtype for leaf in tree.tensors(after)] != [leaf.dtype for leaf in tree.tensors(mine)]:
        raise RuntimeError("a step changes the carry's types")
    copy(mine, after)


def _apart(leaf: Any, clients: int) -> Any:
    """A copy of its own for each client."""
    return each_client(clients_first(leaf, clients).clone()) if isinstance(leaf, Tensor) else leaf


def _settled(batch: Batch, live: int) -> Batch:
    """The batch without the masks that it does not need."""
    weight, _ = physical(batch.weight)
    if live < len(weight):
        return batch
    return batch._replace(live=None, full=bool(weight.all()))


class _Rows(TorchFunctionMode):
    """Operations are given the first clients' rows of whatever is of all clients."""

    def __init__(self, first: _First) -> None:
        super().__init__()
        self._first = first

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args = [self._given(value) for value in args]
        return func(*args, **{name: self._given(value) for name, value in (kwargs or {}).items()})

    def _given(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._first.rows(value) if is_batchedtensor(value) else value
        if type(value) in (list, tuple):
            return type(value)(self._given(part) for part in value)
        return value
