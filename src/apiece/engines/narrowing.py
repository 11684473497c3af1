"""Ragged clients under `vmap`: a step is computed for those alone who may have a batch for it.

The clients of a chunk are in the order of their steps, so they are its first ones. What a step reads is
narrowed to their rows: the carry and the batch before it begins, what it closes over when an operation is
given it. The rows of the others stay as they are. A mask is left for those of whom it is not sure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch._C._functorch import TransformType, is_batchedtensor
from torch.overrides import TorchFunctionMode

from apiece import tree
from apiece.batched import (
    clients_first,
    clients_of,
    each_client,
    first_clients,
    innermost,
    levels,
    memory,
    on_host,
    physical,
)
from apiece.shard import Batch
from apiece.tree import Tree

Step = Callable[[Any, Batch], Any]

LEAST = 2  # clients: one alone would be stretched to all, unnoticed, where something was not narrowed


class First(NamedTuple):
    """The first few of a chunk's clients."""

    few: int
    clients: int
    level: int  # of the `vmap` over them

    def of(self, values: Tree) -> Tree:
        """Their rows of what is different for each."""
        return tree.map(lambda leaf: self.rows(leaf) if isinstance(leaf, Tensor) else leaf, values)

    def rows(self, tensor: Tensor) -> Tensor:
        return first_clients(tensor, self.clients, self.few, self.level)


def computed(steps: Sequence[int]) -> int:
    """Steps that are computed of clients with so many each, the longest first."""
    return sum(steps) + sum(steps[0] - alone for alone in steps[:LEAST])


def having(batch: Batch) -> First | None:
    """Those who may have the batch, if they are known and not all."""
    live, few = _live(batch), None if batch.first is None else max(batch.first, LEAST)
    if live is None or few is None or few >= len(live):
        return None
    return First(few, len(live), innermost())


def narrowing(step: Step, carry: Any, batches: Iterable[Batch]) -> Any:
    """A looper (`apiece.local.looping`) of clients' outermost loops."""
    able, own = True, False  # own: is the carry in places that nobody else reads?
    for batch in batches:
        first = having(batch) if able else None
        if first is None:
            carry, own = step(carry, settled(batch)), False
            continue
        mine = carry if own else apart(carry, batch)
        try:
            narrowed(step, mine, settled(first.of(batch)), first)
        except Exception:
            # Some of what the step reads was kept from us, as what it takes a gradient by; sizes differ.
            # What is wrong anyhow will be found again.
            if own:
                raise
            able, carry = False, step(carry, batch)
        else:
            carry, own = mine, True
    return carry


def narrowed(step: Step, carry: Any, batch: Batch, first: First) -> None:
    """A step of the first few clients, whose batch it is, written into their rows of the carry."""
    mine = first.of(carry)
    with _Rows(first):
        after = step(mine, batch)
    if [leaf.dtype for leaf in tree.tensors(after)] != [leaf.dtype for leaf in tree.tensors(mine)]:
        raise RuntimeError("a step changes the carry's types")
    copy(mine, after)


def apart(carry: Any, batch: Batch) -> Any:
    """A copy of its own for each client."""
    clients = clients_of(*tree.tensors(batch))
    assert clients is not None

    def own(leaf: Any) -> Any:
        return each_client(clients_first(leaf, clients).clone()) if isinstance(leaf, Tensor) else leaf

    return tree.map(own, carry)


def settled(batch: Batch) -> Batch:
    """The batch without the masks that it does not need; a GPU would have to be waited for to know it."""
    live = _live(batch)
    if live is None or not on_host(live) or not live.all():
        return batch
    weight, _ = physical(batch.weight)
    return batch._replace(live=None, full=bool((weight == 1).all()))


def _live(batch: Batch) -> Tensor | None:
    """Of each client under `vmap`."""
    if batch.live is None or levels() != [TransformType.Vmap]:
        return None
    live, axis = physical(batch.live)
    return None if axis is None else live


class _Rows(TorchFunctionMode):
    """Operations are given the first clients' rows of whatever is of all clients."""

    def __init__(self, first: First) -> None:
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


def copy(place: Any, value: Any) -> None:
    """Write the value's leaves where the place's are; one may be another's place, as a step's last params."""
    both = list(zip(tree.leaves(place), tree.leaves(value), strict=True))
    for mine, leaf in both:
        if not isinstance(mine, Tensor) and mine != leaf:
            raise TypeError(f"a static leaf cannot change from step to step: {mine!r} to {leaf!r}")
    pairs = [(mine, leaf) for mine, leaf in both if isinstance(mine, Tensor) and mine is not leaf]
    taken = {memory(mine) for mine, _ in pairs}
    kept = [leaf.clone() if memory(leaf) in taken else leaf for _, leaf in pairs]
    for (mine, _), leaf in zip(pairs, kept, strict=True):
        mine.copy_(leaf)
