"""Requests and replies on a network that is a script."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from apiece.federation.calls import Calls
from apiece.federation.wire import Message


def message(word: str) -> Message:
    return Message({}, {"word": word})


class Script:
    """Who is connected at each look, and what arrives after how many looks."""

    def __init__(self, present: Callable[[int], dict[str, str]]) -> None:
        self._present, self.looks, self.sent = present, 0, list[tuple[str, str]]()
        self.mail: dict[int, list[tuple[str, Message]]] = {}

    def present(self) -> dict[str, str]:
        return self._present(self.looks)

    def send(self, address: str, request: Message) -> str:
        self.sent.append((address, str(request.scalars["word"])))
        return f"ticket {len(self.sent)}"

    def replies(self) -> list[tuple[str, Message]]:
        self.looks += 1
        time.sleep(0.001)
        return self.mail.pop(self.looks, [])


def asked(calls: Calls, *names: str) -> list[tuple[str, object]]:
    return [(name, reply.scalars["word"]) for name, reply in calls.ask(names, message)]


def test_each_is_asked_once_it_is_connected() -> None:
    script = Script(lambda looks: {"1": "anna", **({"2": "bert"} if looks > 3 else {})})
    script.mail = {2: [("ticket 1", message("a"))], 6: [("ticket 2", message("b"))]}
    assert asked(Calls(script, 5.0), "anna", "bert") == [("anna", "a"), ("bert", "b")]
    assert script.sent == [("1", "anna"), ("2", "bert")]


def test_who_comes_back_at_another_address_is_asked_again() -> None:
    """And answers once: the second reply finds nobody waiting."""
    script = Script(lambda looks: {"1": "anna", "2" if looks < 3 else "3": "bert"})
    script.mail = {1: [("ticket 1", message("a"))], 5: [("ticket 3", message("b"))]}
    assert asked(Calls(script, 5.0), "anna", "bert") == [("anna", "a"), ("bert", "b")]
    assert script.sent == [("1", "anna"), ("2", "bert"), ("3", "bert")]


def test_a_deadline_ends_the_waiting() -> None:
    script = Script(lambda looks: {"1": "anna", "2": "bert"})
    script.mail = {1: [("ticket 1", message("a"))]}
    begin = time.monotonic()
    assert asked(Calls(script, 0.1), "anna", "bert") == [("anna", "a")]
    assert 0.1 <= time.monotonic() - begin < 2.0


def test_what_nobody_asked_for_is_dropped() -> None:
    """A ticket of an earlier exchange, and one that was never given out."""
    script = Script(lambda looks: {"1": "anna"})
    calls = Calls(script, 0.05)
    assert asked(calls, "anna") == []
    at = script.looks
    script.mail = {
        at + 1: [("ticket 1", message("late")), ("other", message("?")), ("ticket 2", message("a"))]
    }
    assert asked(calls, "anna") == [("anna", "a")]


def hello(name: str, examples: object = 5) -> Message:
    return Message({}, {"name": name, "examples": examples})  # type: ignore[dict-item]


def greeted(calls: Calls, *members: str) -> dict[str, int]:
    return calls.greet(message("hello"), members)


def test_strangers_are_greeted_once() -> None:
    script = Script(lambda looks: {"1": "anna", "2": "bert"})
    script.mail = {1: [("ticket 1", hello("x", 3)), ("ticket 2", hello("y", 4))]}
    calls = Calls(script, 1.0)
    assert greeted(calls) == {"anna": 3, "bert": 4}  # by their keys, whatever they say
    assert greeted(calls) == {}
    assert len(script.sent) == 2


def test_members_are_no_strangers_where_keys_tell_them() -> None:
    script = Script(lambda looks: {"1": "anna"})
    assert greeted(Calls(script, 1.0), "anna") == {}
    assert script.sent == []


def test_without_keys_a_name_is_taken_as_long_as_its_bearer_is_connected() -> None:
    here = {"1": "", "2": ""}
    script = Script(lambda looks: here)
    script.mail = {1: [("ticket 1", hello("anna")), ("ticket 2", hello("anna"))]}
    calls = Calls(script, 0.1)
    assert greeted(calls) == {"anna": 5}
    assert calls.addresses() == {"anna": "1"}
    here["3"] = ""
    script.mail = {script.looks + 1: [("ticket 3", hello("anna"))]}
    assert greeted(calls, "anna") == {}
    assert calls.addresses() == {"anna": "1"}
    del here["1"]
    here["4"] = ""
    script.mail = {script.looks + 1: [("ticket 4", hello("anna"))]}
    assert greeted(calls, "anna") == {}  # nobody new
    assert calls.addresses() == {"anna": "4"}


@pytest.mark.parametrize(
    "reply",
    [
        Message({}, {}),
        Message({}, {"error": "its examples have shape (3,)"}),
        hello("a\nb"),
        hello(""),
        hello("x" * 101),
        hello("anna", -1),
        hello("anna", True),
        hello("anna", "many"),
        hello("anna", 2**60),
    ],
)
def test_who_does_not_introduce_itself_is_turned_away_for_a_while(
    reply: Message, caplog: pytest.LogCaptureFixture
) -> None:
    script = Script(lambda looks: {"1": ""})
    script.mail = {1: [("ticket 1", reply)]}
    calls = Calls(script, 0.05)
    assert greeted(calls) == {}
    assert "1 cannot join" in caplog.text
    assert greeted(calls) == {}
    assert len(script.sent) == 1
    time.sleep(0.06)
    script.mail = {script.looks + 1: [("ticket 2", hello("anna"))]}
    assert greeted(calls) == {"anna": 5}
