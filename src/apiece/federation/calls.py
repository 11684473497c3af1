"""Calls: requests to clients by their names, and what comes back in time."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Protocol

from apiece.federation.wire import Message, WireError

log = logging.getLogger("apiece")


class Network(Protocol):
    """How messages get to clients and back."""

    def present(self) -> Mapping[str, str]:
        """The addresses of the clients that are connected, with the name each is known by, or ''."""

    def send(self, address: str, request: Message) -> str:
        """A ticket for the reply."""

    def replies(self) -> Iterable[tuple[str, Message]]:
        """(ticket, reply) of what has come since. Waits a little if nothing has."""


class Calls:
    """A network on which clients are known by name: by that of their keys, or by the one they give."""

    def __init__(self, network: Network, deadline: float) -> None:
        self._network, self._deadline = network, deadline
        self._said: dict[str, str] = {}  # address → name, of clients that were greeted
        self._turned_away: dict[str, float] = {}  # address → when it may try again
        self._up = self._down = 0

    def traffic(self) -> tuple[int, int]:
        """Bytes of arrays received and sent since the last time."""
        traffic = self._up, self._down
        self._up = self._down = 0
        return traffic

    def addresses(self) -> dict[str, str]:
        """name → address of the clients that are connected and known."""
        names = {
            address: name or self._said.get(address) for address, name in self._network.present().items()
        }
        return {name: address for address, name in names.items() if name}

    def wait(self) -> None:
        """A little; replies that come meanwhile are late ones."""
        list(self._network.replies())

    def ask(self, names: Collection[str], request: Callable[[str], Message]) -> Iterator[tuple[str, Message]]:
        """Ask each client as soon as it is connected; (name, reply) as they come, until it is too late."""
        return self._exchange(set(names), self.addresses, request)

    def greet(self, hello: Message, members: Collection[str]) -> dict[str, int]:
        """Ask strangers who they are; name → number of examples of those that are no members yet."""
        now, known = time.monotonic(), {*members, *self._said.values()}
        strangers = {
            address: name
            for address, name in self._network.present().items()
            if (name not in known if name else address not in self._said)
            and now > self._turned_away.get(address, -math.inf)
        }
        found: dict[str, int] = {}
        silent = set(strangers)
        for address, reply in self._exchange(
            set(strangers), lambda: {a: a for a in strangers}, lambda _: hello
        ):
            silent.discard(address)
            try:
                examples, name = _introduced(reply, strangers[address])
                if name in found or self.addresses().get(name, address) != address:
                    raise WireError("its name is taken")
                self._said[address] = name
                if name not in known:
                    found[name] = examples
            except WireError as why:
                self._turn_away(address, strangers[address], str(why))
        for address in silent:
            self._turn_away(address, strangers[address], "it does not answer")
        return found

    def _turn_away(self, address: str, name: str, why: str) -> None:
        log.warning("%s cannot join: %s", name or address, why)
        self._turned_away[address] = time.monotonic() + self._deadline

    def _exchange(
        self, keys: set[str], find: Callable[[], Mapping[str, str]], request: Callable[[str], Message]
    ) -> Iterator[tuple[str, Message]]:
        """Ask each key once `find` has its address, and again if that changes: who restarts has forgotten."""
        end, left = time.monotonic() + self._deadline, set(keys)
        tickets: dict[str, str] = {}  # → key
        asked: dict[str, str] = {}  # key → address
        while left and time.monotonic() < end:
            for key, address in sorted(find().items()):
                if key in left and asked.get(key) != address:
                    message = request(key)
                    tickets[self._network.send(address, message)] = key
                    asked[key] = address
                    self._down += message.nbytes
            for ticket, reply in self._network.replies():
                key = tickets.pop(ticket, "")
                if key in left:  # the others answer what is over: they are dropped
                    self._up += reply.nbytes
                    left.discard(key)
                    yield key, reply


def _introduced(reply: Message, known_as: str) -> tuple[int, str]:
    """(number of examples, name) of a client that joins."""
    if "error" in reply.scalars:
        raise WireError(str(reply.scalars["error"])[:200])
    examples, name = reply.scalars.get("examples"), known_as or reply.scalars.get("name")
    if type(examples) is not int or not 0 <= examples < 2**40:
        raise WireError("it does not say how many examples it has")
    if not isinstance(name, str) or not name.isprintable() or not 0 < len(name) <= 100:
        raise WireError("it has no proper name")
    return examples, name
