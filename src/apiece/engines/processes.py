"""Processes: clients one by one, as sequential computes them, but several at once. For CPUs.

Each is computed by a process of one thread. The processes are forks of this one, so method, task and the
resident examples are theirs without being sent. Other tensors go both ways through memory that is shared; it
has no name, so nothing of it is left behind, however a process ends. Answers are taken in the order of the
calls: results have the bits that sequential gives them with one thread, whatever the number of processes.
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
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch import Tensor

from apiece import tree
from apiece.engines.base import Call, Federation, Program
from apiece.engines.sequential import Sequential
from apiece.errors import ApieceError
from apiece.tree import Tree

log = logging.getLogger("apiece")

CPU = torch.device("cpu")
ALIGNMENT = 64  # bytes, as PyTorch's own: some kernels' bits depend on it
LEAST = 1 << 16  # bytes of a room
QUEUED = 2  # calls that a process holds at the most: the one it computes and the next
DEATHS = 3  # processes that one call may cost

Place = tuple[Any, ...]  # where a tensor lies: ("resident", number) or ("board" or "slot", begin, dtype, shape)


def cpus() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else 1


def obstacle() -> str:
    """Why there can be no such engine here, or ''."""
    if sys.platform != "linux":
        return "it needs Linux"
    if torch.cuda.is_available():
        return "PyTorch sees a CUDA device and cannot fork then; hide it with CUDA_VISIBLE_DEVICES="
    if multiprocessing.current_process().daemon:
        return "this is a daemon process, which may not start others"
    return ""


class Processes(Sequential):
    """Chunks of one client; `window`: answers that may wait for one before them, at the most."""

    name = "processes"

    def __init__(self, processes: int, window: int) -> None:
        why = obstacle()
        if why:
            raise ApieceError(f"the processes engine cannot be used: {why}")
        super().__init__(CPU)
        self._processes = processes
        self._window = window
        self._board = _Room()
        self._base: Federation | None = None  # whose method, task and examples the processes have
        self._children: list[_Child] = []
        weakref.finalize(self, _end, self._children, os.getpid())

    def answers(self, calls: Iterable[Call]) -> Iterator[Tree]:
        pending = iter(calls)
        first = list(islice(pending, 2))
        if len(first) < 2 or self._processes < 2:
            yield from super().answers(chain(first, pending))
            return
        self._begin(first[0].program.federation)
        phase = _Phase(chain(first, pending), self._posted(first[0]))
        try:
            yield from self._answered(phase)
        finally:
            if any(child.calls for child in self._children):
                self.close()

    def close(self) -> None:
        """End the processes; the next phase begins others."""
        _end(self._children, os.getpid())

    def _begin(self, federation: Federation) -> None:
        """Processes that have this method and task, and nothing left to do."""
        if not self._fits(federation) or any(child.calls for child in self._children):
            self.close()
            self._base = federation

    def _fits(self, federation: Federation) -> bool:
        base = self._base
        return base is not None and base.task is federation.task and base.method == federation.method

    def _posted(self, call: Call) -> dict[int, tuple[Tensor, Place]]:
        """id → what need not be sent with each call: the resident examples, and what this phase shares."""
        assert self._base is not None
        data, self._board.end = call.program.federation.data, 0
        resident = tree.leaves((self._base.data.x, self._base.data.y))
        held = {id(leaf): (leaf, ("resident", number)) for number, leaf in enumerate(resident)}
        for leaf in tree.tensors((data.x, data.y, call.shared)):
            if id(leaf) not in held:
                held[id(leaf)] = (leaf, ("board", *self._board.put(leaf)))
        return held

    def _answered(self, phase: _Phase) -> Iterator[Tree]:
        """Children come first: this process works while they do."""
        while True:
            self._collect(phase, block=phase.stuck)
            while self._hand_out(phase):
                pass
            if phase.turn in phase.answers:
                yield phase.next_answer()
            elif not phase.calls and not any(child.calls for child in self._children):
                return

    def _hand_out(self, phase: _Phase) -> bool:
        """One more call prepared or handed out, if there is room for it."""
        waiting = self._processes + 1  # so many left: nobody will wait for the one who holds two
        if len(phase.ready) < waiting and phase.prepare(self._window):
            pass
        elif not phase.ready:
            return False
        child = self._free(QUEUED if len(phase.ready) >= waiting else 1)
        if child is None:
            return False
        number = phase.ready.popleft()
        call = phase.calls[number]
        if not self._fits(call.program.federation):
            raise ValueError("the calls of one phase differ in their method or task")
        try:
            child.ask(number, call, phase.held)
        except OSError:
            self._bury(child, phase)
        return True

    def _free(self, limit: int) -> _Child | None:
        """The child with least to do, a new one if all have something."""
        child = min(self._children, key=lambda child: len(child.calls), default=None)
        if child is not None and not child.calls:
            return child
        if len(self._children) < self._processes:
            assert self._base is not None
            self._children.append(_Child(self._base, self._board))
            return self._children[-1]
        return child if child is not None and len(child.calls) < limit else None

    def _collect(self, phase: _Phase, block: bool) -> None:
        """Take the answers that are there; with `block`, wait for one."""
        by_connection = {child.connection: child for child in self._children if child.calls}
        for connection in wait(list(by_connection), None if block else 0):
            child = by_connection[connection]  # type: ignore[index]
            try:
                answer = child.answer()
            except (EOFError, OSError):
                self._bury(child, phase)
            else:
                phase.answers[child.calls.popleft()] = answer

    def _bury(self, child: _Child, phase: _Phase) -> None:
        """A child has died: what it had to do is handed out again."""
        self._children.remove(child)
        child.end()
        code, where = child.process.exitcode, phase.calls[child.calls[0]].where
        how = signal.strsignal(-code) if code is not None and code < 0 else f"exit code {code}"
        phase.deaths[child.calls[0]] += 1
        if phase.deaths[child.calls[0]] >= DEATHS:
            raise ApieceError(
                f"{DEATHS} processes ended, one after another, {where} ({how}). Is there memory enough? "
                f"Fewer processes need less: --threads"
            )
        log.warning("a process ended (%s) %s: computed again by a new one", how, where)
        phase.ready.extendleft(reversed(child.calls))


@dataclass
class _Phase:
    """Calls that are computed together, by number."""

    pending: Iterator[Call]
    held: dict[int, tuple[Tensor, Place]]
    calls: dict[int, Call] = field(default_factory=dict)  # prepared, and not yet answered in their turn
    ready: deque[int] = field(default_factory=deque)  # those to be handed out
    answers: dict[int, Tree | _Failure] = field(default_factory=dict)  # those that wait for their turn
    deaths: Counter[int] = field(default_factory=Counter)
    turn: int = 0
    prepared: int = 0

    def prepare(self, window: int) -> bool:
        """One more call from those pending, unless too many wait already."""
        call = next(self.pending, None) if self.prepared - self.turn < window else None
        if call is None:
            return False
        self.calls[self.prepared] = call
        self.ready.append(self.prepared)
        self.prepared += 1
        return True

    @property
    def stuck(self) -> bool:
        return bool(self.calls) and self.turn not in self.answers and not self.ready

    def next_answer(self) -> Tree:
        call, answer = self.calls.pop(self.turn), self.answers.pop(self.turn)
        self.turn += 1
        if isinstance(answer, _Failure):
            error = answer.error
            error.add_note(call.where)
            error.add_note(f"in another process:\n{answer.trace}")
            raise error
        return answer
