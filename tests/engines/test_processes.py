"""Real processes, really killed: the bits are those of the sequential engine with one thread."""

from __future__ import annotations

import gc
import json
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from apiece import ApieceError, Dropout, Experiment, Method, Params, Recipe, Task, catalog, resume, run
from apiece import choice as choosing
from apiece import prepare as preparing
from apiece.check import _bits_differ, _stressed, _World
from apiece.choice import Option, choose
from apiece.data.lazy import lazily
from apiece.data.synthetic import Population
from apiece.engines.base import Call, Engine, Federation, Member, Program, client_phase, work
from apiece.engines.processes import Processes, handfuls, obstacle
from apiece.engines.sequential import Sequential
from apiece.engines.vectorized import Vectorized
from apiece.evaluate import evaluate
from apiece.method import STACK, Model, Reply, Round, Server, Stacked
from apiece.methods.fedavg import FedAvg
from apiece.methods.fedec import FedEC
from apiece.sample import uniform
from apiece.shard import Shard
from apiece.store import Store
from apiece.train import assemble
from apiece.tree import Tree
from tests import killing
from tests.broken import Averaging, Elsewhere, UpdateOf
from tests.worlds import CPU, ROOT, dropout_net, federation, servers

pytestmark = pytest.mark.skipif(bool(obstacle(CPU)), reason=obstacle(CPU))

SIZES = (3, 17, 0, 40, 9, 5)
METHOD = FedAvg(local=Recipe(lr=0.1, batch_size=4, epochs=2))


@pytest.fixture(autouse=True)
def _no_hanging() -> Iterator[None]:
    """A test that waits for a process that never answers ends after a minute."""

    def stop(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def engine() -> Processes:
    return Processes(CPU, 2)


def ends(
    method: Method, engine: Engine, rounds: int = 3, net: Callable[[], nn.Module] = dropout_net
) -> list[Server]:
    training, server = federation(method, engine, SIZES, 5, net)
    return list(servers(training, server, rounds))


def same(a: Tree, b: Tree) -> bool:
    return _bits_differ(a, b) == []


# The same numbers


@pytest.mark.parametrize(
    "name",
    ["fedavg", "fedec", "admm_fedmeta", "apfl_ewc", "fedrep", "scaffold", "maml", "elastic(fedavg)"],
)
@torch.no_grad()
def test_servers_states_and_models_have_the_bits_of_the_sequential_engine(
    name: str, engine: Processes
) -> None:
    """Four rounds with dropout, on clients of 0, 1, 4, 9, 14, 17, 21 and 25 examples."""
    world = _World.build(_stressed(catalog.build(name, {})), CPU)
    for one, many in zip(world.play(Sequential(CPU)), world.play(engine), strict=True):
        assert same(one, many)


def test_chunks_of_clients_have_the_bits_of_the_vectorized_engine() -> None:
    """Chunks of at most two of five clients."""
    alone = ends(METHOD, Vectorized(CPU, 2))
    assert same(alone, ends(METHOD, Processes(CPU, 2, Vectorized(CPU, 2))))
    assert not same(alone, ends(METHOD, Processes(CPU, 2))), "the test must be able to tell them apart"


class InHandfuls(Sequential):
    """The sequential engine with the chunks of a pool of two."""

    def cut(self, sizes: Sequence[int], recipe: Recipe) -> list[list[int]]:
        return handfuls(work(sizes, recipe), 2, self.limit)


def test_handfuls_of_clients_have_the_bits_of_the_sequential_engine_with_such_chunks() -> None:
    def even(engine: Engine) -> list[Server]:
        training, server = federation(METHOD, engine, (9, 9, 9, 9, 9), 5, dropout_net)
        return list(servers(training, server, 3))

    sums = even(InHandfuls(CPU, 8))
    assert same(sums, even(Processes(CPU, 2, Sequential(CPU, 8))))
    assert not same(sums, even(Sequential(CPU))), "the test must be able to tell them apart"


@given(st.lists(st.integers(1, 90), min_size=1, max_size=60), st.integers(1, 9), st.integers(1, 8))
def test_handfuls_keep_no_process_waiting(steps: list[int], processes: int, most: int) -> None:
    """Handed out as they come, they are done at most 2 % later than clients one by one, longest first."""

    def end(chunks: list[list[int]]) -> int:
        free = [0] * processes
        for chunk in chunks:
            free.sort()
            free[0] += sum(steps[i] for i in chunk)
        return max(free)

    found = handfuls(steps, processes, most)
    assert sorted(i for chunk in found for i in chunk) == list(range(len(steps)))
    assert max(map(len, found)) <= most
    alone = [[i] for i in sorted(range(len(steps)), key=lambda i: -steps[i])]
    assert end(found) <= 1.02 * end(alone)


def test_handfuls_of_common_cohorts() -> None:
    """Of even ones two for each process; a client that takes as long as all others is alone."""
    sizes = {n: sorted(map(len, handfuls([10] * n, 2, 8))) for n in (2, 4, 10, 16, 30)}
    assert sizes == {2: [1, 1], 4: [1] * 4, 10: [2, 2, 3, 3], 16: [4] * 4, 30: [7, 7, 8, 8]}
    assert handfuls([1, 1, 1, 6, 1, 1, 1], 2, 8)[0] == [3]
    assert [len(chunk) for chunk in handfuls([10] * 64, 2, 8)] == [8] * 8
    assert [len(chunk) for chunk in handfuls([10] * 6, 2, 1)] == [1] * 6


@pytest.mark.parametrize("inside", [Sequential(CPU), Vectorized(CPU, 2)], ids=lambda engine: engine.name)
def test_the_number_of_processes_changes_nothing(inside: Engine) -> None:
    one, three, many = (ends(METHOD, Processes(CPU, count, inside)) for count in (1, 3, 9))
    assert same(one, three)
    assert same(one, many)


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.drop, self.out = nn.Conv1d(1, 8, 3), Dropout(0.3), nn.Linear(24, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.drop(self.conv(x[:, None])).flatten(1))


def test_a_parent_that_has_used_threads(engine: Processes) -> None:
    """Those of PyTorch's own loops, of matrix products and of convolutions: forks have none of them."""
    expected = ends(METHOD, Sequential(CPU), net=Conv)
    torch.set_num_threads(2)
    try:
        wide = torch.ones(600, 600)
        assert float((wide @ wide).sum()) == 600.0**3
        torch.conv2d(torch.ones(8, 8, 64, 64), torch.ones(8, 8, 3, 3))
        torch.ones(1 << 20).exp().sum()
        assert len(os.listdir("/proc/self/task")) > 1
        assert same(ends(METHOD, engine, net=Conv), expected)
    finally:
        torch.set_num_threads(1)


def test_replies_in_the_order_of_ids_and_those_that_are_not_finite(engine: Processes) -> None:
    training, server = federation(UpdateOf(STACK, bad_size=30), engine, (5, 30, 0, 12), 4)
    round = training.round(0)
    cohort = training.sampler(training.federation.data, round)
    member = Member(training.federation, training.broadcast(server, 0), cohort, round)
    (outcome,) = client_phase(engine, member)
    assert isinstance(outcome.update, Stacked)
    assert outcome.update.updates.tolist() == [5.0, 0.0, 0.0, 12.0]
    assert outcome.update.weights.tolist() == [5.0, 0.0, 0.0, 12.0]
    assert outcome.finite.tolist() == [True, False, True, True]


def test_clients_made_when_asked_for(engine: Processes) -> None:
    """Arrays that were not there when the processes began: a cohort's in rounds, a client's in scores."""
    data = lazily(Population(key=7, most=90), 60, 5)
    found = []
    for one in (Sequential(CPU), engine):
        task = Task(lambda: nn.Linear(60, 10))
        method = FedEC(local=Recipe(lr=0.1, batch_size=20, epochs=1))

        def store(state: Tree) -> Store:
            return Store(state, data.population, CPU, None, mapped=False)

        training, server = assemble(one, method, task, task.init(1), data, 7, ROOT, uniform, store)
        closed = list(servers(training, server, 3))
        with torch.no_grad():
            broadcast = training.broadcast(closed[-1], 3)
            pairs = evaluate(one, training.federation, broadcast, [50, 3, 17, 4, 9], 3)
        found.append((closed, {name: tuple(map(torch.from_numpy, pair)) for name, pair in pairs.items()}))
    assert same(*found)


def _echo(federation: Federation, even: tuple[bool, ...], shared: Tensor, given: Tensor) -> Tree:
    return torch.ones(100), given, shared, given[:0]


def test_answers_that_are_parts_of_what_was_given(engine: Processes) -> None:
    """They lie where answers are put: in shared memory. With tensors of every kind, and of no entries."""
    training, _ = federation(METHOD, engine, SIZES, 5)
    f = replace(training.federation, data=training.sampler(training.federation.data, training.round(0)).data)
    kinds = (torch.float64, torch.int64, torch.bool, torch.uint8, torch.bfloat16)
    given = [torch.arange(2.0).repeat(1, 50).mul(i + 1).to(kind) for i, kind in enumerate(kinds)]
    shared = torch.arange(6).reshape(2, 3).T
    calls = [Call(Program(_echo, f), shared, (some,), "") for some in given]
    for some, found in zip(given, engine.answers(calls), strict=True):
        assert same(found, (torch.ones(1, 100), some, shared.contiguous()[None], some[:, :0]))


def test_another_method_in_the_same_engine(engine: Processes) -> None:
    """As along an adaptation curve: processes begun with one method are not asked for another's replies."""
    for lr in (0.1, 0.2, 0.1):
        method = FedAvg(local=Recipe(lr=lr, batch_size=4, epochs=1))
        assert same(ends(method, engine), ends(method, Sequential(CPU)))


# Processes that die


class Slow(nn.Linear):
    def __init__(self) -> None:
        super().__init__(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.02)
        return super().forward(x)


def test_killed_in_mid_round(engine: Processes, caplog: pytest.LogCaptureFixture) -> None:
    """kill -9, by its pid, of the process that computes the largest client, and of the one that comes next.

    The client takes 20 steps of 20 ms.
    """
    killed: set[int] = set()

    def kill() -> None:
        while len(killed) < 2:
            time.sleep(0.1)
            for child in [*engine._children]:
                if child.process.pid not in killed and 0 in child.calls:
                    killed.add(child.process.pid or 0)
                    os.kill(child.process.pid or 0, signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    found = ends(METHOD, engine, net=Slow)
    thread.join()
    assert same(found, ends(METHOD, Sequential(CPU), net=Slow))
    where = "in client_update of FedAvg, round 0, clients [3]"
    told = f"a process ended (SIGKILL) {where}: computed again by another"
    assert [(record.levelno, record.getMessage()) for record in caplog.records] == [
        (logging.WARNING, told)
    ] * 2


def test_killed_while_it_has_nothing_to_do(engine: Processes, caplog: pytest.LogCaptureFixture) -> None:
    training, server = federation(METHOD, engine, SIZES, 5)
    rounds = servers(training, server, 2)
    found = [next(rounds)]
    for child in multiprocessing.active_children():
        child.kill()
        child.join()
    found.append(next(rounds))
    assert same(found, ends(METHOD, Sequential(CPU), rounds=2))
    assert {record.getMessage() for record in caplog.records} == {
        "a process ended (SIGKILL) while it had nothing to do"
    }


def test_what_ends_every_process_is_told(engine: Processes) -> None:
    told = r"3 processes ended \(exit code 7\) in client_update of FedAvg, round 0, clients \[\d\]"
    with pytest.raises(ApieceError, match=told):
        ends(METHOD, engine, net=lambda: Elsewhere(lambda: os._exit(7)))


# Errors


def test_errors_are_of_their_kind_and_name_round_and_client(engine: Processes) -> None:
    """The first of the calls that fail, as in the sequential engine; the engine can be used afterwards."""
    training, server = federation(UpdateOf(), engine, (3, 4, 5), 3)
    raising = replace(training, federation=replace(training.federation, method=UpdateOf(raises=True)))
    with pytest.raises(RuntimeError, match="broken on purpose") as caught:
        list(raising.rounds(server, 0, 1))
    where, trace = caught.value.__notes__
    assert where == "in client_update of UpdateOf, round 0, clients [0]"
    assert 'raise RuntimeError("broken on purpose")' in trace
    assert len(list(servers(training, server, 1))) == 1


class OddError(Exception):
    """It cannot be pickled: it is not made of its arguments."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")


def test_errors_that_cannot_travel_are_told(engine: Processes) -> None:
    def deed() -> None:
        raise OddError(1, 2)

    with pytest.raises(RuntimeError, match="OddError: 1 and 2"):
        ends(METHOD, engine, net=lambda: Elsewhere(deed))


def sender() -> Method:
    """Its broadcast is of a class that another process cannot find."""

    class Message(NamedTuple):
        params: Params

    @dataclass(frozen=True)
    class Sends(Averaging):
        local: Recipe = Recipe()
        personal: Recipe = Recipe()

        def broadcast(self, server: Model, round: Round) -> Message:
            return Message(server.params)

        def client_update(self, task: Task, broadcast: Message, client: Tree, data: Shard) -> Reply:
            return Reply(broadcast.params.zeros())

    return Sends()


def test_classes_that_cannot_travel_are_told_and_auto_does_without(engine: Processes) -> None:
    training, server = federation(sender(), engine, SIZES, 5)
    with pytest.raises(ApieceError, match=r"cannot send this to another process: .*Message.* at the top"):
        list(servers(training, server, 1))
    with torch.no_grad():
        option, reason = choose(training, server, {"sequential": "", "processes": ""}, 8, 1, 2, 10)
    assert option == Option("sequential", 1)
    assert "cannot send this to another process" in reason


def test_where_it_cannot_be_used() -> None:
    with pytest.raises(ApieceError, match="it computes on a CPU, and the device is cuda"):
        Processes(torch.device("cuda"), 2)
    with pytest.raises(ApieceError, match="each of the processes has one thread"):
        Experiment(engine="processes", threads=2)


# Nothing is left


def test_no_process_and_no_file_is_left() -> None:
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    ours = {child.pid for child in multiprocessing.active_children()}
    engine = Processes(CPU, 3)
    ends(METHOD, engine)
    begun = {child.pid for child in multiprocessing.active_children()} - ours
    assert len(begun) == 3
    del engine
    gc.collect()
    assert not any(Path(f"/proc/{pid}").exists() for pid in begun)
    assert len(os.listdir("/proc/self/fd")) == before


def children(pid: int) -> set[int]:
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            facts = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(facts[1]) == pid and facts[0] != "Z":
            found.add(int(path.parent.name))
    return found


def wait_for(what: Callable[[], object]) -> None:
    while not what():
        time.sleep(0.05)


def test_children_end_with_their_parent(tmp_path: Path) -> None:
    """By ctrl-C, which reaches them all, be it at once, and without a word of theirs; and when nobody could
    tell them."""
    flags = "--engine processes --processes 2 --rounds 100000 --model logistic --clients 8 --cohort 4"
    slow = "import os, time; os.register_at_fork(after_in_child=lambda: time.sleep(0.5))"
    command = [sys.executable, "-c", f"{slow}; from apiece.cli import main; main()", "run", *flags.split()]
    runs = [
        subprocess.Popen(
            [*command, "--set", "epochs=1", "--out", str(tmp_path / name)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        for name in ("interrupted", "killed")
    ]
    try:
        begun = []
        for process, end in zip(
            runs, (lambda: os.killpg(runs[0].pid, signal.SIGINT), runs[1].kill), strict=True
        ):
            wait_for(lambda process=process: len(children(process.pid)) == 2)
            begun += children(process.pid)
            end()
        assert all(process.wait() != 0 for process in runs)
        wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in begun))
    finally:
        for process in runs:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        errors = [process.communicate()[1].decode() for process in runs]
    assert "Traceback" not in "".join(errors)


# Runs


def test_a_run_resumes_bit_for_bit_and_has_the_sequential_ones_figures(tmp_path: Path) -> None:
    experiment = Experiment(
        method="fedec",
        settings={"epochs": 1, "personal": {"epochs": 1}},
        model="logistic",
        clients=8,
        cohort=3,
        rounds=4,
        evaluate_every=2,
        checkpoint_every=2,
        engine="processes",
        processes=2,
    )
    run(experiment, tmp_path / "whole")
    chosen = json.loads((tmp_path / "whole" / "engine.json").read_text())
    assert (chosen["engine"], chosen["threads"], chosen["processes"]) == ("processes", 1, 2)

    class Stop(Exception):  # noqa: N818
        pass

    def stop(done: int, scores: object) -> None:
        if done == 3:
            raise Stop

    with pytest.raises(Stop):
        run(experiment, tmp_path / "stopped", stop)
    resume(tmp_path / "stopped")
    assert killing.differences(tmp_path / "whole", tmp_path / "stopped") == []
    run(replace(experiment, engine="sequential", threads=1), tmp_path / "sequential")
    ours, theirs = (killing.contents(tmp_path / name) for name in ("whole", "sequential"))
    for name in ("rounds.csv", "clients.csv", "checkpoint/round-000004/server.safetensors"):
        assert ours[name] == theirs[name]


@pytest.mark.parametrize(
    ("changes", "cpus", "offered"),
    [
        ({}, 2, True),
        ({"threads": 1}, 2, False),
        ({"threads": 1, "processes": 3}, 2, True),
        ({"processes": 1}, 2, False),
        ({"cohort": 1}, 2, False),
        ({}, 1, False),
    ],
    ids=str,
)
def test_auto_takes_the_fastest(
    changes: dict[str, int], cpus: int, offered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By rounds where one batch leaves it open, whatever the batch said."""
    asked: list[Option] = []

    def batch(probe: object, option: Option) -> float:
        asked.append(option)
        taken = {"vectorized": 1.0, "sequential": 5.0, "processes": 3.9, "processes(vectorized)": 4.1}
        return taken[option.engine]

    def rounds(
        probe: object, options: dict[Option, float], repeats: int, batches: int
    ) -> dict[Option, float]:
        assert "sequential" not in {option.engine for option in options}
        return {option: float(option.engine == "vectorized") for option in options}

    monkeypatch.setattr(preparing, "cpus", lambda: cpus)
    monkeypatch.setattr(choosing._Probe, "batch", batch)
    monkeypatch.setattr(choosing._Probe, "rounds", rounds)
    monkeypatch.setattr(choosing, "MOST", 1e6)
    small = {"model": "logistic", "clients": 8, "cohort": 3, "rounds": 100, **changes}
    chosen = preparing.prepare(Experiment(**small), None, None).choice  # type: ignore[arg-type]
    count = changes.get("processes") or cpus
    assert (Option("processes", 1, count) in asked) == offered
    if offered:
        assert (chosen.engine, chosen.threads, chosen.processes) == ("processes", 1, count)
    else:
        assert (chosen.engine, chosen.processes) == ("vectorized", 1)


@torch.no_grad()
def test_the_probe_measures_and_keeps_nothing() -> None:
    """With states, on real engines: what a round takes decides, and no client was met."""
    training, server = federation(FedEC(local=Recipe(batch_size=4, epochs=2)), Sequential(CPU), SIZES, 5)
    engines = dict.fromkeys(("vectorized", "sequential", "processes", "processes(vectorized)"), "")
    option, reason = choose(training, server, engines, 8, 1, 2, 1000)
    assert option.engine in reason
    assert "2 processes " in reason
    assert "2 processes(vectorized)" in reason
    assert not training.federation.store.known(range(len(SIZES))).any()


def test_what_is_as_fast_and_takes_less_memory_is_picked() -> None:
    one, many, pool = Option("sequential", 2), Option("vectorized", 2), Option("processes(vectorized)", 1, 2)
    assert choosing.picked({many: 1.0, one: 1.04, pool: 1.03}) == one
    assert choosing.picked({many: 1.0, one: 1.06, pool: 1.03}) == many
    assert choosing.picked({one: 1.0, Option("sequential", 1): 0.99}) == Option("sequential", 1)


@torch.no_grad()
def test_a_few_batches_tell_what_a_round_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two passes over 4 and 8 examples in batches of 4: 2 steps and 4. One by one a round is 6 / 2 times as
    long as one of a single batch each. As one chunk it has 4 steps, of which each costs as much as 100
    clients besides those who take it: (6 + 400) / (2 + 100) times as long."""
    training, server = federation(FedAvg(local=Recipe(batch_size=4, epochs=2)), Sequential(CPU), (4, 8), 2)
    probe = choosing._Probe(training, server, 8)
    monkeypatch.setattr(Vectorized, "overhead", 100.0)
    measure = probe._seconds

    def second(option: Option, engine: Engine, measured: Callable[[Engine], None]) -> float:
        measure(option, engine, measured)
        return 1.0

    monkeypatch.setattr(probe, "_seconds", second)
    options = [Option("sequential", 1), Option("vectorized", 1)]
    assert list(probe.rounds(options, 1, 1).values()) == pytest.approx([3.0, 406 / 102])
    assert list(probe.rounds(options, 1, 4).values()) == [1.0, 1.0]
