"""The server's rounds with real clients in one process: equal to the simulation, and unmoved by mishaps."""

from __future__ import annotations

import csv
import json
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from apiece import random, resume
from apiece.data.federated import hold_out
from apiece.errors import ApieceError
from apiece.federation.server import Plan, Rules, federated
from apiece.federation.wire import JOIN, SCORE, TRAIN, Message
from apiece.shard import Rows, Shard
from tests.federation.loopback import (
    LABELS,
    SHAPE,
    SIZES,
    Fate,
    Loopback,
    experiment,
    host,
    personalized,
    plan,
    server_state,
    settle,
    simulated,
    wipe,
)

METHODS = ("fedavg", "fedec", "apfl_ewc", "scaffold", "admm_fedmeta", "fedrep")


def close(a: Any, b: Any) -> bool:
    return bool(torch.allclose(torch.as_tensor(a), torch.as_tensor(b), rtol=1e-5, atol=1e-6))


@pytest.mark.parametrize("method", METHODS)
def test_a_federation_has_the_numbers_of_the_simulation(tmp_path: Path, method: str) -> None:
    """Server, every client's model and every score: the sequential engine on the same files, with a cohort of
    two of three clients, so that somebody is left out of a round."""
    data = settle(tmp_path)
    described = experiment(method, evaluate_every=3)
    summary = host(plan(tmp_path / "run", described, cohort=2), Loopback(tmp_path))
    reference = simulated(described, data, cohort=2)
    for client, name in enumerate(SIZES):
        mine, model = personalized(tmp_path, name), reference.model(client)
        assert mine.keys() == model.keys()
        assert all(close(mine[leaf], model[leaf]) for leaf in model)
    mine = load_file(tmp_path / "run" / "model" / "initial.safetensors")
    newcomer = reference.session.newcomer(reference.server, 3)
    assert all(close(mine[leaf], newcomer[leaf]) for leaf in newcomer)
    for score in ("initial", "personalized"):
        assert summary["seen"][score] == pytest.approx(reference.summary["seen"][score], abs=1e-6)


def test_bytes_are_those_of_all_arrays_sent(tmp_path: Path) -> None:
    """FedAvg on 5·8+8 + 8·3+3 = 75 params, 300 bytes. A round: 3 broadcasts down, 3 updates and weights of
    4 bytes up. Scores: 3 broadcasts down, 2 × (accuracy, loss) of 8 bytes up. FedEC's first requests also
    bring the start params: 300 bytes more, once for each client."""
    settle(tmp_path)
    for method, extra in (("fedavg", 0), ("fedec", 3 * 300)):
        summary = host(plan(tmp_path / method, experiment(method)), Loopback(tmp_path))
        assert summary["bytes_down"] == 3 * (3 * 300) + 3 * 300 + extra
        assert summary["bytes_up"] == 3 * (3 * 304) + 3 * 32


# What clients hold, and what the server has of it


def committed(tmp_path: Path, run: str, accepted: list[int]) -> list[dict[str, torch.Tensor] | None]:
    """Each client's state of the round that the server accepted; None: it has none yet."""
    return [
        load_file(tmp_path / "clients" / name / "runs" / run / f"round-{ack:06d}.safetensors")
        if ack
        else None
        for name, ack in zip(SIZES, accepted, strict=True)
    ]


def unlucky(seed: int) -> Callable[[str, Message, Message], Message | None]:
    """Of the replies to train, about one in three is lost, one in six is refused."""
    draw = np.random.default_rng(seed)

    def fate(name: str, request: Message, reply: Message) -> Message | None:
        luck = draw.random() if request.scalars["what"] == TRAIN else 1.0
        if luck < 1 / 3:
            return None
        if luck < 1 / 2:
            arrays = {path: np.full_like(array, np.nan) for path, array in reply.arrays.items()}
            return Message(arrays, reply.scalars)
        return reply

    return fate


@pytest.mark.parametrize("method", ["scaffold", "admm_fedmeta"])
def test_running_sums_are_those_of_what_clients_hold(tmp_path: Path, method: str) -> None:
    """SCAFFOLD: c = Σ c_i / N, with c_i = 0 before the first accepted reply. ADMM-FedMeta: mean is
    Σ (y_i + ρθ_i) / N, with y_i = 0 and θ_i = start before it. Replies are lost and refused at random, the
    server is killed in round 5, and cora's last reply is lost: it then holds a state that nobody accepted."""
    settle(tmp_path)
    described = experiment(method, rounds=8, evaluate_every=8)
    folder = plan(tmp_path / "run", described, min_replies=0.3, deadline=0.02)
    luck = unlucky(0)

    def fate(name: str, request: Message, reply: Message) -> Message | None:
        last = name == "cora" and request.scalars["what"] == TRAIN and request.scalars["round"] == 8
        return None if last else luck(name, request, reply)

    with pytest.raises(KeyboardInterrupt):  # when some of the round has been answered
        host(
            folder,
            Loopback(tmp_path, fate=stopping(fate, lambda name, r: is_(r, TRAIN, 5) and name == "bert")),
        )
    summary = host(folder, Loopback(tmp_path, fate=fate))
    assert 0 < summary["refused"] < summary["skipped"]
    state, run = server_state(folder), Plan.read(folder).run
    accepted = state["accepted"].tolist()
    assert accepted[2] < 8
    assert (tmp_path / "clients" / "cora" / "runs" / run / "round-000008.safetensors").exists()
    held = committed(tmp_path, run, accepted)
    start = load_file(tmp_path / "clients" / "cora" / "runs" / run / "start.safetensors")
    rho = 0.35
    for leaf, first in start.items():
        if method == "scaffold":
            parts = [torch.zeros_like(first) if own is None else own[f"c/{leaf}"] for own in held]
            total = state[f"server/c/{leaf}"]
        else:
            parts = [
                rho * first if own is None else own[f"y/{leaf}"] + rho * own[f"theta/{leaf}"] for own in held
            ]
            total = state[f"server/mean/{leaf}"]
        assert close(total, torch.stack(parts).sum(0) / 3)


def is_(request: Message, what: str, round: int) -> bool:
    return (request.scalars["what"], request.scalars.get("round")) == (what, round)


def test_a_late_reply_is_dropped(tmp_path: Path) -> None:
    """bert's reply to round 1 comes in round 2. The run ends as one in which it never came."""
    data = settle(tmp_path)
    late: list[Message] = []

    class Slow(Loopback):
        def replies(self) -> list[tuple[str, Message]]:
            if late and self.requests[-1][1].scalars["round"] == 2:
                self._arrived.append((self.slow, late.pop()))
            return super().replies()

    def fate(name: str, request: Message, reply: Message) -> Message | None:
        if name == "bert" and request.scalars.get("round") == 1:
            late.append(reply)
            network.slow = str(len(network.requests) - 1)
            return None
        return reply

    def lost(name: str, request: Message, reply: Message) -> Message | None:
        return None if name == "bert" and request.scalars.get("round") == 1 else reply

    network = Slow(tmp_path, fate=fate)
    host(plan(tmp_path / "late", experiment("scaffold")), network)
    assert not late
    other = tmp_path / "other"
    other.mkdir()
    (other / "data").symlink_to(data)
    host(plan(other / "run", experiment("scaffold")), Loopback(other, fate=lost))
    one, two = server_state(tmp_path / "late"), server_state(other / "run")
    assert all(torch.equal(one[leaf], two[leaf]) for leaf in one)


def test_the_order_in_which_replies_come_does_not_matter(tmp_path: Path) -> None:
    """Not to a bit: they are summed in the order of the clients."""

    class Backwards(Loopback):
        def replies(self) -> list[tuple[str, Message]]:
            return super().replies()[::-1]

    states = []
    for network in (Loopback, Backwards):
        place = tmp_path / network.__name__
        settle(place)
        host(plan(place / "run", experiment("fedavg")), network(place))
        states.append(server_state(place / "run"))
    assert all(torch.equal(states[0][leaf], states[1][leaf]) for leaf in states[0])


# What is refused


def tampered(change: Callable[[dict[str, Any]], None]) -> Callable[[str, Message, Message], Message]:
    """bert's replies to train, their arrays changed."""

    def fate(name: str, request: Message, reply: Message) -> Message:
        if name != "bert" or request.scalars["what"] != TRAIN:
            return reply
        arrays = dict(reply.arrays)
        change(arrays)
        return Message(arrays, reply.scalars)

    return fate


def leaf_of(arrays: dict[str, Any]) -> str:
    return next(name for name in sorted(arrays) if name.startswith("update/"))


def put_nan(arrays: dict[str, Any]) -> None:
    arrays[leaf_of(arrays)] = np.full_like(arrays[leaf_of(arrays)], np.nan)


def put_huge(arrays: dict[str, Any]) -> None:
    arrays[leaf_of(arrays)] = np.full_like(arrays[leaf_of(arrays)], 1e6)


def put_shape(arrays: dict[str, Any]) -> None:
    arrays[leaf_of(arrays)] = arrays[leaf_of(arrays)][..., :1]


def put_dtype(arrays: dict[str, Any]) -> None:
    arrays[leaf_of(arrays)] = arrays[leaf_of(arrays)].astype(np.float64)


def put_name(arrays: dict[str, Any]) -> None:
    arrays["update/other"] = arrays.pop(leaf_of(arrays))


def put_weight(arrays: dict[str, Any]) -> None:
    arrays["weight"] = np.float32(-1.0).reshape(())


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (put_nan, "not finite"),
        (put_huge, "norm"),
        (put_shape, "float32(1,), not float32(3,)"),
        (put_dtype, "float64"),
        (put_name, "names differ"),
        (put_weight, "negative"),
    ],
)
def test_what_was_not_asked_for_is_refused_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, change: Callable[[dict[str, Any]], None], why: str
) -> None:
    """Every reply of bert is refused; the rounds go on with the two others."""
    settle(tmp_path)
    with caplog.at_level(logging.WARNING, "apiece"):
        summary = host(
            plan(tmp_path / "run", experiment("fedavg"), max_norm=100.0),
            Loopback(tmp_path, fate=tampered(change)),
        )
    lines = [line for line in caplog.messages if "refused the reply of bert" in line]
    assert len(lines) == 3
    assert all(why in line for line in lines)
    assert (summary["refused"], summary["skipped"]) == (3, 3)


def test_who_is_refused_might_as_well_not_have_replied(tmp_path: Path) -> None:
    settle(tmp_path)
    host(plan(tmp_path / "run", experiment("scaffold")), Loopback(tmp_path, fate=tampered(put_nan)))
    lost = Loopback(tmp_path, fate=lambda name, request, reply: None if is_train(name, request) else reply)
    host(plan(tmp_path / "lost", experiment("scaffold"), deadline=0.01), lost)
    one, two = server_state(tmp_path / "run"), server_state(tmp_path / "lost")
    assert all(torch.equal(one[leaf], two[leaf]) for leaf in one if leaf.startswith("server"))


def is_train(name: str, request: Message) -> bool:
    return name == "bert" and request.scalars["what"] == TRAIN


def test_a_reply_to_something_else_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settle(tmp_path)

    def fate(name: str, request: Message, reply: Message) -> Message:
        other = {"round": 99} if request.scalars["what"] == TRAIN and name == "cora" else {}
        return Message(reply.arrays, {**reply.scalars, **other})

    summary = host(plan(tmp_path / "run", experiment("fedavg", rounds=1)), Loopback(tmp_path, fate=fate))
    assert summary["refused"] == 1
    assert "refused the reply of cora: it cannot be read, or answers something else" in caplog.text


def test_a_round_with_too_few_replies_is_void(tmp_path: Path) -> None:
    """Two of three replies of round 2 are lost, and 60 % are needed: the server and the acks stay."""
    settle(tmp_path)

    def fate(name: str, request: Message, reply: Message) -> Message | None:
        return None if is_(request, TRAIN, 2) and name != "anna" else reply

    folder = plan(tmp_path / "run", experiment("scaffold", rounds=2), min_replies=0.6, deadline=0.02)
    summary = host(folder, Loopback(tmp_path, fate=fate))
    first, second = (
        load_file(folder / "checkpoint" / f"round-00000{r}" / "server.safetensors") for r in (1, 2)
    )
    assert all(torch.equal(first[leaf], second[leaf]) for leaf in first)
    with (folder / "rounds.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["replies"], row["skipped"]) for row in rows] == [("3", "0"), ("0", "3")]
    assert summary["seen"]["scored"] == 3


def unharmed(name: str, request: Message, reply: Message) -> Message:
    return reply


def stopping(fate: Fate, when: Callable[[str, Message], bool]) -> Fate:
    """The server is interrupted when it sends such a request."""

    def stop(name: str, request: Message, reply: Message) -> Message | None:
        if when(name, request):
            raise KeyboardInterrupt
        return fate(name, request, reply)

    return stop


def test_a_server_that_was_stopped_goes_on_to_the_same_end(tmp_path: Path) -> None:
    """Stopped in round 2, when anna had replied and bert had not; then once more in the scores at the end."""
    settle(tmp_path)
    described = experiment("scaffold")
    folder = plan(tmp_path / "run", described)
    for what, round in ((TRAIN, 2), (SCORE, 3)):
        killed = stopping(unharmed, lambda name, r, at=(what, round): name == "bert" and is_(r, *at))
        with pytest.raises(KeyboardInterrupt):
            host(folder, Loopback(tmp_path, fate=killed))
    host(folder, Loopback(tmp_path))
    other = tmp_path / "other"
    settle(other)
    host(plan(other / "run", described), Loopback(other))
    one, two = server_state(folder), server_state(other / "run")
    assert one.keys() == two.keys()
    assert all(torch.equal(one[leaf], two[leaf]) for leaf in one)
    assert (folder / "cohorts.csv").read_text() == (other / "run" / "cohorts.csv").read_text()
    for name in SIZES:
        mine, reference = personalized(tmp_path, name), personalized(other, name)
        assert all(torch.equal(mine[leaf], reference[leaf]) for leaf in reference)


def test_a_client_that_lost_its_state_is_refused_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """cora's folder is gone after round 1. Its state cannot be made up: the server's sum has a part in it."""
    settle(tmp_path)

    def fate(name: str, request: Message, reply: Message) -> Message:
        if name == "cora" and request.scalars.get("round") == 1:
            wipe(tmp_path, name)
        return reply

    summary = host(plan(tmp_path / "run", experiment("scaffold")), Loopback(tmp_path, fate=fate))
    lines = [line for line in caplog.messages if "cora" in line and "lost its state of round 1" in line]
    assert len(lines) == 3  # rounds 2 and 3, and the scores
    assert summary["refused"] == 3


def test_start_params_are_sent_again_to_a_client_that_lost_them(tmp_path: Path) -> None:
    """bert fails in round 1 and loses its folder: in round 2 it lacks the start params and says so, in round
    3 it gets them."""
    settle(tmp_path)

    def fate(name: str, request: Message, reply: Message) -> Message | None:
        if name == "bert" and request.scalars.get("round") == 1 and request.scalars["what"] == TRAIN:
            wipe(tmp_path, name)
            return Message({}, {**reply.scalars, "error": "power cut"})
        return reply

    network = Loopback(tmp_path, fate=fate)
    summary = host(plan(tmp_path / "run", experiment("fedec")), network)
    sent = [
        any(path.startswith("start/") for path in request.arrays)
        for name, request in network.requests
        if name == "bert" and request.scalars["what"] == TRAIN
    ]
    assert sent == [True, False, True]
    assert summary["refused"] == 2
    assert server_state(tmp_path / "run")["accepted"].tolist() == [3, 3, 3]


def test_who_joins_late_is_an_unseen_client(tmp_path: Path) -> None:
    """dora comes before round 3: it gets a model from the broadcast of then, and one at the end; it never
    trains. Its last model is that of the simulation for a client never met, with its id and its data."""
    settle(tmp_path, {**SIZES, "dora": 17})
    network = Loopback(tmp_path)
    newcomer = Loopback(tmp_path, names=("dora",)).places

    def fate(name: str, request: Message, reply: Message) -> Message:
        if request.scalars.get("round") == 2 and request.scalars["what"] == TRAIN:
            network.places |= newcomer
        return reply

    network.fate = fate
    summary = host(plan(tmp_path / "run", experiment("fedec")), network)
    asked = [(r.scalars["what"], r.scalars.get("round")) for name, r in network.requests if name == "dora"]
    assert asked == [(JOIN, None), (SCORE, 2), (SCORE, 3)]
    assert (summary["seen"]["clients"], summary["unseen"]["clients"]) == (3, 1)
    three = tmp_path / "three"
    reference = simulated(experiment("fedec"), settle(three))
    f, broadcast = reference.session.federation, reference.session.training.broadcast(reference.server, 3)
    x = torch.from_numpy(np.load(tmp_path / "data" / "dora.npz")["x"])
    y = torch.from_numpy(np.load(tmp_path / "data" / "dora.npz")["y"])
    held = hold_out(np.arange(17), 0.25, random.fold(random.fold(0, "partition"), "test", 3))[0]
    rows = Rows(
        torch.from_numpy(held),
        random.as_key(len(held)),
        random.as_key(random.fold(f.root, "personalize", 3, 3)),
        random.as_key(random.fold(f.root, "split", 3)),
    )
    key = random.as_key(random.fold(f.root, "client", 3))
    with torch.no_grad():
        first = f.method.init_client(f.task, broadcast, f.start, key)
        model = f.method.personalize(f.task, broadcast, first, Shard(x, y, rows, True))
    assert all(close(personalized(tmp_path, "dora")[leaf], model[leaf]) for leaf in model)


def test_clients_without_keys_say_their_names_and_come_back_under_them(tmp_path: Path) -> None:
    """The server is stopped in round 2; afterwards the clients have other addresses. A second "anna" is not
    let in as long as the first is there."""
    settle(tmp_path)
    folder = plan(tmp_path / "run", experiment("scaffold"))
    killed = stopping(unharmed, lambda name, request: is_(request, TRAIN, 2))
    first = Loopback(tmp_path, fate=killed, keys=False)
    first.places["impostor"] = first.places["address of anna"]
    with pytest.raises(KeyboardInterrupt):
        host(folder, first)
    again = Loopback(tmp_path, keys=False)
    again.places = {f"new {address}": place for address, place in again.places.items()}
    host(folder, again)
    assert server_state(folder)["accepted"].tolist() == [3, 3, 3]


def test_who_cannot_join_is_named_and_the_others_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Other inputs, other labels, no data: three strangers; the three clients that fit begin without them."""
    settle(tmp_path)
    np.savez(tmp_path / "data" / "inputs.npz", x=np.zeros((4, 6), np.float32), y=np.zeros(4, int))
    np.savez(tmp_path / "data" / "labels.npz", x=np.zeros((4, 5), np.float32), y=np.full(4, 1234567))
    names = (*SIZES, "inputs", "labels", "nothing")
    host(plan(tmp_path / "run", experiment("fedavg", rounds=1)), Loopback(tmp_path, names))
    table = json.loads((tmp_path / "run" / "population.json").read_text())
    assert [client["name"] for client in table["clients"]] == list(SIZES)
    assert "inputs cannot join: its examples have shape (6,), the run's have (5,)" in caplog.text
    assert "labels cannot join" in caplog.text
    assert "nothing cannot join" in caplog.text
    told = [line for line in caplog.messages if "cannot join" in line]
    assert not any("1234567" in line for line in told)  # what is in the data does not reach the server


def test_numbers_are_names_in_the_order_of_numbers(tmp_path: Path) -> None:
    """As in a folder of files: 2 comes before 10."""
    settle(tmp_path, {"10": 8, "2": 8, "1": 8})
    host(plan(tmp_path / "run", experiment("fedavg", rounds=1)), Loopback(tmp_path, ("10", "2", "1")))
    table = json.loads((tmp_path / "run" / "population.json").read_text())
    assert [client["name"] for client in table["clients"]] == ["1", "2", "10"]


@pytest.mark.parametrize(
    ("rules", "told"),
    [
        ({"min_replies": 0.0}, "--min-replies"),
        ({"deadline": math.inf}, "--deadline"),
        ({"max_norm": -1.0}, "--max-norm"),
    ],
)
def test_rules_out_of_range(rules: dict[str, float], told: str) -> None:
    with pytest.raises(ApieceError, match=told):
        Rules(**rules).check()


@pytest.mark.parametrize("method", ["centralized", "feddf", "fedavg"])
def test_what_is_no_federation_is_refused_before_it_begins(method: str) -> None:
    described = federated(experiment(method), 2, 3 if method == "fedavg" else 2)
    asked = Plan(described, Rules(), 2, SHAPE, LABELS, "run")
    with pytest.raises(ApieceError, match=r"everybody's|server's own|cohort of 3"):
        asked.check()


def test_a_plan_reads_as_it_was_written(tmp_path: Path) -> None:
    for rules in (Rules(), Rules(0.7, 30.0, 5.0)):
        asked = Plan(federated(experiment("fedec"), 3, 2), rules, 3, (1, 28, 28), ("a", "b"), "run-1")
        asked.write(tmp_path)
        assert Plan.read(tmp_path) == asked


def test_resume_of_a_federations_folder_says_what_to_type(tmp_path: Path) -> None:
    for name in ("experiment.toml", "federation.json"):
        (tmp_path / name).write_text("")
    with pytest.raises(ApieceError, match="apiece federate server --resume"):
        resume(tmp_path)
