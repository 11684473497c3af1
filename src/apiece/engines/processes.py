"""Processes: clients one by one, as sequential computes them, but several at once. For CPUs.

Each is computed by a process of one thread. The processes are forks of this one, so method, task and the
resident examples are theirs without being sent. Other tensors go both ways through shared memory; it has no
name, so nothing of it is left behind, however a process ends. Answers are taken in the order of the calls:
results have the bits that sequential gives them with one thread, whatever the number of processes.
"""

from __future__ import annotations

import io
import logging
import mmap
import multiprocessing
import os
import pickle
import signal
import sys
import traceback
import warnings
import weakref
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from itertools import chain, islice
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import torch
from torch import Tensor

from apiece import tree
from apiece.data.federated import Federated
from apiece.engines.base import Call, Federation, Program
from apiece.engines.sequential import Sequential
from apiece.errors import ApieceError
from apiece.tree import Tree

log = logging.getLogger("apiece")

QUEUED = 2  # calls that a process holds at the most: the one it computes, and the next
DEATHS = 3  # processes that one call may cost
FIELDS = tuple(f.name for f in fields(Federation))  # of every federation; what a kind of them adds is sent


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


class Processes(Sequential):
    """Chunks of one client, several at once; what is not a phase of several is computed here."""

    name = "processes"

    def __init__(self, device: torch.device, processes: int) -> None:
        if obstacle(device):
            raise ApieceError(f"the processes engine cannot be used: {obstacle(device)}")
        super().__init__(device)
        self._most = processes
        self._base: Federation | None = None  # whose method, task and examples the children have
        self._board = _Room()  # what a phase shares
        self._children: list[_Child] = []
        weakref.finalize(self, _end, self._children, os.getpid())

    def answers(self, calls: Iterable[Call]) -> Iterator[Tree]:
        pending = iter(calls)
        first = list(islice(pending, 2))
        if len(first) < 2:
            yield from super().answers(first)
            return
        self._begin(first[0].program.federation)
        phase = _Phase(chain(first, pending), self._posted(first[0]))
        while True:
            self._take(phase)
            self._give(phase)
            if len(phase.ready) <= self._most and phase.prepare():
                continue
            if phase.turn in phase.answers:
                yield phase.next()
            elif any(child.calls for child in self._children):
                wait([child.connection for child in self._children if child.calls])
            else:
                return

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

    def _posted(self, call: Call) -> dict[int, _Posted]:
        """By id: tensors that are not sent with each call, for the children have them or find them posted."""
        assert self._base is not None
        self._board.end = 0
        theirs, data = _examples(self._base), call.program.federation.data
        posted = {id(leaf): _Posted(leaf, (RESIDENT, at)) for at, leaf in enumerate(theirs)}
        for leaf in tree.tensors((data.x, data.y, call.shared)):
            if id(leaf) not in posted:
                posted[id(leaf)] = _Posted(leaf, (BOARD, *self._board.put(leaf)))
        return posted

    def _take(self, phase: _Phase) -> None:
        """The answers that are there."""
        asked = {child.connection: child for child in self._children if child.calls}
        for connection in wait(list(asked), 0):
            child = asked[connection]  # type: ignore[index]
            try:
                answer = child.answer()
            except (EOFError, OSError):
                self._bury(child, phase)
            else:
                phase.close(child.calls.popleft(), answer)

    def _give(self, phase: _Phase) -> None:
        """A call to each child that has none, and one to have next if the others will not wait for it."""
        while phase.ready:
            child = self._idlest()
            if len(child.calls) >= (QUEUED if len(phase.ready) > self._most else 1):
                return
            number = phase.ready.popleft()
            if not self._fits(phase.calls[number].program.federation):
                raise ValueError("calls of one phase differ in method or task")
            try:
                child.ask(number, phase.calls[number], phase.posted)
            except OSError:
                self._bury(child, phase)

    def _idlest(self) -> _Child:
        """The child with least to do; a new one, if there may be one, before a second call for any."""
        idlest = min(self._children, key=lambda child: len(child.calls), default=None)
        if idlest is None or (idlest.calls and len(self._children) < self._most):
            assert self._base is not None
            idlest = _Child(self._base, self._board)
            self._children.append(idlest)
        return idlest

    def _bury(self, child: _Child, phase: _Phase) -> None:
        """A child died: its calls are given to another."""
        self._children.remove(child)
        how, number = child.end(), child.calls[0]
        where = phase.calls[number].where
        phase.deaths[number] += 1
        if phase.deaths[number] == DEATHS:
            raise ApieceError(
                f"{DEATHS} processes ended ({how}) {where}. Is there memory enough for {self._most} "
                f"of them? --processes says how many there are."
            )
        log.warning("a process ended (%s) %s: computed again by another", how, where)
        phase.ready.extendleft(reversed(child.calls))


@dataclass
class _Phase:
    """Calls that are computed at once, by their number."""

    pending: Iterator[Call]
    posted: dict[int, _Posted]
    calls: dict[int, Call] = field(default_factory=dict)  # prepared, not answered
    ready: deque[int] = field(default_factory=deque)  # those of them that no child has
    answers: dict[int, Tree] = field(default_factory=dict)  # those whose turn has not come
    deaths: Counter[int] = field(default_factory=Counter)
    prepared: int = 0
    turn: int = 0

    def prepare(self) -> bool:
        """One more call, if there is one."""
        call = next(self.pending, None)
        if call is None:
            return False
        self.calls[self.prepared] = call
        self.ready.append(self.prepared)
        self.prepared += 1
        return True

    def close(self, number: int, answer: Tree) -> None:
        call = self.calls.pop(number)
        if isinstance(answer, _Failure):
            answer = answer._replace(where=call.where)
        self.answers[number] = answer

    def next(self) -> Tree:
        """The answer whose turn it is."""
        answer = self.answers.pop(self.turn)
        self.turn += 1
        if isinstance(answer, _Failure):
            raise answer.told()
        return answer


class _Failure(NamedTuple):
    """What a child answers when it cannot."""

    error: bytes
    trace: str
    where: str = ""

    @staticmethod
    def of(error: Exception) -> _Failure:
        trace = traceback.format_exc()
        try:
            packed = pickle.dumps(error)
            pickle.loads(packed)
        except Exception:  # of a kind that cannot travel
            packed = pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
        return _Failure(packed, trace)

    def told(self) -> Exception:
        error: Exception = pickle.loads(self.error)
        error.add_note(self.where)
        error.add_note(f"In the process that computed it:\n{self.trace}")
        return error


class _Child:
    """A process, as its parent sees it."""

    def __init__(self, base: Federation, board: _Room) -> None:
        self.calls: deque[int] = deque()  # asked and not answered
        self._slots = tuple(_Room() for _ in range(QUEUED))
        self._asked = 0
        context = multiprocessing.get_context("fork")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(
            target=_serve,
            args=(self.connection, theirs, base, board, self._slots),
            name="apiece",
            daemon=True,
        )
        with warnings.catch_warnings():
            # Python warns of forks where there are threads. PyTorch's are idle, and a child uses none.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.process.start()
        theirs.close()

    def ask(self, number: int, call: Call, posted: Mapping[int, _Posted]) -> None:
        slot = self._slots[self._asked % QUEUED]
        slot.end = 0
        program = call.program
        federation = program.federation
        examples = (federation.data.x, federation.data.y)
        more = {name: value for name, value in vars(federation).items() if name not in FIELDS}
        sent = (type(federation), more, examples, program.fn, program.even, program.together)
        message = _packed((sent, call.shared, call.clients), slot, posted)
        self.calls.append(number)
        self._asked += 1
        self.connection.send((slot.end, message))

    def answer(self) -> Tree:
        """The answer to the first of the calls; EOFError or OSError: the process is dead."""
        slot = self._slots[(self._asked - len(self.calls)) % QUEUED]
        found = self.connection.recv()
        if isinstance(found, _Failure):
            return found
        return tree.map(torch.clone, _unpacked(found, {SLOT: slot}))

    def end(self) -> str:
        """Be rid of the process; how it ended."""
        self.process.kill()
        self.process.join()
        self.connection.close()
        code = self.process.exitcode or 0
        return f"{signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _end(children: list[_Child], owner: int) -> None:
    if os.getpid() == owner:  # not in a fork of it
        while children:
            children.pop().end()


def _serve(
    parents: Connection, connection: Connection, base: Federation, board: _Room, slots: tuple[_Room, ...]
) -> None:
    """What a child does: answer calls until its parent is gone."""
    # Ends of older children's, which a fork has too, keep those alive until this one ends; that of a child's
    # own would keep it alive for ever.
    parents.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's to handle
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    logging.disable()  # a thread of the parent may have held a handler's lock
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    engine, answered = Sequential(base.task.device), 0
    with suppress(EOFError, OSError):
        while True:
            end, message = connection.recv()
            slot = slots[answered % QUEUED]
            answered += 1
            try:
                found = _answer(engine, base, message, {BOARD: board, SLOT: slot})
                slot.end = end
                reply: bytes | _Failure = _packed(found, slot, {})
            except Exception as error:
                reply = _Failure.of(error)
            connection.send(reply)


def _answer(engine: Sequential, base: Federation, message: bytes, rooms: Mapping[str, _Room]) -> Tree:
    sent, shared, clients = _unpacked(message, rooms, _examples(base))
    kind, more, (x, y), fn, even, together = sent
    assert isinstance(base.data, Federated)  # some clients' alone
    same = {name: getattr(base, name) for name in FIELDS}
    federation = kind(**{**same, **more, "data": replace(base.data, x=x, y=y)})
    return engine.each(Program(fn, federation, even, together), shared, clients)


def _examples(federation: Federation) -> list[Tensor]:
    return tree.tensors((federation.data.x, federation.data.y))


# Tensors in shared memory

RESIDENT, BOARD, SLOT = "resident", "board", "slot"

ALIGNMENT = 64  # bytes, as in PyTorch's own memory: there are kernels whose bits depend on it
LEAST = 1 << 16


class _Room:
    """Memory that processes share and that grows; tensors are put into it one behind the other."""

    def __init__(self) -> None:
        self.end = 0
        self._file = os.memfd_create("apiece")
        self._bytes = torch.empty(0, dtype=torch.uint8)
        weakref.finalize(self, os.close, self._file)

    def put(self, tensor: Tensor) -> tuple[Any, ...]:
        """Copy a tensor behind the others; where `get` finds it."""
        place = (self.end, tensor.dtype, tuple(tensor.shape))
        self.get(*place).copy_(tensor)
        self.end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        return place

    def get(self, begin: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """The tensor that lies there; what is put there later is seen through it."""
        end = begin + torch.Size(shape).numel() * dtype.itemsize
        if end > len(self._bytes):
            size = os.fstat(self._file).st_size
            if end > size:
                size = max(LEAST, 1 << (end - 1).bit_length())
                os.ftruncate(self._file, size)
            self._bytes = torch.frombuffer(mmap.mmap(self._file, size), dtype=torch.uint8)
        return self._bytes[begin:end].view(dtype).view(shape)


class _Posted(NamedTuple):
    tensor: Tensor  # kept alive: it is known by its id
    place: tuple[Any, ...]


class _Packer(pickle.Pickler):
    """Tensors are put into a room, unless they are posted."""

    def __init__(self, file: io.BytesIO, room: _Room, posted: Mapping[int, _Posted]) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._room, self._posted = room, posted

    def persistent_id(self, thing: object) -> tuple[Any, ...] | None:
        if not isinstance(thing, Tensor):
            return None
        posted = self._posted.get(id(thing))
        return (SLOT, *self._room.put(thing)) if posted is None else posted.place


class _Unpacker(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, rooms: Mapping[str, _Room], resident: list[Tensor]) -> None:
        super().__init__(file)
        self._rooms, self._resident = rooms, resident

    def persistent_load(self, place: tuple[Any, ...]) -> Tensor:
        kind, *rest = place
        return self._resident[rest[0]] if kind == RESIDENT else self._rooms[kind].get(*rest)


def _packed(things: Any, room: _Room, posted: Mapping[int, _Posted]) -> bytes:
    file = io.BytesIO()
    try:
        _Packer(file, room, posted).dump(things)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ApieceError(
            f"the processes engine cannot send this to another process: {error}. "
            f"Define the classes of states and messages at the top of a module."
        ) from error
    return file.getvalue()


def _unpacked(message: bytes, rooms: Mapping[str, _Room], resident: list[Tensor] | None = None) -> Any:
    return _Unpacker(io.BytesIO(message), rooms, resident or []).load()
