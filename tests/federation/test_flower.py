"""Real federations on loopback: Flower's SuperLink and SuperNodes as processes, TLS and keys on.

One SuperLink and three SuperNodes serve several runs at once, for every request to a client starts a process.
"""

from __future__ import annotations

import json
import re
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'apiece[flower]'")

from apiece import Experiment
from apiece.federation import keys, launch
from apiece.federation.client import Place
from apiece.federation.server import Plan, Rules, federated, new_run
from tests.federation.loopback import LABELS, SHAPE, SIZES, experiment, settle, simulated

pytestmark = pytest.mark.slow

METHODS = ("fedavg", "fedec", "apfl_ewc", "scaffold", "admm_fedmeta", "fedrep")
NAMES = tuple(SIZES)
HOSTILE = "reptile"  # in the run of this method some clients are


class Counter:
    """A wire on loopback that counts what goes through it."""

    def __init__(self, port: int) -> None:
        self._to, self.bytes = port, 0
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                caller, _ = self._socket.accept()
            except OSError:
                return
            try:
                called = socket.create_connection(("127.0.0.1", self._to))
            except OSError:
                caller.close()
                continue
            for one, other in ((caller, called), (called, caller)):
                threading.Thread(target=self._pass_on, args=(one, other), daemon=True).start()

    def _pass_on(self, one: socket.socket, other: socket.socket) -> None:
        with suppress(OSError):
            while part := one.recv(1 << 16):
                with self._lock:
                    self.bytes += len(part)
                other.sendall(part)
        for end in (one, other):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        one.close()

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class Site(NamedTuple):
    folder: Path
    counter: Counter
    address: str  # of the gateway
    process: subprocess.Popen[str]

    def start(self, run_folder: Path) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(run_folder, file=self.process.stdin, flush=True)
        assert self.process.stdout.readline() == "started\n"


def planned(folder: Path, described: Experiment, **rules: Any) -> Path:
    folder.mkdir(parents=True)
    whole = federated(described, 3, 3)
    asked = Rules(**{"min_replies": 1.0, "deadline": 240.0, **rules})
    Plan(whole, asked, 3, SHAPE, LABELS, new_run(whole)).write(folder)
    launch.Door(client_keys=str(folder.parent / "keys")).write(folder)
    return folder


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A server and three clients that are connected to it through a wire that counts."""
    folder = tmp_path_factory.mktemp("federation")
    settle(folder)
    address = f"127.0.0.1:{launch.free_port()}"
    counter = Counter(int(address.rpartition(":")[2]))
    command = [sys.executable, "-m", "tests.federation.site", str(folder), address, str(counter.port)]
    with (folder / "told").open("w") as told:
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=told, text=True)
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n", (folder / "told").read_text()
        yield Site(folder, counter, address, process)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(60) == 0
    counter.close()


def finished(folders: list[Path], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not all((folder / "summary.json").exists() for folder in folders):
        for folder in folders:
            assert not (folder / launch.ERROR).exists(), (folder / launch.ERROR).read_text()
        assert time.monotonic() < end, "the runs do not end"
        time.sleep(0.5)


@pytest.fixture(scope="module")
def runs(site: Site) -> dict[str, Path]:
    """All methods at once, and one run in which clients are hostile: their folders when they are over."""
    folders = {name: planned(site.folder / name, experiment(name)) for name in METHODS}
    hostile = experiment(HOSTILE, rounds=2, evaluate_every=2)
    folders[HOSTILE] = planned(site.folder / HOSTILE, hostile, min_replies=0.3, max_norm=1e3)
    for folder in folders.values():
        site.start(folder)
    finished(list(folders.values()), 900)
    return folders


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", METHODS)
def test_a_real_federation_has_the_numbers_of_the_simulation(
    site: Site, runs: dict[str, Path], method: str
) -> None:
    """The server's state and every client's model, after 3 rounds of 3 clients."""
    reference = simulated(experiment(method), site.folder / "data")
    run_id = Plan.read(runs[method]).run
    for client, name in enumerate(NAMES):
        mine = load_file(site.folder / "clients" / name / "runs" / run_id / "personalized.safetensors")
        model = reference.model(client)
        assert mine.keys() == model.keys()
        assert all(close(mine[leaf], model[leaf]) for leaf in model)
    mine = load_file(runs[method] / "checkpoint" / "round-000003" / "server.safetensors")
    from apiece import tree

    theirs = tree.flatten(reference.server)
    assert theirs
    assert all(close(mine[f"server/{leaf}"], value) for leaf, value in theirs.items())
    summary = json.loads((runs[method] / "summary.json").read_text())
    assert (summary["refused"], summary["skipped"]) == (0, 0)
    assert summary["seen"]["personalized"] == pytest.approx(reference.summary["seen"]["personalized"])


def test_hostile_replies_are_refused_and_named(runs: dict[str, Path]) -> None:
    told = (runs[HOSTILE] / launch.LOG).read_text()
    assert re.search(
        r"train 1: refused the reply of bert: update/\S+ is float32\(3, 1\), not float32\(3,\)", told
    )
    assert "train 1: refused the reply of cora: it failed" not in told
    assert re.search(r"train 1: refused the reply of cora: its update is not finite", told)
    assert re.search(
        r"train 2: refused the reply of cora: the norm of its update, 1.7\d*e\+09, is above", told
    )
    summary = json.loads((runs[HOSTILE] / "summary.json").read_text())
    assert (summary["refused"], summary["skipped"], summary["seen"]["scored"]) == (3, 3, 3)


def test_reported_bytes_are_those_on_the_wire(site: Site, runs: dict[str, Path]) -> None:
    """A model of 5·200,000 + 200,000 + 3·200,000 + 3 params, 7.2 MB, so that Flower's own share of the wire
    (headers, polls, the app) stays small: one round, with everything that it takes."""
    described = experiment("fedavg", rounds=1, model="mlp(hidden=200000)")
    folder = planned(site.folder / "bytes", described)
    before = site.counter.bytes
    site.start(folder)
    finished([folder], 300)
    time.sleep(1)  # the last reply is through when the server has written its summary
    summary = json.loads((folder / "summary.json").read_text())
    reported, counted = summary["bytes_up"] + summary["bytes_down"], site.counter.bytes - before
    assert reported > 9 * 7.2e6
    assert abs(counted - reported) < 0.02 * counted


def refused(site: Site, tmp_path: Path, key: Path, authority: Path) -> str:
    """What a client says that is not let in; it ends by itself."""
    place = Place(site.folder / "data" / "anna.npz", tmp_path / "state", "mallory")
    command = launch.client_command(place, site.address, "cpu", key, authority, insecure=False)
    told = tmp_path / "told"
    with told.open("wb") as out:  # a file: its children would hold a pipe open
        home = launch.environment(tmp_path / "home")
        ended = subprocess.run(command, env=home, stdout=out, stderr=out, timeout=120, check=False)
    assert ended.returncode != 0
    return told.read_text()


def test_a_client_whose_key_nobody_registered_is_refused(site: Site, tmp_path: Path) -> None:
    keys.make_key(tmp_path / "own")
    told = refused(site, tmp_path, tmp_path / "own", site.folder / "tls" / "ca.crt")
    assert "Failed to initialize the connection" in told


def test_a_client_does_not_talk_to_a_server_with_another_certificate(site: Site, tmp_path: Path) -> None:
    keys.certify(tmp_path / "other")
    told = refused(site, tmp_path, site.folder / "clients" / "anna" / "key", tmp_path / "other" / "ca.crt")
    assert "certificate verify failed" in told


def test_clients_reach_nothing_that_steers_the_server(site: Site) -> None:
    verify = ssl.create_default_context(cafile=site.folder / "tls" / "ca.crt")
    for path in ("/v1/control/start-run", "/v1/control/register-node", "/v1/runtime/acquire-task", "/docs"):
        assert httpx.post(f"https://{site.address}{path}", content=b"", verify=verify).status_code == 404
    with socket.create_connection(site.address.split(":")) as plain:
        plain.sendall(b"POST /v1/fleet/pull-messages HTTP/1.1\r\nContent-Length: 0\r\n\r\n")
        assert not plain.recv(100).startswith(b"HTTP")  # nothing without TLS
