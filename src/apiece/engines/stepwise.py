"""Long loops, of clients under `vmap` and of a server: a step is recorded once and replayed for the rest of
its batches; once for each number of clients that it is narrowed to.

A whole program of a thousand steps takes seconds to record, one step takes milliseconds. What else the step
reads (anchors, memories, the broadcast) must lie where it lay when it was recorded: as it does within one
call or, where all that stands before the step is recorded too, in every call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from apiece import tree
from apiece.batched import levels, physical
from apiece.engines.narrowing import First, Step, apart, copy, having, narrowed
from apiece.shard import Batch

PLAIN = 2  # steps before one is recorded: libraries are warm then, and it is settled what differs by client

Action = Callable[[], None]
Record = Callable[[Action], Action]  # what a recording of the action does when it is replayed
Replay = Callable[[Batch, Action, Batch], None]  # of a batch, what was recorded with another in its place


def at_once(place: Batch, replay: Action, batch: Batch) -> None:
    copy(place, batch)
    replay()


class Stepwise:
    """A looper (`apiece.local.looping`) of loops under so many transformations; counts the steps it has run.

    under: 1 for clients, under `vmap`; 0 for a server. Under `grad`, too, a replay would have no derivative.
    warm: all that is computed has been computed before; steps are narrowed to those who may have a batch.
    """

    def __init__(self, record: Record, under: int = 1, replay: Replay = at_once, warm: bool = False) -> None:
        self._record, self._under, self._replay, self._warm = record, under, replay, warm
        self.steps = 0

    def __call__(self, step: Step, carry: Any, batches: Iterable[Batch]) -> Any:
        whole = len(levels()) == self._under
        plain: Counter[Any] = Counter()  # steps that were not replayed, by kind
        replays: dict[Any, tuple[First | None, Batch, Action]] = {}
        held: Any = None  # the carry, once it has a place of its own
        for batch in batches:
            self.steps += 1
            if not self._warm:
                batch = batch._replace(first=None)
            kind = _kind(batch)
            if not whole or (plain.total() if self._warm else plain[kind]) < PLAIN:
                plain[kind] += 1
                after = step(carry if held is None else held, batch)
                if held is None:
                    carry = after
                else:
                    copy(held, after)
                continue
            if held is None:
                held = tree.clone(carry) if batch.first is None else apart(carry, batch)
            if kind not in replays:
                replays[kind] = self._recorded(step, held, batch, having(batch))
            first, place, replay = replays[kind]
            self._replay(place, replay, batch if first is None else first.of(batch))
        return carry if held is None else held

    def _recorded(
        self, step: Step, held: Any, batch: Batch, first: First | None
    ) -> tuple[First | None, Batch, Action]:
        """Of those who have the batch, if the step can be narrowed to them; what to replay it with."""
        place = tree.clone(batch if first is None else first.of(batch))

        def action() -> None:
            if first is None:
                copy(held, step(held, place))
            else:
                narrowed(step, held, place, first)

        try:
            return first, place, self._record(action)
        except Exception:
            if first is None:
                raise
            return self._recorded(step, held, batch, None)


def _kind(batch: Batch) -> Any:
    return tuple(map(_described, tree.leaves(batch)))


def _described(leaf: Any) -> tuple[Any, ...]:
    return (leaf.shape, physical(leaf)[1]) if isinstance(leaf, Tensor) else (leaf,)
