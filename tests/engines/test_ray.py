"""A real cluster of two raylets on this machine: the same numbers, also when actors and machines are lost."""

from __future__ import annotations

import io
import json
import logging
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import scale
from torch import Tensor, nn

from apiece import ApieceError, Experiment, Method, Recipe, Task, catalog, resume, run, tree
from apiece.check import SIZES as WORLD_SIZES
from apiece.check import _bits_differ, _distance, _stressed, _World
from apiece.data.lazy import lazily
from apiece.data.synthetic import Population
from apiece.engines import ray as engines
from apiece.engines.base import Call, Engine, Federation, Known, Member, Program, client_phase
from apiece.engines.pool import share
from apiece.engines.ray import Cluster, Ray
from apiece.engines.sequential import Sequential
from apiece.engines.vectorized import Vectorized
from apiece.evaluate import evaluate
from apiece.experiment import read
from apiece.method import STACK, Server, Stacked
from apiece.methods.fedavg import FedAvg
from apiece.methods.fedec import FedEC
from apiece.sample import uniform
from apiece.store import Store
from apiece.train import assemble
from apiece.tree import Tree
from tests import command, killing
from tests.broken import Elsewhere, UpdateOf
from tests.worlds import CPU, ROOT, dropout_net, federation, servers

ray: Any = pytest.importorskip("ray", reason="Ray is not installed: pip install 'apiece[ray]'")

pytestmark = pytest.mark.slow

PROJECT = Path(__file__).parents[2]
SIZES = (3, 17, 0, 40, 9, 5)
METHOD = FedAvg(local=Recipe(lr=0.1, batch_size=4, epochs=2))
METHODS = ("fedavg", "fedec", "apfl_ewc", "scaffold", "admm_fedmeta", "fedrep")
TOLERANCE = 1e-5
MACHINE = {"num_cpus": 2, "object_store_memory": 100 << 20}  # logical CPUs: four actors fit on one core


@pytest.fixture(scope="module")
def machines() -> Iterator[Any]:
    """Two machines, each a raylet with an object store of its own; this process is connected to them."""
    from ray.cluster_utils import Cluster as Raylets

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    raylets = Raylets(initialize_head=True, head_node_args={**MACHINE, "include_dashboard": False})
    raylets.add_node(**MACHINE)
    engines._connected(raylets.address, 0)
    yield raylets
    ray.shutdown()
    raylets.shutdown()


@pytest.fixture
def free_machines(machines: Any) -> Any:
    """The same, for processes of other tests: the actors of this one are gone."""
    for actor in [*engines._CREW.actors]:
        actor.end()
    return machines


@pytest.fixture(autouse=True)
def _no_hanging() -> Iterator[None]:
    """A test that waits for an answer that never comes ends after two minutes."""

    def stop(*_: object) -> None:
        raise AssertionError("two minutes")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(120)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def actors(count: int, engine: str = "sequential", limit: int = 2) -> Ray:
    return Ray(engine, limit, Cluster(CPU, count, 1), "", {})


def ends(
    method: Method, engine: Engine, rounds: int = 3, net: Callable[[], nn.Module] = dropout_net
) -> list[Server]:
    training, server = federation(method, engine, SIZES, 5, net)
    return list(servers(training, server, rounds))


def same(a: Tree, b: Tree) -> bool:
    return _bits_differ(a, b) == []


# The same numbers


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.usefixtures("machines")
@torch.no_grad()
def test_servers_states_and_models_are_those_of_the_other_engines(name: str) -> None:
    """Four rounds with dropout, on clients of 0, 1, 4, … and 25 examples, by 1, 2 and 4 actors."""
    world = _World.build(_stressed(catalog.build(name, {})), CPU)
    plain = list(world.play(Sequential(CPU)))
    together = list(world.play(Vectorized(CPU, len(WORLD_SIZES))))
    for inner in ("sequential", "vectorized"):
        one, two, four = (list(world.play(actors(count, inner))) for count in (1, 2, 4))
        assert same(one, two)
        assert same(one, four)
        for reference in (plain, together):
            for ours, theirs in zip(four, reference, strict=True):
                gap, path = _distance(ours[1:], theirs[1:])
                assert gap <= TOLERANCE, path


@torch.no_grad()
def test_clients_one_by_one_have_the_bits_of_the_sequential_engine(machines: Any) -> None:
    """States and models do: only sums are taken in another order. In chunks of one, those do not differ."""
    world = _World.build(_stressed(catalog.build("fedec", {})), CPU)
    chunked = next(iter(world.play(actors(2, limit=3))))
    plain = list(world.play(Sequential(CPU)))
    assert same(chunked.clients, plain[0].clients)
    assert same(list(world.play(actors(2, limit=1))), plain)


def _machine(federation: Federation, shards: tuple[Known, ...], shared: Tensor, given: Tensor) -> Tree:
    time.sleep(0.05)
    return torch.tensor(list(ray.get_runtime_context().get_node_id().encode()))


def test_both_machines_compute(machines: Any) -> None:
    training, _ = federation(METHOD, Sequential(CPU), SIZES, 5)
    calls = [Call(Program(_machine, training.federation), torch.ones(1), (torch.ones(1),), "")] * 16
    engine, begun = actors(4), 0
    while begun < 4:
        found = {bytes(answer[0].tolist()).decode() for answer in engine.answers(calls)}
        begun = sum(child.begun for child in engine._children)
    found = {bytes(answer[0].tolist()).decode() for answer in engine.answers(calls)}
    assert found == {node["NodeID"] for node in ray.nodes() if node["Alive"]}


def test_replies_in_the_order_of_ids_and_those_that_are_not_finite(machines: Any) -> None:
    engine = actors(2)
    training, server = federation(UpdateOf(STACK, bad_size=30), engine, (5, 30, 0, 12), 4)
    round = training.round(0)
    cohort = training.sampler(training.federation.data, round)
    member = Member(training.federation, training.broadcast(server, 0), cohort, round)
    (outcome,) = client_phase(engine, member)
    assert isinstance(outcome.update, Stacked)
    assert outcome.update.updates.tolist() == [5.0, 0.0, 0.0, 12.0]
    assert outcome.update.weights.tolist() == [5.0, 0.0, 0.0, 12.0]
    assert outcome.finite.tolist() == [True, False, True, True]


@pytest.mark.parametrize("inner", ["sequential", "vectorized"])
def test_clients_made_when_asked_for(inner: str, machines: Any) -> None:
    """No actor has their examples: those of a chunk go with it, in rounds and in scores."""
    data = lazily(Population(key=7, most=90), 60, 5)
    found = []
    for one in (Sequential(CPU), actors(2, inner)):
        task = Task(lambda: nn.Linear(60, 10))
        method = FedEC(local=Recipe(lr=0.1, batch_size=20, epochs=1))

        def store(state: Tree) -> Store:
            return Store(state, data.population, CPU, None, mapped=False)

        training, server = assemble(one, method, task, task.init(1), data, 7, ROOT, uniform, store)
        closed = list(servers(training, server, 3))
        whole = tree.nbytes(training.sampler(data, training.round(2)).data.x)
        if isinstance(one, Ray):
            assert 0 < max(child._room.end for child in one._children) < whole / 2
        with torch.no_grad():
            broadcast = training.broadcast(closed[-1], 3)
            pairs = evaluate(one, training.federation, broadcast, [50, 3, 17, 4, 9], 3)
        found.append((closed, {name: tuple(map(torch.from_numpy, pair)) for name, pair in pairs.items()}))
    gap, path = _distance(*found)
    assert gap <= TOLERANCE, path


@torch.no_grad()
def test_only_a_chunks_own_examples_go_with_it() -> None:
    """Rows 2 … 4 and 9 of 12, and the padding behind; whoever computes finds the same examples."""
    data = lazily(Population(key=7, most=90), 60, 5).take([3, 8])
    training, _ = federation(METHOD, Sequential(CPU), SIZES, 5)
    f = replace(training.federation, data=data)
    rows, even = f.rows(data.train, [0, 1], [3, 8], 0)
    few = rows._replace(place=torch.tensor([[4, 2, data.padding], [9, 3, 4]]))
    call = engines._own(Call(Program(_machine, f, (Known(even),)), (), (few,), ""))
    sent = call.program.federation.data
    assert torch.equal(sent.x, data.x[[2, 3, 4, 9, data.padding]])
    assert torch.equal(sent.x[call.clients[0].place], data.x[few.place])
    assert torch.equal(sent.y[call.clients[0].place], data.y[few.place])
    assert call.clients[0].place[0, 2] == sent.padding


def test_every_actor_has_a_part_of_a_cohort() -> None:
    """64 clients for 2: 32 each under vmap, in eight parts each one by one; never more than --chunk."""
    assert share(64, 2, "vectorized", 64) == 32
    assert share(64, 2, "sequential", 64) == 4
    assert share(64, 2, "vectorized", 16) == 16
    assert share(10, 4, "vectorized", 64) == 3
    assert share(1, 4, "sequential", 64) == 1


def test_another_method_and_other_data_in_one_engine(machines: Any) -> None:
    """As along an adaptation curve; the actors stay."""
    engine = actors(2)
    ends(METHOD, engine, rounds=1)
    before = [child.pid for child in engine._children]
    for lr in (0.1, 0.2):
        method = FedAvg(local=Recipe(lr=lr, batch_size=4, epochs=1))
        (found,), (expected,) = ends(method, engine, rounds=1), ends(method, Sequential(CPU), rounds=1)
        assert _distance(found, expected)[0] <= TOLERANCE
    assert [child.pid for child in engine._children] == before


def test_layers_are_measured_by_an_actor_that_is_there(machines: Any) -> None:
    """All of the cluster is in use by this process already; on a CPU there is nothing to measure."""
    engine = actors(4)
    while sum(child.begun for child in engine._children) < 4:
        ends(METHOD, engine, rounds=1)
    x, y = torch.ones(2, 5), torch.ones(2, dtype=torch.int64)
    assert engines.measured_layers(Cluster(CPU, 4, 1), Task(dropout_net), x, y, 3) == {}


# Actors and machines that die


class Slow(nn.Linear):
    def __init__(self) -> None:
        super().__init__(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.02)
        return super().forward(x)


def test_killed_in_mid_round(machines: Any, caplog: pytest.LogCaptureFixture) -> None:
    """kill -9, by its pid, of the actor that computes the largest client, and of the one that comes next.

    The client takes 20 steps of 20 ms; clients are in chunks of one, the largest first.
    """
    expected = ends(METHOD, actors(2, limit=1), net=Slow)
    engine, killed = actors(2, limit=1), []

    def kill() -> None:
        while len(killed) < 2:
            time.sleep(0.1)
            for child in [*engine._children]:
                if child.pid not in killed and [*child.calls][:1] == [0]:
                    killed.append(child.pid)
                    os.kill(child.pid, signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    found = ends(METHOD, engine, net=Slow)
    thread.join()
    assert same(found, expected)
    assert engine.deaths == 2
    where = "in client_update of FedAvg, round 0, clients [3]"
    told = [(record.levelno, record.getMessage()) for record in caplog.records]
    assert told == [
        (logging.WARNING, f"an actor ended (process {pid} on {os.uname().nodename}) {where}: {AGAIN}")
        for pid in killed
    ]


AGAIN = "computed again by another"


def test_a_machine_is_lost_in_mid_round(
    machines: Any, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its chunks are computed by the actors that are left; nothing but our own warnings is said."""
    expected = ends(METHOD, actors(2, limit=1), net=Slow)
    engine = actors(4, limit=1)
    ends(METHOD, engine, rounds=1)
    lost = next(node for node in machines.list_all_nodes() if not node.is_head())

    def pull() -> None:
        time.sleep(0.3)
        machines.remove_node(lost, allow_graceful=False)

    thread = threading.Thread(target=pull)
    thread.start()
    try:
        found = ends(METHOD, engine, net=Slow)
        thread.join()
    finally:
        machines.add_node(**MACHINE)
    assert same(found, expected)
    assert engine.deaths >= 1
    assert len(caplog.records) == engine.deaths
    assert all(AGAIN in record.getMessage() for record in caplog.records)
    assert "".join(capfd.readouterr()) == ""


def test_what_ends_every_actor_is_told(machines: Any) -> None:
    told = r"3 actors ended \(process \d+ on .*\) in client_update of FedAvg, round 0, clients \[\d\]"
    with pytest.raises(ApieceError, match=told):
        ends(METHOD, actors(2), net=lambda: Elsewhere(lambda: os._exit(7)))


def test_errors_are_of_their_kind_and_name_round_and_clients(machines: Any) -> None:
    engine = actors(2)
    training, server = federation(UpdateOf(), engine, (3, 4, 5), 3)
    raising = replace(training, federation=replace(training.federation, method=UpdateOf(raises=True)))
    with pytest.raises(RuntimeError, match="broken on purpose") as caught:
        list(raising.rounds(server, 0, 1))
    where, trace = caught.value.__notes__
    assert where == "in client_update of UpdateOf, round 0, clients [0, 1]"
    assert 'raise RuntimeError("broken on purpose")' in trace
    assert len(list(servers(training, server, 1))) == 1


def test_no_room_on_the_cluster(free_machines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "PATIENCE", 1.0)
    with pytest.raises(ApieceError, match=r"no actor began within 1 s.*3 CPUs.*ray status"):
        ends(METHOD, Ray("sequential", 1, Cluster(CPU, 1, 3), "", {}))


# Runs


SMALL = {
    "method": "fedec",
    "settings": {"epochs": 1, "personal": {"epochs": 1}},
    "model": "logistic",
    "clients": 8,
    "cohort": 3,
    "rounds": 4,
    "evaluate_every": 2,
    "checkpoint_every": 2,
}


def test_a_run_resumes_bit_for_bit_and_has_the_sequential_ones_figures(machines: Any, tmp_path: Path) -> None:
    """What is recorded says the inner engine and the chunk; nothing is measured again."""
    experiment = Experiment(**SMALL, engine="ray", processes=2, address=machines.address)  # type: ignore[arg-type]
    run(experiment, tmp_path / "whole")
    chosen = json.loads((tmp_path / "whole" / "engine.json").read_text())
    inner = chosen["engine"].removeprefix("ray(").removesuffix(")")
    assert inner in ("sequential", "vectorized")
    assert inner in chosen["reason"]
    facts = (chosen["device"], chosen["threads"], chosen["processes"], chosen["chunk"])
    assert facts == ("cpu", 1, 2, 2 if inner == "vectorized" else 1)

    class Stop(Exception):  # noqa: N818
        pass

    def stop(done: int, scores: object) -> None:
        if done == 3:
            raise Stop

    with pytest.raises(Stop):
        run(replace(experiment, engine=chosen["engine"]), tmp_path / "stopped", stop)
    resume(tmp_path / "stopped")
    whole, stopped = (killing.contents(tmp_path / name) for name in ("whole", "stopped"))
    for name in ("rounds.csv", "clients.csv", "checkpoint/round-000004/server.safetensors"):
        assert whole[name] == stopped[name]
    plain = run(replace(experiment, engine="sequential", threads=1, processes=0, address=""))
    ours = run(experiment)
    assert _distance(ours.server, plain.server)[0] <= TOLERANCE
    for client in range(8):
        assert _distance(ours.model(client), plain.model(client))[0] <= TOLERANCE


OWN = """
from dataclasses import dataclass
from typing import NamedTuple

from apiece import Method, Params, Recipe, Reply
from apiece.local import sgd
from apiece.method import Model


class Note(NamedTuple):
    last: Params


@dataclass(frozen=True)
class Own(Method):
    local: Recipe = Recipe()
    personal: Recipe = Recipe()

    def init(self, task, params, key):
        return Model(params)

    def init_client(self, task, broadcast, start, key):
        return Note(start)

    def broadcast(self, server, round):
        return server

    def client_update(self, task, broadcast, client, data):
        w = sgd(task.objective, broadcast.params, data, self.local)
        return Reply(w - broadcast.params, Note(w))

    def server_update(self, task, server, update, round):
        return Model(server.params + update)

    def personalize(self, task, broadcast, client, data):
        return sgd(task.objective, broadcast.params, data, self.personal)
"""


def apiece(*arguments: str, before: str = "", **more: Any) -> subprocess.Popen[str]:
    """The command in a process of its own, which is connected to no cluster."""
    program = f"import sys; {before}\nfrom apiece.cli import main; main()"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **more,
    )


FLAGS = ("--model", "logistic", "--clients", "8", "--cohort", "4", "--set", "epochs=1")


def test_the_command_with_a_method_of_ones_own(free_machines: Any, tmp_path: Path) -> None:
    """Actors import the file. Nothing but JSON is printed; a model is exported when the cluster is gone."""
    (tmp_path / "own.py").write_text(OWN)
    out = tmp_path / "run"
    flags = (
        "--method",
        "own.py:Own",
        "--engine",
        "ray",
        "--address",
        free_machines.address,
        "--out",
        str(out),
    )
    process = apiece("run", *flags, *FLAGS, "--rounds", "2", "--json", cwd=tmp_path)
    printed, errors = process.communicate()
    assert (process.returncode, errors) == (0, "")
    assert command.strict(printed)["engine"].startswith("ray(")
    path = out / "experiment.toml"
    path.write_text(path.read_text().replace(free_machines.address, "127.0.0.1:1"))
    process = apiece("export", str(out), "--client", "3", "-o", str(tmp_path / "model.safetensors"))
    printed, errors = process.communicate()
    assert (process.returncode, errors) == (0, "")
    assert (tmp_path / "model.safetensors").exists()


def test_a_sweep_is_spread_and_what_is_lost_goes_on(free_machines: Any, tmp_path: Path) -> None:
    """kill -9 of a process that computes a run: another goes on from its last checkpoint, to the same files.

    The runs take the engine `auto` finds, but never all of a machine: `processes` is not among its options.
    """
    sweep = ("--methods", "fedavg,reptile", "--checkpoint-every", "5", "--rounds", "60", *FLAGS)
    flags = ("--spread", "--address", free_machines.address, "--out", str(tmp_path / "spread"), "--json")
    process = apiece("compare", *sweep, *flags)
    killed = 0
    while process.poll() is None and not killed:
        time.sleep(0.05)
        for pid in family(os.getpid()):
            with suppress(OSError):
                if b"ray::_work" in title(pid) and under_way(tmp_path):
                    os.kill(pid, signal.SIGKILL)
                    killed = pid
                    break
    printed, errors = process.communicate()
    assert (process.returncode, errors) == (0, "")
    assert killed
    assert [found["method"] for found in command.strict(printed)] == ["fedavg", "reptile"]
    for name in ("fedavg-s0", "reptile-s0"):
        chosen = json.loads((tmp_path / "spread" / name / "engine.json").read_text())
        assert "processes" not in chosen["reason"]
        assert chosen["processes"] == 1
        described = read(tmp_path / "spread" / name / "experiment.toml")
        alone = run(replace(described, engine=chosen["engine"], threads=1), tmp_path / name)
        ours, theirs = (killing.contents(tmp_path / place / name) for place in ("spread", "."))
        for file in ("rounds.csv", "clients.csv", "checkpoint/round-000060/server.safetensors"):
            assert ours[file] == theirs[file]
        assert alone.summary["rounds"] == 60


def test_a_papers_table_is_spread(free_machines: Any, tmp_path: Path) -> None:
    """Runs that others start from come first; what the ledger says is what a run alone gives."""
    only = ("--only", "prior model/Fashion-MNIST", "--only", "FedAvg/Fashion-MNIST")
    flags = ("--scale", "smoke", "--seeds", "0", *only, "--device", "cpu", "--json")
    place = ("--experiments", str(PROJECT / "experiments"))
    cluster = ("--spread", "--address", free_machines.address)
    found = {}
    for name, more in (("spread", cluster), ("alone", ())):
        process = apiece("reproduce", "p4-figure5", *flags, *place, *more, "--out", str(tmp_path / name))
        printed, errors = process.communicate()
        assert process.returncode == 0, errors
        found[name] = {(e["row"], e["seed"]): e["numbers"] for e in command.strict(printed)}
    assert len(found["spread"]) == 2
    assert found["spread"] == found["alone"]


def under_way(folder: Path) -> bool:
    """Has a run in it more than one checkpoint?"""
    return len(list(folder.glob("spread/*/checkpoint/round-*"))) > 1


def test_a_spread_run_is_in_one_place(tmp_path: Path) -> None:
    found = command.apiece("compare", "--spread", "--engine", "ray", "--out", str(tmp_path / "runs"))
    assert found.code == 2
    assert "--spread computes each run in one place" in found.err.replace("\n", " ")


def test_what_the_page_shows_runs(
    free_machines: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every `apiece` line of docs/scale.md, on small data; this process is connected, whatever they say."""
    monkeypatch.chdir(tmp_path)
    page = (PROJECT / "docs" / "scale.md").read_text(encoding="utf-8")
    lines = [line for line in page.splitlines() if line.startswith("apiece ")]
    assert len(lines) == 4
    for line in lines:
        found = command.apiece(*shlex.split(line)[1:], *FLAGS, "--rounds", "2", "--json")
        assert (found.code, found.err) == (0, ""), line
        assert found.json


def test_the_benchmark_still_works(free_machines: Any, tmp_path: Path) -> None:
    """With Ray and without, a round does the same work. No time is asserted."""
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        scale.main(["--small", "--device", "cpu", "--json", str(tmp_path / "scale.json")])
    facts = command.strict((tmp_path / "scale.json").read_text())
    rows = facts["rounds"]["lenet"]["rows"]
    assert [row["choice"]["engine"] for row in rows.values()] == ["processes", "ray(sequential)"]
    one, other = (row["moved"] for row in rows.values())
    assert other == pytest.approx(one, rel=TOLERANCE)
    assert facts["calls"][0]["bytes"] == 40_000
    assert facts["host"]["bytes"] == 8 * 8 + 3 * 8 + 1  # rows of 8 examples, size, two keys; that it is real


def test_the_figures_on_the_page_are_those_of_the_files() -> None:
    page = (PROJECT / "docs" / "scale.md").read_text(encoding="utf-8")
    for name in ("scale-2cores", "scale-h200"):
        facts = json.loads((PROJECT / "results" / f"{name}.json").read_text())
        digits = 0 if name == "scale-2cores" else 1
        for found in facts["rounds"].values():
            one, many = (row["ms"] for row in found["rows"].values())
            assert f"| {one:.{digits}f} | {many:.{digits}f} |" in page


def test_a_cluster_that_is_begun_here_ends_with_the_run(tmp_path: Path) -> None:
    """Also when nobody could tell it to: kill -9 of the run. Ray's two agents take a minute for it."""
    flags = ("--engine", "ray(sequential)", "--processes", "2", "--rounds", "100000", "--out", str(tmp_path))
    process = apiece("run", *FLAGS, *flags, start_new_session=True)
    try:
        rounds = tmp_path / "rounds.csv"
        while not rounds.exists() or len(rounds.read_text().splitlines()) < 4:
            assert process.poll() is None
            time.sleep(0.1)
        begun = {pid for pid in family(process.pid) if b"Agent" not in title(pid)}
        assert len(begun) > 3
        process.kill()
        assert "ray" not in process.communicate()[1].lower()
        while any(alive(pid) for pid in begun):
            time.sleep(0.1)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def title(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def family(pid: int) -> set[int]:
    """The descendants of a process."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    found, more = set(), {pid}
    while more:
        found |= more
        more = {child for child, parent in parents.items() if parent in more} - found
    return found - {pid}


def test_what_is_not_there_is_told(tmp_path: Path) -> None:
    without = apiece("run", *FLAGS, "--engine", "ray", before="sys.modules['ray'] = None", cwd=tmp_path)
    wrong = apiece("run", *FLAGS, "--engine", "ray", "--address", "127.0.0.1:1", cwd=tmp_path)
    for process, told in ((without, "pip install 'apiece[ray]'"), (wrong, "127.0.0.1:1")):
        _, errors = process.communicate()
        assert process.returncode == 2
        assert told in errors
        assert "Traceback" not in errors
    with pytest.raises(ApieceError, match="--device cuda:1 is not for the ray engine"):
        run(Experiment(engine="ray", device="cuda:1"))


def test_more_actors_than_there_is_room_for(machines: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Four CPUs: as many actors of one, two of two."""
    assert engines.join(machines.address, "auto", 0, 0) == Cluster(CPU, 4, 1)
    assert engines.join(machines.address, "cpu", 0, 2) == Cluster(CPU, 2, 2)
    assert caplog.records == []
    assert engines.join(machines.address, "cpu", 3, 2) == Cluster(CPU, 3, 2)
    assert [record.getMessage() for record in caplog.records] == [
        "the Ray cluster has room for 2 of 3 actors: the others wait for more"
    ]
    with pytest.raises(ApieceError, match="no room for an actor of 5 CPUs"):
        engines.join(machines.address, "cpu", 0, 5)


def test_a_gpu_that_no_machine_has(machines: Any) -> None:
    with pytest.raises(ApieceError, match="the Ray cluster has no GPU"):
        run(Experiment(engine="ray", device="cuda", address=machines.address))
