"""CUDA graphs: a chunk's program is recorded once and replayed with the numbers of every later round.

The first call of a program runs it plainly, which also warms the libraries up; the next ones record it, once
for each number of clients.
Shapes are rounded up, so that few recordings serve all chunks: clients that nobody is, rows that are padding.
Chunks of one phase go down several lanes at once, those of one shape down the same: a small chunk alone
leaves most of a GPU idle.
Of a program of many steps one step is recorded (`stepwise`), and replayed between the other parts: what comes
before, between and after its steps.
"""

from __future__ import annotations

import gc
import logging
import math
import operator
import time
import warnings
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from apiece import tree
from apiece.batched import physical
from apiece.data.federated import Federated
from apiece.engines.base import Call, Known, Program, ceiling, cut, recurring
from apiece.engines.narrowing import computed, narrowing
from apiece.engines.stepwise import Action, Stepwise
from apiece.engines.vectorized import Vectorized, mapped
from apiece.local import looping
from apiece.optim import Recipe
from apiece.shard import Batch, Rows
from apiece.tree import Tree

log = logging.getLogger("apiece")

MOST_GRAPHS = 128  # in a lane
LANES = 3
SLOPES = (  # how many of the longest client's batches the clients of each eighth of a chunk may have
    (1.0,) * 8,
    *(tuple(1 - (1 - last) * eighth / 8 for eighth in range(8)) for last in (1 / 2, 1 / 4)),
    *(tuple(last ** (eighth / 7) for eighth in range(8)) for last in (1 / 8, 1 / 50)),
)
LONG = 16  # steps from which on recording each of them takes longer than it saves


class _Recording(NamedTuple):
    program: Program  # kept alive: the key speaks of its objects by id
    parts: list[Action]
    inputs: list[Tensor]
    outputs: Tree


@dataclass
class _Lane:
    """A stream, and recordings that are made on it and replay on it alone: they share their memory, one after
    the other. So they do with what libraries work in, which is the stream's: of another lane's recording,
    replayed at the same time, it would be overwritten.
    """

    stream: torch.cuda.Stream
    pool: Any = field(default_factory=torch.cuda.graph_pool_handle)
    of_steps: Any = field(default_factory=torch.cuda.graph_pool_handle)
    recordings: OrderedDict[Hashable, _Recording] = field(default_factory=OrderedDict)
    load: int = 0  # chunks it was given that nobody has waited for


def _stream(device: torch.device) -> torch.cuda.Stream:
    """With what libraries work in there, which recordings are not to take from their own memory."""
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        some = torch.ones(2, 8, 8, device=device)
        F.linear(some[0], torch.bmm(some, some)[0], some[0, 0])
    return stream


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Nothing is collected meanwhile: to destroy an old graph would break the recording of a new one."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _opened(pool: Any) -> torch.cuda.CUDAGraph:
    """A graph that is being recorded. Kernels may be loaded meanwhile: of a step whose tensors lie otherwise
    than before, Triton compiles others.
    """
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(pool=pool, capture_error_mode="relaxed")
    return graph


class _Tape:
    """A recording while it is made: graphs, and steps that are replayed between them.

    A step's memory is its own: it is replayed again when what was recorded after it is there already.
    """

    def __init__(self, lane: _Lane) -> None:
        self.parts: list[Action] = []
        self._pool, self._of_steps = lane.pool, lane.of_steps
        self._graph: torch.cuda.CUDAGraph | None = None
        self._met: set[int] = set()  # the memory that batches lie in

    def begin(self) -> None:
        self._graph = _opened(self._pool)

    def end(self) -> None:
        graph, self._graph = self._graph, None
        if graph is not None:
            graph.capture_end()
            self.parts.append(graph.replay)

    def record(self, action: Action) -> Action:
        self.end()
        graph = _opened(self._of_steps)
        try:
            action()
        finally:
            graph.capture_end()
        return graph.replay

    def replay(self, place: Batch, replay: Action, batch: Batch) -> None:
        """Batches of one pass are views of the same memory: only where it is new, something was computed."""
        pairs = zip(tree.tensors(place), tree.tensors(batch), strict=True)
        mine, theirs = map(list, zip(*((physical(a)[0], physical(b)[0]) for a, b in pairs), strict=True))
        memory = {tensor.untyped_storage().data_ptr() for tensor in theirs}
        if not memory <= self._met:
            self._met |= memory
            self.end()
        self.parts += [partial(torch._foreach_copy_, mine, theirs), replay]
        if self._graph is None:
            self.begin()


class _Begun(NamedTuple):
    """A chunk under way. What it reads is held until it is done: its memory is not the lane's to keep."""

    answer: Tree
    given: Tree
    lane: _Lane | None = None
    done: torch.cuda.Event | None = None


class _Steps:
    """Recordings of single steps: used within one call, their memory by the next one's."""

    def __init__(self, device: torch.device) -> None:
        self._stream = _stream(device)
        self._pool: Any = torch.cuda.graph_pool_handle()
        # The pool lasts as long as one of its graphs.
        self._kept: deque[torch.cuda.CUDAGraph] = deque(maxlen=8)

    def record(self, action: Action) -> Action:
        # As `torch.cuda.graph` does, without emptying caches and collecting garbage, which take longer.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream), _undisturbed():
            graph = _opened(self._pool)
            try:
                action()
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)
        self._kept.append(graph)
        return graph.replay


class Captured(Vectorized):
    """Vectorized on a CUDA device, replayed: no Python and no launches between a chunk's kernels."""

    overhead = 12.0
    under_way = LANES

    def __init__(self, device: torch.device, limit: int) -> None:
        super().__init__(device, limit)
        self._met: dict[Hashable, tuple[Program, int]] = {}  # the program is kept alive, and its steps
        self._steps = _Steps(device)
        self._lanes = [_Lane(_stream(device)) for _ in range(LANES)]
        self.captures = 0

    def cut(self, sizes: Sequence[int], recipe: Recipe) -> list[list[int]]:
        limit = next(most for most in range(self.limit, 0, -1) if ceiling(most) == most)
        if recurring(sizes):
            return cut(sizes, recipe, limit, self.overhead)
        return cut(sizes, recipe, limit, self.overhead, ceiling, lambda steps: computed(stairs(steps)))

    def each(self, program: Program, shared: Tree, clients: tuple[Tree, ...]) -> Tree:
        return self._finished(self._begun(program, shared, clients))

    def answers(self, calls: Iterable[Call]) -> Iterator[Tree]:
        under_way: deque[_Begun] = deque()
        try:
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
        finally:  # nobody may want the rest; what it reads is not to change before it is done
            for begun in under_way:
                self._finished(begun)

    def _begun(self, program: Program, shared: Tree, clients: tuple[Tree, ...]) -> _Begun:
        if isinstance(program.federation.data, Federated) and not program.federation.data.lasting:
            # A recording would hold on to examples that are made for this cohort alone.
            return _Begun(mapped(program, shared, clients), ())
        count = tree.leaves(clients)[0].shape[0]
        if not program.recurs:
            program, clients = _rounded(program, clients, ceiling(count))
        # Few of them are as many as more, for libraries to be warm.
        any_number = replace(program, shards=tuple(Known(one.even) for one in program.shards))
        alike = (any_number.key, tree.signature((shared, tree.take(clients, 0))))
        if alike not in self._met:
            answer, steps = self._stepwise(program, shared, clients)
            self._met[alike] = (program, steps)
            return _Begun(self._real(program, answer, count), ())
        begun = self._replayed(program, shared, clients, self._met[alike][1])
        return begun._replace(answer=self._real(program, begun.answer, count))

    def _real(self, program: Program, answer: Tree, count: int) -> Tree:
        """Without the answers of nobody, for which what a chunk is gathered to has no use already."""
        return answer if program.together is not None else tree.take(answer, slice(0, count))

    def _replayed(self, program: Program, shared: Tree, clients: tuple[Tree, ...], steps: int) -> _Begun:
        given = (shared, clients)
        key = (program.key, tree.signature(given), torch.backends.cuda.matmul.allow_tf32)
        lane = self._lane(key)
        if key not in lane.recordings:
            lane.recordings[key] = self._record(program, given, lane, steps)
            if len(lane.recordings) > MOST_GRAPHS:
                lane.recordings.popitem(last=False)
        lane.recordings.move_to_end(key)
        recording = lane.recordings[key]
        # The next replay overwrites the outputs.
        answer = tree.map(torch.empty_like, recording.outputs)
        lane.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(lane.stream):
            torch._foreach_copy_(recording.inputs, tree.tensors(given))
            for part in recording.parts:
                part()
            torch._foreach_copy_(tree.tensors(answer), tree.tensors(recording.outputs))
            done = lane.stream.record_event()
        lane.load += 1
        return _Begun(answer, given, lane, done)

    def _stepwise(self, program: Program, shared: Tree, clients: tuple[Tree, ...]) -> tuple[Tree, int]:
        """The answer, and how many steps the outermost loops of a client had."""
        stepwise = Stepwise(self._steps.record)
        with looping(stepwise):
            return mapped(program, shared, clients), stepwise.steps

    def serving(self) -> AbstractContextManager[None]:
        return looping(Stepwise(self._steps.record, under=0))

    def _finished(self, begun: _Begun) -> Tree:
        if begun.lane is not None and begun.done is not None:
            torch.cuda.current_stream(self.device).wait_event(begun.done)
            begun.lane.load -= 1
        return begun.answer

    def _lane(self, key: Hashable) -> _Lane:
        """The one that has recorded it, so that none does so twice; else the least busy one."""
        return min(self._lanes, key=lambda lane: (key not in lane.recordings, lane.load))

    def _record(
        self, program: Program, given: tuple[Tree, tuple[Tree, ...]], lane: _Lane, steps: int
    ) -> _Recording:
        begin = time.perf_counter()
        held, tape = tree.clone(given), _Tape(lane)
        looper = Stepwise(tape.record, replay=tape.replay, warm=True) if steps >= LONG else narrowing
        torch.cuda.synchronize(self.device)
        with warnings.catch_warnings(), torch.cuda.stream(lane.stream), _undisturbed(), looping(looper):
            # A first state that is the start itself needs no kernel.
            warnings.filterwarnings("ignore", "The CUDA Graph is empty", UserWarning)
            tape.begin()
            try:
                outputs = mapped(program, *held)
            finally:
                tape.end()
        self.captures += 1
        seconds = time.perf_counter() - begin
        log.info("CUDA graph %d: %s recorded in %.2f s", self.captures, program.fn.__name__, seconds)
        return _Recording(program, tape.parts, tree.tensors(held), outputs)


def vectorized(device: torch.device, limit: int) -> Vectorized:
    """The vectorized engine as the device runs it best."""
    return Captured(device, limit) if device.type == "cuda" else Vectorized(device, limit)


def stairs(most: Sequence[int], unit: int = 1) -> list[int]:
    """Bounds of clients sorted by them, rounded up, nobody's among them, along the nearest of the SLOPES.

    So the first bound, the slope and the number of clients tell them all, and recordings serve many chunks.
    """
    count = ceiling(len(most))
    begins = (count * eighth // 8 for eighth in range(8))
    least = tuple(math.ceil(most[at] / unit) if at < len(most) else 0 for at in begins)
    return [h * unit for h, n in _nearest(count, least) for _ in range(n)]


@lru_cache(maxsize=1 << 14)  # many ways to cut a cohort are weighed in every round
def _nearest(count: int, least: tuple[int, ...]) -> list[tuple[int, int]]:
    """The lowest flight that is nowhere below `least`, and how many clients each of its steps has."""
    lengths = [end - begin for begin, end in pairwise(count * eighth // 8 for eighth in range(9))]
    above = (flight for flight in _flights(ceiling(least[0])) if all(map(operator.ge, flight, least)))
    lowest = min(above, key=lambda flight: sum(map(operator.mul, flight, lengths)))
    return list(zip(lowest, lengths, strict=True))


@lru_cache(maxsize=1 << 10)
def _flights(first: int) -> list[tuple[int, ...]]:
    """Along each of the SLOPES."""
    return [tuple(math.ceil(first * share) for share in slope) for slope in SLOPES]


def _rounded(program: Program, clients: tuple[Tree, ...], count: int) -> tuple[Program, tuple[Tree, ...]]:
    """`count` clients, those that were not there all zeros; shards of a rounded number of batches."""
    padding, shards = program.federation.data.padding, iter(program.shards)

    def wider(rows: Rows, known: Known) -> tuple[Rows, Known]:
        width, unit = rows.place.shape[1], known.batch
        batches = ceiling(math.ceil(width / unit)) * unit if width > unit else ceiling(width)
        wide = rows._replace(place=F.pad(rows.place, (0, batches - width), value=padding))
        most = tuple(stairs(known.most, unit)) if known.most else ()
        return wide, Known(known.even and batches == width, most, unit)

    both = [wider(part, next(shards)) if isinstance(part, Rows) else (part, None) for part in clients]
    wide = tuple(part for part, _ in both)
    program = replace(program, shards=tuple(known for _, known in both if known is not None))
    more = count - tree.leaves(clients)[0].shape[0]
    if more == 0:
        return program, wide
    return program, tree.map(lambda leaf: torch.cat([leaf, leaf.new_zeros((more, *leaf.shape[1:]))]), wide)
