"""CUDA graphs: a chunk's program is recorded once and replayed with the numbers of every later round.

The first call of a program runs it plainly, which also warms the libraries up; the next ones record it, once
for each number of clients.
Shapes are rounded up, so that few recordings serve all chunks: clients that nobody is, rows that are padding.
Chunks of one phase go down several lanes at once: a small chunk alone leaves most of a GPU idle.
Of a program of many steps one step is recorded, anew in every call (`stepwise`).
"""

from __future__ import annotations

import logging
import math
import time
import warnings
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from apiece import tree
from apiece.data.federated import Federated
from apiece.engines.base import Call, Program, ceiling
from apiece.engines.stepwise import Action, Stepwise
from apiece.engines.vectorized import Vectorized
from apiece.local import looping
from apiece.shard import Rows
from apiece.tree import Tree

log = logging.getLogger("apiece")

MOST_GRAPHS = 64  # in a lane
LANES = 3
LONG = 60  # steps from which on recording the whole program takes longer than it saves


class _Recording(NamedTuple):
    program: Program  # kept alive: the key speaks of its objects by id
    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    outputs: Tree


@dataclass
class _Lane:
    """A stream, and recordings that replay on it alone: they share their memory, one after the other."""

    stream: torch.cuda.Stream
    pool: Any = field(default_factory=torch.cuda.graph_pool_handle)
    recordings: OrderedDict[Hashable, _Recording] = field(default_factory=OrderedDict)
    load: int = 0  # chunks it was given that nobody has waited for


class _Begun(NamedTuple):
    """A chunk under way. What it reads is held until it is done: its memory is not the lane's to keep."""

    answer: Tree
    given: Tree
    lane: _Lane | None = None
    done: torch.cuda.Event | None = None


class _Steps:
    """Recordings of single steps: used within one call, their memory by the next one's."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool: Any = torch.cuda.graph_pool_handle()
        # The pool lasts as long as one of its graphs.
        self._kept: deque[torch.cuda.CUDAGraph] = deque(maxlen=8)

    def record(self, action: Action) -> Action:
        # As `torch.cuda.graph` does, without emptying caches and collecting garbage, which take longer.
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool)
            try:
                action()
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)
        self._kept.append(graph)
        return graph.replay


class Captured(Vectorized):
    """Vectorized on a CUDA device, replayed: no Python and no launches between a chunk's kernels."""

    overhead = 5.0

    def __init__(self, device: torch.device, limit: int) -> None:
        super().__init__(device, limit)
        self._met: dict[Hashable, tuple[Program, int]] = {}  # the program is kept alive, and its steps
        self._steps = _Steps(device)
        self._lanes = [_Lane(torch.cuda.Stream(device)) for _ in range(LANES)]
        self.captures = 0

    def each(self, program: Program, shared: Tree, clients: tuple[Tree, ...]) -> Tree:
        return self._finished(self._begun(program, shared, clients))

    def answers(self, calls: Iterable[Call]) -> Iterator[Tree]:
        under_way: deque[_Begun] = deque()
        for call in calls:
            try:
                under_way.append(self._begun(call.program, call.shared, call.clients))
            except Exception as error:
                error.add_note(call.where)
                raise
            if len(under_way) == LANES:
                yield self._finished(under_way.popleft())
        while under_way:
            yield self._finished(under_way.popleft())

    def _begun(self, program: Program, shared: Tree, clients: tuple[Tree, ...]) -> _Begun:
        if isinstance(program.federation.data, Federated) and not program.federation.data.lasting:
            # A recording would hold on to examples that are made for this cohort alone.
            return _Begun(super().each(program, shared, clients), ())
        count = tree.leaves(clients)[0].shape[0]
        wide, more = _rounded(program, clients, ceiling(count, digits=4))
        alike = (wide.key, _signature((shared, tree.take(more, 0))))
        steps = self._met[alike][1] if alike in self._met else LONG
        if steps >= LONG:
            answer, steps = self._stepwise(program, shared, clients)
            self._met[alike] = (wide, steps)
            return _Begun(answer, ())
        program, clients = wide, more
        begun = self._replayed(program, shared, clients)
        # What a chunk is gathered to has no use for nobody's answers already.
        if program.together is not None:
            return begun
        return begun._replace(answer=tree.take(begun.answer, slice(0, count)))

    def _replayed(self, program: Program, shared: Tree, clients: tuple[Tree, ...]) -> _Begun:
        given = (shared, clients)
        key = (program.key, _signature(given), torch.backends.cuda.matmul.allow_tf32)
        lane = self._lane(key)
        if key not in lane.recordings:
            lane.recordings[key] = self._record(program, given, lane)
            if len(lane.recordings) > MOST_GRAPHS:
                lane.recordings.popitem(last=False)
        lane.recordings.move_to_end(key)
        recording = lane.recordings[key]
        # The next replay overwrites the outputs.
        answer = tree.map(torch.empty_like, recording.outputs)
        lane.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(lane.stream):
            torch._foreach_copy_(recording.inputs, tree.tensors(given))
            recording.graph.replay()
            torch._foreach_copy_(tree.tensors(answer), tree.tensors(recording.outputs))
            done = lane.stream.record_event()
        lane.load += 1
        return _Begun(answer, given, lane, done)

    def _stepwise(self, program: Program, shared: Tree, clients: tuple[Tree, ...]) -> tuple[Tree, int]:
        """The answer, and how many steps the outermost loops of a client had."""
        stepwise = Stepwise(self._steps.record)
        with looping(stepwise):
            return super().each(program, shared, clients), stepwise.steps

    def serving(self) -> AbstractContextManager[None]:
        return looping(Stepwise(self._steps.record, under=0))

    def _finished(self, begun: _Begun) -> Tree:
        if begun.lane is not None and begun.done is not None:
            torch.cuda.current_stream(self.device).wait_event(begun.done)
            begun.lane.load -= 1
        return begun.answer

    def _lane(self, key: Hashable) -> _Lane:
        """The least busy lane; one that would have to record first counts as one chunk busier."""

        def wait(lane: _Lane) -> tuple[int, bool]:
            missing = key not in lane.recordings
            return lane.load + missing, missing

        return min(self._lanes, key=wait)

    def _record(self, program: Program, given: tuple[Tree, tuple[Tree, ...]], lane: _Lane) -> _Recording:
        begin = time.perf_counter()
        held = tree.clone(given)
        graph = torch.cuda.CUDAGraph()
        with warnings.catch_warnings():
            # A first state that is the start itself needs no kernel.
            warnings.filterwarnings("ignore", "The CUDA Graph is empty", UserWarning)
            with torch.cuda.graph(graph, pool=lane.pool):
                outputs = super().each(program, *held)
        self.captures += 1
        seconds = time.perf_counter() - begin
        log.info("CUDA graph %d: %s recorded in %.2f s", self.captures, program.fn.__name__, seconds)
        return _Recording(program, graph, tree.tensors(held), outputs)


def vectorized(device: torch.device, limit: int) -> Vectorized:
    """The vectorized engine as the device runs it best."""
    return Captured(device, limit) if device.type == "cuda" else Vectorized(device, limit)


def _rounded(program: Program, clients: tuple[Tree, ...], count: int) -> tuple[Program, tuple[Tree, ...]]:
    """`count` clients, those that were not there all zeros; shards of a rounded number of batches."""
    unit = program.federation.method.local.batch_size or 1
    padding = program.federation.data.padding

    def wider(rows: Rows) -> Rows:
        width = rows.place.shape[1]
        batches = ceiling(math.ceil(width / unit)) * unit if width > unit else ceiling(width)
        return rows._replace(place=F.pad(rows.place, (0, batches - width), value=padding))

    wide = tuple(wider(part) if isinstance(part, Rows) else part for part in clients)
    if any(a.place.shape != b.place.shape for a, b in zip(clients, wide, strict=True) if isinstance(a, Rows)):
        program = replace(program, even=(False,) * len(program.even))
    more = count - tree.leaves(clients)[0].shape[0]
    if more == 0:
        return program, wide
    return program, tree.map(lambda leaf: torch.cat([leaf, leaf.new_zeros((more, *leaf.shape[1:]))]), wide)


def _signature(given: Tree) -> Hashable:
    """Shapes and types of the tensors, values of all else: what a recording is fixed to."""
    return tuple(
        (path, tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else (path, leaf)
        for path, leaf in tree.flatten(given).items()
    )
