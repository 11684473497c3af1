"""Real processes, really killed: the bits are those of the sequential engine with one thread."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from apiece import ApieceError, Dropout, Experiment, Method, Model, Params, Recipe, Reply, Shard, Task, catalog
from apiece import resume as resume_run
from apiece import run as run_whole
from apiece.check import _bits_differ, _stressed, _World
from apiece.choice import Option, _Probe
from apiece.data.lazy import lazily
from apiece.data.synthetic import Population
from apiece.engines.base import Member, client_phase
from apiece.engines.processes import Processes, cpus, obstacle
from apiece.engines.sequential import Sequential
from apiece.evaluate import evaluate
from apiece.method import STACK, Server, Stacked
from apiece.methods.fedavg import FedAvg
from apiece.methods.fedec import FedEC
from apiece.prepare import prepare
from apiece.sample import uniform
from apiece.store import Store
from apiece.train import assemble
from apiece.tree import Tree
from tests import killing
from tests.broken import UpdateOf
from tests.worlds import CPU, ROOT, federation, servers

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


def ends(method: Method, engine: Sequential, rounds: int = 3, net: type[nn.Module] | None = None) -> list[Server]:
    training, server = federation(method, engine, SIZES, 5, *([net] if net else []))
    return list(servers(training, server, rounds))


def same(a: Tree, b: Tree) -> bool:
    return _bits_differ(a, b) == []


# The same numbers


@pytest.mark.parametrize(
    "name",
    ["fedavg", "fedec", "admm_fedmeta", "apfl_ewc", "fedrep", "scaffold", "maml", "elastic(fedavg)"],
)
@torch.no_grad()
def test_servers_states_and_models_have_the_bits_of_the_sequential_engine(name: str, engine: Processes) -> None:
    """Four rounds with dropout, on clients of 0, 1, 4, 9, 17 and 25 examples."""
    world = _World.build(_stressed(catalog.build(name, {})), CPU)
    for one, many in zip(world.play(Sequential(CPU)), world.play(engine), strict=True):
        assert same(one, many)


def test_the_number_of_processes_changes_nothing() -> None:
    one, three, many = (ends(METHOD, Processes(CPU, count)) for count in (1, 3, 9))
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
    """kill -9 by pid, three times in three rounds of about half a second."""
    killed: list[int] = []

    def kill() -> None:
        while len(killed) < 3:
            time.sleep(0.2)
            pids = [child.pid for child in multiprocessing.active_children() if child.pid not in killed]
            if pids and pids[0] is not None:
                killed.append(pids[0])
                os.kill(pids[0], signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    found = ends(METHOD, engine, net=Slow)
    thread.join()
    assert same(found, ends(METHOD, Sequential(CPU), net=Slow))
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(told) == 3
    assert all("a process ended (SIGKILL)" in text for text in told)
    assert any("in client_update of FedAvg, round" in text for text in told)


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


class Deadly(nn.Linear):
    """Ends every process but the one it was made in."""

    def __init__(self) -> None:
        super().__init__(5, 3)
        self.home = os.getpid()

    def forward(self, x: Tensor) -> Tensor:
        if os.getpid() != self.home:
            os._exit(7)
        return super().forward(x)


def test_what_ends_every_process_is_told(engine: Processes) -> None:
    with pytest.raises(ApieceError, match=r"3 processes ended \(exit code 7\) in client_update of FedAvg, round 0"):
        ends(METHOD, engine, net=Deadly)


class OddError(Exception):
    """That cannot be pickled: it is not made of its arguments."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")


class Odd(nn.Linear):
    def __init__(self) -> None:
        super().__init__(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        raise OddError(1, 2)


def test_errors_are_of_their_kind_and_name_round_and_client(engine: Processes) -> None:
    """The first of the calls that fail, as in the sequential engine, and the engine goes on afterwards."""
    training, server = federation(UpdateOf(), engine, (3, 4, 5), 3)
    raising = replace(training, federation=replace(training.federation, method=UpdateOf(raises=True)))
    with pytest.raises(RuntimeError, match="broken on purpose") as caught:
        list(raising.rounds(server, 0, 1))
    where, trace = caught.value.__notes__
    assert where == "in client_update of UpdateOf, round 0, clients [0]"
    assert 'raise RuntimeError("broken on purpose")' in trace
    assert len(list(training.rounds(server, 0, 1))) == 1
    training, server = federation(METHOD, engine, SIZES, 5, nn.Linear.__class__ and Conv)
    module = Odd()
    task = replace(training.federation.task, module=module)
    odd = replace(training, federation=replace(training.federation, task=task))
    with pytest.raises(RuntimeError, match="OddError: 1 and 2"):
        list(servers(odd, server, 1))
