"""What a client keeps on its disk, from which state it starts, and what it tells of itself."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from apiece import random
from apiece.federation import client
from apiece.federation.client import Memory, Place
from apiece.federation.wire import NO_START, SCORE, TRAIN, Message, Terms, WireError, pack, structure
from tests.federation.loopback import LABELS, MODEL, SHAPE, examples

CPU = torch.device("cpu")


def terms(method: str = "scaffold") -> Terms:
    root = random.fold(0, "apiece")
    return Terms("run-1", method, {}, MODEL, "none", SHAPE, LABELS, 0.25, random.fold(0, "partition"), root)


def request(method: str, round: int, ack: int, what: str = TRAIN, start: bool = True) -> Message:
    built, task = terms(method).build(CPU)
    params = task.init(random.fold(terms().root, "params"))
    message = pack(broadcast=structure(built, task, params), **({"start": params} if start else {}))
    envelope = {"run": "run-1", "what": what, "round": round, "client": 0, "ack": ack}
    key = random.fold(terms().root, "round", round - 1)
    return Message(message.arrays, {**message.scalars, **envelope, "key": key, "terms": terms(method).text()})


@pytest.fixture
def place(tmp_path: Path) -> Place:
    np.savez(tmp_path / "own.npz", **examples(20, 0))
    return Place(tmp_path / "own.npz", tmp_path / "state", "anna")


def kept(place: Place) -> list[str]:
    return sorted(path.name for path in (place.state / "runs" / "run-1").glob("round-*"))


def test_the_accepted_state_and_the_newest_are_kept(place: Place) -> None:
    """Replies to rounds 2 and 3 are not accepted: their states make room, that of round 1 stays."""
    for round, ack, expected in (
        (1, 0, ["round-000001"]),
        (2, 1, ["round-000001", "round-000002"]),
        (3, 1, ["round-000001", "round-000003"]),
        (4, 3, ["round-000003", "round-000004"]),
    ):
        reply = client.answer(place, request("scaffold", round, ack))
        assert "error" not in reply.scalars
        assert kept(place) == [f"{name}.safetensors" for name in expected]


def test_the_same_request_has_the_same_answer(place: Place) -> None:
    """Whatever was computed in between from the same accepted state."""
    client.answer(place, request("scaffold", 1, 0))
    once = client.answer(place, request("scaffold", 2, 1))
    client.answer(place, request("scaffold", 3, 1))
    again = client.answer(place, request("scaffold", 2, 1))
    assert once.arrays.keys() == again.arrays.keys()
    assert all(np.array_equal(once.arrays[path], again.arrays[path]) for path in once.arrays)


def test_the_state_that_is_named_is_the_one_it_starts_from(place: Place) -> None:
    """SCAFFOLD: Δc_i = c_i⁺ − c_i, so c_i + Δc_i is what it holds afterwards."""
    client.answer(place, request("scaffold", 1, 0))
    folder = place.state / "runs" / "run-1"
    before = load_file(folder / "round-000001.safetensors")
    client.answer(place, request("scaffold", 2, 1))  # lost
    reply = client.answer(place, request("scaffold", 3, 1))
    after = load_file(folder / "round-000003.safetensors")
    for leaf, c in before.items():
        change = torch.from_numpy(reply.arrays[f"update/{leaf}"])
        assert torch.allclose(c + change, after[leaf], atol=1e-6)


def test_start_params_are_kept_from_first_contact(place: Place) -> None:
    """A score comes first; the round after it brings no start params."""
    assert "error" not in client.answer(place, request("fedec", 0, 0, SCORE)).scalars
    assert "error" not in client.answer(place, request("fedec", 1, 0, start=False)).scalars
    assert (place.state / "runs" / "run-1" / "start.safetensors").exists()


def test_a_client_without_start_params_asks_for_them(place: Place) -> None:
    assert client.answer(place, request("fedec", 1, 0, start=False)).scalars["error"] == NO_START


def test_a_method_without_states_leaves_none(place: Place) -> None:
    assert "error" not in client.answer(place, request("fedavg", 1, 0, start=False)).scalars
    assert not (place.state / "runs").exists()


def test_a_state_that_is_lost_is_not_made_up(place: Place) -> None:
    reply = client.answer(place, request("scaffold", 6, 5))
    assert reply.scalars["error"] == "it has lost its state of round 5"
    assert not reply.arrays


def test_scores_write_no_state(place: Place) -> None:
    client.answer(place, request("scaffold", 1, 0))
    reply = client.answer(place, request("scaffold", 1, 1, SCORE))
    assert set(reply.arrays) == {
        f"{s}/{m}" for s in ("initial", "personalized") for m in ("accuracy", "loss")
    }
    assert kept(place) == ["round-000001.safetensors"]


def test_a_memory_is_on_disk_whole_or_not_at_all(tmp_path: Path) -> None:
    """What a kill leaves of a write is a draft, which nobody reads."""
    memory = Memory(tmp_path)
    memory.write(1, (torch.ones(3),), 0)
    (tmp_path / "round-000002.safetensors.draft").write_bytes(b"half")
    (found,) = memory.read(1, (torch.zeros(3),), CPU)
    assert found.tolist() == [1.0, 1.0, 1.0]
    with pytest.raises(WireError, match="lost its state of round 2"):
        memory.read(2, (torch.zeros(3),), CPU)
    memory.write(2, (torch.full((3,), 2.0),), 1)
    assert memory.read(2, (torch.zeros(3),), CPU)[0].tolist() == [2.0, 2.0, 2.0]


def test_an_update_that_is_not_finite_stays_at_home(place: Place) -> None:
    wild = request("fedavg", 1, 0)
    arrays = {
        path: np.full_like(array, np.inf) if path.startswith("broadcast/") else array
        for path, array in wild.arrays.items()
    }
    reply = client.answer(place, Message(arrays, wild.scalars))
    assert reply.scalars["error"] == "its update is not finite"
    assert not reply.arrays


@pytest.mark.parametrize("wrong", ["label", "missing"])
def test_what_is_in_the_data_does_not_reach_the_server(
    place: Place, caplog: pytest.LogCaptureFixture, wrong: str
) -> None:
    """It is told in the client's own log."""
    if wrong == "label":
        np.savez(place.data, x=np.zeros((3, 5), np.float32), y=np.array(["diagnosis 17"] * 3))
    else:
        place.data.unlink()
    with caplog.at_level(logging.ERROR, "apiece"):
        reply = client.answer(place, request("fedavg", 1, 0))
    told = str(reply.scalars["error"])
    assert told == "its data cannot be read with the labels of the run"
    assert ("diagnosis 17" if wrong == "label" else str(place.data)) in caplog.text


def test_a_failure_is_told_by_its_kind_alone(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("the patient's name")

    monkeypatch.setattr("apiece.methods.fedavg.FedAvg.client_update", fail)
    reply = client.answer(place, request("fedavg", 1, 0))
    assert reply.scalars["error"] == "it failed (ValueError): see its own log"
    assert (reply.scalars["round"], reply.scalars["client"]) == (1, 0)


def test_an_unknown_request_is_answered_with_an_error(place: Place) -> None:
    assert "another version" in str(client.answer(place, Message({}, {"what": "sing"})).scalars["error"])
    assert "error" in client.answer(place, Message({}, {})).scalars
