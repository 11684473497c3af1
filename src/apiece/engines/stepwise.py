"""Long loops, of clients under `vmap` and of a server: a step is recorded once in a call and replayed for the
rest of its batches.

A whole program of a thousand steps takes seconds to record, and every width of shards is another program. One
step takes milliseconds, and what else it reads (anchors, memories, the broadcast) stays where it is for the
rest of the call, so that nothing it was recorded with can be stale.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from apiece import tree
from apiece.shard import Batch

PLAIN = 2  # steps before one is recorded: libraries are warm then, and it is settled what differs by client

Action = Callable[[], None]
Record = Callable[[Action], Action]  # what a recording of the action does when it is replayed


class Stepwise:
    """A looper (`apiece.local.looping`) of loops under so many transformations; counts the steps it has run.

    under: 1 for clients, under `vmap`; 0 for a server. Under `grad`, too, a replay would have no derivative.
    """

    def __init__(self, record: Record, under: int = 1) -> None:
        self._record, self._under = record, under
        self.steps = 0

    def __call__(self, step: Callable[[Any, Batch], Any], carry: Any, batches: Iterable[Batch]) -> Any:
        whole = len(torch._C._functorch.get_interpreter_stack() or ()) == self._under
        plain: Counter[Any] = Counter()  # steps that were not replayed, by kind
        replays: dict[Any, tuple[Batch, Action]] = {}
        held: Any = None  # the carry, once it has a place of its own
        for batch in batches:
            self.steps += 1
            kind = _kind(batch)
            if not whole or plain[kind] < PLAIN:
                plain[kind] += 1
                after = step(carry if held is None else held, batch)
                if held is None:
                    carry = after
                else:
                    _copy(held, after)
                continue
            if held is None:
                held = tree.clone(carry)
            if kind not in replays:
                replays[kind] = self._recorded(step, held, batch)
            place, replay = replays[kind]
            _copy(place, batch)
            replay()
        return carry if held is None else held

    def _recorded(self, step: Callable[[Any, Batch], Any], held: Any, batch: Batch) -> tuple[Batch, Action]:
        place = tree.clone(batch)

        def action() -> None:
            _copy(held, step(held, place))

        return place, self._record(action)


def _kind(batch: Batch) -> Any:
    return tuple((path, getattr(leaf, "shape", leaf)) for path, leaf in tree.flatten(batch).items())


def _copy(place: Any, value: Any) -> None:
    for mine, leaf in zip(tree.leaves(place), tree.leaves(value), strict=True):
        if isinstance(mine, Tensor) and mine is not leaf:
            mine.copy_(leaf)
