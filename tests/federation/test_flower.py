"""Real federations on loopback: Flower's SuperLink and SuperNodes as processes, TLS and keys on.

One SuperLink and three SuperNodes serve several runs at once, for every request to a client starts a process.
"""

from __future__ import annotations

import json
import os
import re
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'apiece[flower]'")

import httpx

from apiece import Experiment, run, tree
from apiece.federation import keys, launch
from apiece.federation.client import Place
from apiece.federation.server import Plan, Rules, federated, new_run
from tests.federation.loopback import LABELS, SHAPE, SIZES, experiment, settle, simulated

pytestmark = pytest.mark.slow

METHODS = ("fedavg", "fedec", "apfl_ewc", "scaffold", "admm_fedmeta", "fedrep")
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


@contextmanager
def site(folder: Path) -> Iterator[Site]:
    """A server and three clients that are connected to it through a wire that counts."""
    settle(folder)
    address = f"127.0.0.1:{launch.free_port()}"
    counter = Counter(int(address.rpartition(":")[2]))
    command = [sys.executable, "-m", "tests.federation.site", str(folder), address, str(counter.port)]
    with (folder / "told").open("w") as told:
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=told, text=True)
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "ready\n", (folder / "told").read_text()
            yield Site(folder, counter, address, process)
        finally:
            process.stdin.close()
            assert process.wait(60) == 0
    counter.close()


def planned(folder: Path, described: Experiment, **rules: Any) -> Path:
    folder.mkdir(parents=True)
    whole = federated(described, 3, 3)
    asked = Rules(**{"min_replies": 1.0, "deadline": 300.0, **rules})
    Plan(whole, asked, 3, SHAPE, LABELS, new_run(whole)).write(folder)
    launch.Door(client_keys=str(folder.parent / "keys")).write(folder)
    return folder


def wait_until(done: Callable[[], bool], seconds: float = 600, what: str = "it does not happen") -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, what
        time.sleep(0.2)


def finished(folder: Path) -> bool:
    error = folder / launch.ERROR
    assert not error.exists(), error.read_text()
    return (folder / "summary.json").exists()


def summary_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return found


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-5, atol=1e-6)


def equals_the_simulation(run_folder: Path, clients: Path, described: Experiment, data: Path) -> None:
    """The server's state, and every client's model and score, against the sequential engine."""
    reference, run_id = simulated(described, data), Plan.read(run_folder).run
    for client, name in enumerate(SIZES):
        mine = load_file(clients / name / "runs" / run_id / "personalized.safetensors")
        model = reference.model(client)
        assert mine.keys() == model.keys()
        assert all(close(mine[leaf], model[leaf]) for leaf in model), (described.method, name)
    last = run_folder / "checkpoint" / f"round-{described.rounds:06d}"
    mine, theirs = load_file(last / "server.safetensors"), tree.flatten(reference.server)
    assert theirs
    assert all(close(mine[f"server/{leaf}"], value) for leaf, value in theirs.items()), described.method
    summary = summary_of(run_folder)
    assert (summary["refused"], summary["skipped"]) == (0, 0)
    assert summary["seen"]["personalized"] == pytest.approx(reference.summary["seen"]["personalized"])


def processes(folder: Path) -> list[str]:
    """The command lines of the processes that have to do with a folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            found.append(path.read_bytes().replace(b"\0", b" ").decode())
    return [line for line in found if str(folder) in line]


def test_a_server_and_three_clients(tmp_path: Path) -> None:
    """Six methods at once have the numbers of the simulation; in a seventh run clients are hostile. Then a
    large model on an otherwise quiet wire, and strangers."""
    with site(tmp_path) as here:
        runs = {name: planned(tmp_path / name, experiment(name)) for name in METHODS}
        hostile = planned(
            tmp_path / HOSTILE, experiment(HOSTILE, rounds=2, evaluate_every=2), min_replies=0.3, max_norm=1e3
        )
        for folder in (*runs.values(), hostile):
            here.start(folder)
        wait_until(lambda: all(map(finished, (*runs.values(), hostile))), 1200)
        for name, folder in runs.items():
            equals_the_simulation(folder, tmp_path / "clients", experiment(name), tmp_path / "data")
        check_hostile_replies_were_refused_and_named(hostile)
        check_reported_bytes_are_those_on_the_wire(here)
        check_strangers_are_refused(here)
        check_nothing_that_steers_the_server_is_reached(here)
    wait_until(lambda: not processes(tmp_path), 10, "processes are left behind")


def check_hostile_replies_were_refused_and_named(folder: Path) -> None:
    told = (folder / launch.LOG).read_text()
    assert re.search(
        r"train 1: refused the reply of bert: update/\S+ is float32\(3, 1\), not float32\(3,", told
    )
    assert "train 1: refused the reply of cora: its update is not finite" in told
    assert re.search(r"train 2: refused the reply of cora: the norm of its update, 1.7\d*e\+09, is", told)
    summary = summary_of(folder)
    assert (summary["refused"], summary["skipped"], summary["seen"]["scored"]) == (3, 3, 3)


def check_reported_bytes_are_those_on_the_wire(here: Site) -> None:
    """A model of 5·200,000 + 200,000 + 3·200,000 + 3 params, 7.2 MB, so that Flower's own share of the wire
    (headers, polls, the app) is small. One round: 3 broadcasts to train, 3 updates, 3 broadcasts to score."""
    folder = planned(here.folder / "bytes", experiment("fedavg", rounds=1, model="mlp(hidden=200000)"))
    before = here.counter.bytes
    here.start(folder)
    wait_until(lambda: finished(folder), 300)
    reported = summary_of(folder)["bytes_up"] + summary_of(folder)["bytes_down"]
    counted = here.counter.bytes - before
    assert reported >= 9 * 4 * 1_800_003
    assert abs(counted - reported) < 0.02 * counted


def check_strangers_are_refused(here: Site) -> None:
    """One whose key nobody registered, and one to whom the server cannot prove who it is."""
    place, right = here.folder / "stranger", here.folder / "tls" / "ca.crt"
    keys.make_key(place / "key")
    assert "Failed to activate SuperNode" in refused(here, place / "key", right)
    keys.certify(place)
    known = here.folder / "clients" / "anna" / "key"
    assert "certificate verify failed" in refused(here, known, place / "ca.crt")


def refused(here: Site, key: Path, authority: Path) -> str:
    """What a client says that does not get in; it ends by itself."""
    state = here.folder / "stranger" / "state"
    place = Place(here.folder / "data" / "anna.npz", state, "mallory")
    command = launch.client_command(place, here.address, "cpu", key, authority, insecure=False)
    told = here.folder / "stranger" / "told"
    with told.open("wb") as out:  # a file: its children would hold a pipe open
        home = launch.environment(state / "home")
        ended = subprocess.run(command, env=home, stdout=out, stderr=out, timeout=120, check=False)
    assert ended.returncode != 0
    return told.read_text()


def check_nothing_that_steers_the_server_is_reached(here: Site) -> None:
    verify = ssl.create_default_context(cafile=here.folder / "tls" / "ca.crt")
    for path in ("/v1/control/start-run", "/v1/control/register-node", "/v1/runtime/acquire-task", "/docs"):
        assert httpx.post(f"https://{here.address}{path}", content=b"", verify=verify).status_code == 404
    host, port = here.address.split(":")
    with socket.create_connection((host, int(port))) as plain:
        plain.sendall(b"POST /v1/fleet/pull-messages HTTP/1.1\r\nContent-Length: 0\r\n\r\n")
        assert not plain.recv(100).startswith(b"HTTP")  # nothing without TLS


def apiece(*arguments: object, output: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", "from apiece.cli import main; main()", *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with output.open("ab") as out:
        return subprocess.Popen(command, env=environment, stdout=out, stderr=out)


def listening(address: str) -> bool:
    host, port = address.split(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


def requests_in(log: Path) -> int:
    return log.read_text().count("Receiving:") if log.exists() else 0


def rounds_in(folder: Path) -> int:
    path = folder / "rounds.csv"
    return len(path.read_text().splitlines()) - 1 if path.exists() else 0


def test_a_client_and_the_server_are_killed(tmp_path: Path) -> None:
    """kill -9 of bert in round 2, and then of the server; both are started again, and dora joins. The end is
    that of a run in which nothing happened. SCAFFOLD's server keeps a sum over the clients."""
    data, run, tls = settle(tmp_path, {**SIZES, "dora": 17}), tmp_path / "run", tmp_path / "tls"
    keys.certify(tls)
    (tmp_path / "keys").mkdir()
    for name in (*SIZES, "dora"):
        keys.make_key(tmp_path / name / "key")
    for name in SIZES:
        (tmp_path / name / "key.pub").rename(tmp_path / "keys" / f"{name}.pub")
    address = f"127.0.0.1:{launch.free_port()}"
    started: list[subprocess.Popen[bytes]] = []

    def client(name: str) -> subprocess.Popen[bytes]:
        flags = ["--server", address, "--data", data / f"{name}.npz", "--state", tmp_path / name]
        flags += ["--key", tmp_path / name / "key", "--root-certificate", tls / "ca.crt", "--device", "cpu"]
        started.append(apiece("federate", "client", *flags, output=tmp_path / f"{name}.log"))
        return started[-1]

    def server(*flags: object) -> subprocess.Popen[bytes]:
        started.append(apiece("federate", "server", *flags, output=tmp_path / "server.log"))
        return started[-1]

    described = experiment("scaffold")
    what = ["--method", "scaffold", "--model", described.model, "--rounds", 3, "--evaluate-every", 3]
    who = ["--input-shape", 5, "--labels", 3, "--min-replies", 1.0, "--deadline", 300]
    door = ["--address", address, "--certificate", tls / "server.crt", "--private-key", tls / "server.key"]
    try:
        first = server(*what, *who, *door, "--client-keys", tmp_path / "keys", "--out", run)
        wait_until(lambda: listening(address) or first.poll() is not None)
        clients = {name: client(name) for name in SIZES}
        wait_until(lambda: rounds_in(run) >= 1 or first.poll() is not None)
        before = requests_in(tmp_path / "bert.log")
        wait_until(lambda: requests_in(tmp_path / "bert.log") > before)
        clients["bert"].kill()
        clients["bert"].wait()
        client("bert")
        first.kill()
        first.wait()
        wait_until(lambda: not processes(run), 10, "processes of the server are left behind")
        assert rounds_in(run) == 1
        (tmp_path / "dora" / "key.pub").rename(tmp_path / "keys" / "dora.pub")
        second = server("--resume", run)
        wait_until(lambda: listening(address) or second.poll() is not None)
        client("dora")
        assert second.wait(600) == 0, (tmp_path / "server.log").read_text()
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.wait(30)
    assert rounds_in(run) == 3
    equals_the_simulation(run, tmp_path, described, settle(tmp_path / "three"))
    population = json.loads((run / "population.json").read_text())
    assert [(c["name"], c["examples"]) for c in population["clients"]] == [*SIZES.items(), ("dora", 17)]
    assert population["trained"] == 3
    assert (tmp_path / "dora" / "personalized.safetensors").exists()
    wait_until(lambda: not processes(tmp_path), 10, "processes are left behind")


def test_the_demo(tmp_path: Path) -> None:
    """A table, a model in every client's own folder, as `apiece run` makes it, and no process left."""
    out = tmp_path / "out"
    flags = ["--clients", 3, "--method", "fedec", "--rounds", 1, "--model", "logistic", "--out", out]
    process = apiece("federate", "demo", *flags, output=tmp_path / "told")
    assert process.wait(600) == 0, (tmp_path / "told").read_text()
    assert not processes(tmp_path)
    assert "personalized" in (tmp_path / "told").read_text()
    same = {"method": "fedec", "rounds": 1, "model": "logistic", "clients": 3, "cohort": 3, "unseen": 0.0}
    reference = run(Experiment(**same, engine="sequential", threads=1))
    for client in range(3):
        mine = load_file(out / "clients" / str(client) / "personalized.safetensors")
        assert all(close(mine[leaf], value) for leaf, value in reference.model(client).items())
