"""Processes: clients as the sequential or the vectorized engine computes them, but several chunks at once.
For CPUs.

Each chunk is computed by a process of one thread. The processes are forks of this one, so method, task and
the resident examples are theirs without being sent. Other tensors go both ways through shared memory; it has
no name, so nothing of it is left behind, however a process ends. Answers are taken in the order of the calls:
results have the bits that the engine inside gives them with one thread and the same chunks.
"""

from __future__ import annotations

import ctypes
import heapq
import logging
import mmap
import multiprocessing
import os
import signal
import sys
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain, islice
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as _wait

import torch
from torch import Tensor

from apiece import tree
from apiece.engines.base import Call, Engine, Federation, Program, work
from apiece.engines.packing import BOARD, RESIDENT, SLOT, Posted, Room, enough, packed, unpacked
from apiece.engines.pool import QUEUED, Child, Failure, GoneError, Pool, examples, received, sent
from apiece.engines.sequential import Sequential
from apiece.errors import ApieceError
from apiece.optim import Recipe
from apiece.tree import Tree

log = logging.getLogger("apiece")


HANDFUL = 8  # clients at the most: what all of them answer is held until the last is done
LATER = 1.02  # times as late as with a call for each client: how late all may be done for the sake of fewer


def handfuls(steps: Sequence[int], processes: int, most: int) -> list[list[int]]:
    """Positions of clients, by their steps, that a process computes one by one for one answer; longest first.

    A call costs the parent a millisecond, so there are few: two for each process, or as many as it takes for
    all to be done hardly later than with a call for each client.
    """
    order = sorted(range(len(steps)), key=lambda i: (-steps[i], i))
    alone, calls = [[i] for i in order], 2 * processes
    latest = LATER * _end_of(alone, steps, processes)
    while calls < len(steps) and most > 1:
        found = _parted(order, steps, calls, most)
        if _end_of(found, steps, processes) <= latest:
            return found
        calls *= 2
    return alone


def _parted(order: Sequence[int], steps: Sequence[int], parts: int, most: int) -> list[list[int]]:
    """The clients, in order, in about so many parts of about equal work."""
    found: list[list[int]] = []
    share, before, last = sum(steps) / parts, 0, -1
    for i in order:
        part = int((before + steps[i] / 2) / share)
        if part != last or len(found[-1]) == most:
            found.append([])
        found[-1].append(i)
        before, last = before + steps[i], part
    return sorted(found, key=lambda part: -sum(steps[i] for i in part))


def _end_of(parts: Sequence[Sequence[int]], steps: Sequence[int], processes: int) -> int:
    """When all are done, if who is free takes the next."""
    done = [0] * processes
    for part in parts:
        heapq.heapreplace(done, done[0] + sum(steps[i] for i in part))
    return max(done)


def cpus() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else 1


def obstacle(device: torch.device) -> str:
    """Why this engine cannot be used here, or ''."""
    if sys.platform != "linux":
        return "it needs Linux"
    if device.type != "cpu":
        return f"it computes on a CPU, and the device is {device}"
    if torch.cuda.is_available():
        return "PyTorch sees a GPU, and then cannot be forked; hide it: CUDA_VISIBLE_DEVICES="
    if multiprocessing.current_process().daemon:
        return "this process is a daemon, which may have no children"
    return ""


class Processes(Pool["_Child"], Engine):
    """Chunks of the engine inside, several at once; what is not a phase of several is computed here."""

    name = "processes"
    one, many = "a process", "processes"
    under_way = 0

    def __init__(self, device: torch.device, processes: int, inside: Engine | None = None) -> None:
        if obstacle(device):
            raise ApieceError(f"the processes engine cannot be used: {obstacle(device)}")
        self._inside = inside or Sequential(device)
        Engine.__init__(self, device, self._inside.limit)
        self.overhead = self._inside.overhead
        Pool.__init__(self, processes)
        self._base: Federation | None = None  # whose method, task and examples the children have
        self._board = _Shared()  # what a phase shares
        weakref.finalize(self, _end, self._children, os.getpid())

    def cut(self, sizes: Sequence[int], recipe: Recipe) -> list[list[int]]:
        if isinstance(self._inside, Sequential):
            return handfuls(work(sizes, recipe), self._most, self.limit)
        return self._inside.cut(sizes, recipe)

    def each(self, program: Program, shared: Tree, clients: tuple[Tree, ...]) -> Tree:
        return self._inside.each(program, shared, clients)

    def answers(self, calls: Iterable[Call]) -> Iterator[Tree]:
        pending = iter(calls)
        first = list(islice(pending, 2))
        if len(first) < 2:
            yield from super().answers(first)
            return
        self._begin(first[0].program.federation)
        yield from self._computed(chain(first, pending), self._posted(first[0]))

    def _begin(self, federation: Federation) -> None:
        """Children that have this method and task, are alive and have nothing to do, as after an error."""
        if not self._fits(federation) or any(child.calls for child in self._children):
            _end(self._children, os.getpid())
            self._base = federation
        for child in [child for child in self._children if not child.process.is_alive()]:
            self._children.remove(child)
            log.warning("a process ended (%s) while it had nothing to do", child.end())

    def _fits(self, federation: Federation) -> bool:
        base = self._base
        return base is not None and base.task is federation.task and base.method == federation.method

    def _posted(self, call: Call) -> dict[int, Posted]:
        """By id: tensors that are not sent with each call, for the children have them or find them posted."""
        assert self._base is not None
        self._board.end = 0
        posted = {id(leaf): Posted(leaf, (RESIDENT, at)) for at, leaf in enumerate(examples(self._base))}
        for leaf in [*examples(call.program.federation), *tree.tensors(call.shared)]:
            if id(leaf) not in posted:
                posted[id(leaf)] = Posted(leaf, (BOARD, *self._board.put(leaf)))
        return posted

    def _answered(self, wait: bool) -> list[_Child]:
        asked = {child.connection: child for child in self._children if child.calls}
        return [asked[found] for found in _wait(list(asked), None if wait else 0)]  # type: ignore[index]

    def _hire(self) -> _Child:
        assert self._base is not None
        return _Child(self._base, self._board, self._inside)


class _Child(Child):
    """A process, as its parent sees it."""

    def __init__(self, base: Federation, board: _Shared, engine: Engine) -> None:
        super().__init__()
        self._slots = tuple(_Shared() for _ in range(QUEUED))
        self._asked = 0
        context = multiprocessing.get_context("fork")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(
            target=_serve,
            args=(self.connection, theirs, base, board, self._slots, engine),
            name="apiece",
            daemon=True,
        )
        with warnings.catch_warnings(), _uninterrupted():
            # Python warns of forks where there are threads. PyTorch's are idle, and a child uses none.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.process.start()
        theirs.close()

    def ask(self, number: int, call: Call, posted: Mapping[int, Posted]) -> None:
        slot = self._slots[self._asked % QUEUED]
        slot.end = 0
        message = packed((sent(call.program), call.shared, call.clients), slot, posted)
        self.calls.append(number)
        self._asked += 1
        try:
            self.connection.send((slot.end, message))
        except OSError as error:
            raise GoneError from error

    def answer(self) -> Tree:
        slot = self._slots[(self._asked - len(self.calls)) % QUEUED]
        try:
            found = self.connection.recv()
        except (EOFError, OSError) as error:
            raise GoneError from error
        if isinstance(found, Failure):
            return found
        return tree.map(torch.clone, unpacked(found, {SLOT: slot}))

    def end(self) -> str:
        self.process.kill()
        self.process.join()
        self.connection.close()
        code = self.process.exitcode or 0
        return f"{signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C waits: it reaches a child before that has said that it is none of its business."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end(children: list[_Child], owner: int) -> None:
    if os.getpid() == owner:  # not in a fork of it
        while children:
            children.pop().end()


def _serve(
    parents: Connection,
    connection: Connection,
    base: Federation,
    board: _Shared,
    slots: tuple[_Shared, ...],
    engine: Engine,
) -> None:
    """What a child does: answer calls until its parent is gone."""
    # Ends of older children's, which a fork has too, keep those alive until this one ends; that of a child's
    # own would keep it alive for ever.
    parents.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's to handle; it was blocked until here
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    logging.disable()  # a thread of the parent may have held a handler's lock
    keep_memory()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    answered = 0
    with suppress(EOFError, OSError):
        while True:
            end, message = connection.recv()
            slot = slots[answered % QUEUED]
            answered += 1
            try:
                program, shared, clients = unpacked(message, {BOARD: board, SLOT: slot}, examples(base))
                found = engine.each(received(base, program), shared, clients)
                slot.end = end
                reply: bytes | Failure = packed(found, slot)
            except Exception as error:
                reply = Failure.of(error)
            connection.send(reply)


def keep_memory() -> None:
    """Have glibc keep what is freed: large tensors would go back to the system and be zeroed at each step.

    A step of a perceptron with half a million weights takes a sixth less time.
    """
    change = getattr(ctypes.CDLL(None), "mallopt", None)
    if change is not None:
        for option in (-1, -3):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
            change(option, 1 << 30)


class _Shared(Room):
    """A room that processes share. It has no name."""

    def __init__(self) -> None:
        super().__init__()
        self._file = os.memfd_create("apiece")
        weakref.finalize(self, os.close, self._file)

    def _with_room_for(self, end: int) -> Tensor:
        size = os.fstat(self._file).st_size
        if end > size:
            size = enough(end)
            os.ftruncate(self._file, size)
        return torch.frombuffer(mmap.mmap(self._file, size), dtype=torch.uint8)
