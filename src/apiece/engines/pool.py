"""Pool: the calls of a phase handed out to processes that compute, whatever kind of processes they are.

A call is handed out when a process is free. Answers are taken in the order of the calls, so results do not
depend on who computed what. The calls of a process that dies are computed again by another.
"""

from __future__ import annotations

import logging
import math
import pickle
import traceback
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

from torch import Tensor

from apiece import tree
from apiece.data.federated import Federated
from apiece.engines.base import Call, Federation, Program
from apiece.engines.packing import Posted
from apiece.errors import ApieceError
from apiece.tree import Tree

log = logging.getLogger("apiece")

QUEUED = 2  # calls that a process holds at the most: the one it computes, and the next
DEATHS = 3  # processes that one call may cost
FIELDS = tuple(f.name for f in fields(Federation))  # of every federation; what a kind of them adds is sent


PIECES = 8  # chunks for each child, where clients are computed one by one: who is done early takes another


def share(cohort: int, children: int, engine: str, most: int) -> int:
    """Clients in a chunk, so that every child, whose engine is `engine`, has some of a cohort."""
    return min(most, math.ceil(cohort / (children * (PIECES if engine == "sequential" else 1))))


class GoneError(Exception):
    """The process that was asked is dead."""


class Child(ABC):
    """A process that computes calls, as the one that asks sees it."""

    begun = True  # may it be asked already?

    def __init__(self) -> None:
        self.calls: deque[int] = deque()  # asked and not answered

    @abstractmethod
    def ask(self, number: int, call: Call, posted: Mapping[int, Posted]) -> None:
        """Send a call, and note its number in `calls`; GoneError: the process is dead."""

    @abstractmethod
    def answer(self) -> Tree:
        """The answer to the first of its calls; GoneError: the process is dead."""

    @abstractmethod
    def end(self) -> str:
        """Be rid of the process; how it ended."""


Kind = TypeVar("Kind", bound=Child)


class Pool(ABC, Generic[Kind]):
    """At most so many children, begun when there is a call that no other is free for."""

    one: ClassVar[str]  # what a child is called
    many: ClassVar[str]

    def __init__(self, most: int) -> None:
        self.deaths = 0  # of children that had calls to answer
        self._most = most
        self._children: list[Kind] = []

    @abstractmethod
    def _hire(self) -> Kind:
        """One more child."""

    @abstractmethod
    def _answered(self, wait: bool) -> list[Kind]:
        """The children that have an answer, or are dead with one due; `wait` until something happens."""

    @abstractmethod
    def _fits(self, federation: Federation) -> bool:
        """Do the children have this method and task?"""

    def _computed(self, calls: Iterable[Call], posted: Mapping[int, Posted]) -> Iterator[Tree]:
        """The answers to the calls of a phase, in their order."""
        phase = _Phase(iter(calls), posted)
        while True:
            self._take(phase, wait=False)
            self._give(phase)
            if len(phase.ready) <= self._most and phase.prepare():
                continue
            if phase.turn in phase.answers:
                yield phase.next()
            elif phase.calls:
                self._take(phase, wait=True)
            else:
                return

    def _take(self, phase: _Phase, wait: bool) -> None:
        """The answers that are there."""
        for child in self._answered(wait):
            try:
                answer = child.answer()
            except GoneError:
                self._bury(child, phase)
            else:
                phase.close(child.calls.popleft(), answer)

    def _give(self, phase: _Phase) -> None:
        """A call to each child that has none, and one to have next if the others will not wait for it."""
        while phase.ready:
            child = self._idlest()
            if child is None or len(child.calls) >= (QUEUED if len(phase.ready) > self._most else 1):
                return
            number = phase.ready.popleft()
            if not self._fits(phase.calls[number].program.federation):
                raise ValueError("calls of one phase differ in method or task")
            try:
                child.ask(number, phase.calls[number], phase.posted)
            except GoneError:
                self._bury(child, phase)

    def _idlest(self) -> Kind | None:
        """The child with least to do; a new one, if there may be one, before a second call for any."""
        while True:
            begun = [child for child in self._children if child.begun]
            idlest = min(begun, key=lambda child: len(child.calls), default=None)
            if (idlest is not None and not idlest.calls) or len(self._children) >= self._most:
                return idlest
            self._children.append(self._hire())

    def _bury(self, child: Kind, phase: _Phase) -> None:
        """A child died: its calls are given to another."""
        self._children.remove(child)
        self.deaths += 1
        how, number = child.end(), child.calls[0]
        where = phase.calls[number].where
        phase.deaths[number] += 1
        if phase.deaths[number] == DEATHS:
            raise ApieceError(
                f"{DEATHS} {self.many} ended ({how}) {where}. Is there memory enough for {self._most} "
                f"of them? --processes says how many there are."
            )
        log.warning("%s ended (%s) %s: computed again by another", self.one, how, where)
        phase.ready.extendleft(reversed(child.calls))


@dataclass
class _Phase:
    """Calls that are computed at once, by their number."""

    pending: Iterator[Call]
    posted: Mapping[int, Posted]
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
        if isinstance(answer, Failure):
            answer = answer._replace(where=call.where)
        self.answers[number] = answer

    def next(self) -> Tree:
        """The answer whose turn it is."""
        answer = self.answers.pop(self.turn)
        self.turn += 1
        if isinstance(answer, Failure):
            raise answer.told()
        return answer


class Failure(NamedTuple):
    """What a child answers when it cannot."""

    error: bytes
    trace: str
    where: str = ""

    @staticmethod
    def of(error: Exception) -> Failure:
        trace = traceback.format_exc()
        try:
            packed = pickle.dumps(error)
            pickle.loads(packed)
        except Exception:  # of a kind that cannot travel
            packed = pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
        return Failure(packed, trace)

    def told(self) -> Exception:
        error: Exception = pickle.loads(self.error)
        error.add_note(self.where)
        error.add_note(f"In the process that computed it:\n{self.trace}")
        return error


# A program, for who has a federation of the same method and task


def sent(program: Program) -> tuple[Any, ...]:
    """What of a program goes with a call."""
    federation = program.federation
    more = {name: value for name, value in vars(federation).items() if name not in FIELDS}
    data = federation.data
    assert isinstance(data, Federated)  # some clients' alone
    rest = program.fn, program.shards, program.together, program.recurs
    return type(federation), more, (data.x, data.y, data.lasting), rest


def received(base: Federation, sent: tuple[Any, ...]) -> Program:
    """The program, on the federation that is here."""
    kind, more, (x, y, lasting), (fn, *rest) = sent
    assert isinstance(base.data, Federated)
    same = {name: getattr(base, name) for name in FIELDS}
    data = replace(base.data, x=x, y=y, lasting=lasting)
    return Program(fn, kind(**{**same, **more, "data": data}), *rest)


def examples(federation: Federation) -> list[Tensor]:
    return tree.tensors((federation.data.x, federation.data.y))
