"""Steps recorded and replayed give the numbers of plain ones; here a replay is the step run again."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace

import pytest
import torch

from apiece import Experiment, catalog, tree
from apiece.engines.base import Engine, Program, ceiling
from apiece.engines.capture import Captured, _rounded
from apiece.engines.narrowing import narrowing
from apiece.engines.sequential import Sequential
from apiece.engines.stepwise import PLAIN, Action, Stepwise, _kind
from apiece.engines.vectorized import Vectorized, mapped
from apiece.evaluate import models
from apiece.local import looping
from apiece.method import Method
from apiece.prepare import prepare
from apiece.shard import Batch
from apiece.tree import Tree
from tests.worlds import CPU, federation, normalized_net

NAMES = catalog.names()
SIZES = (0, 1, 4, 9, 17, 25, 12)
# 5 examples a batch: the last one of a pass is shorter for most widths, and comes once in a pass.
LOCAL = {"batch_size": 5, "epochs": 4}


class Counting(Vectorized):
    """Vectorized, its loops stepwise."""

    def __init__(self) -> None:
        super().__init__(CPU, 64)
        self.steps = self.recorded = self.replayed = self.served = 0

    def each(self, program: Program, shared: Tree, clients: tuple[Tree, ...]) -> Tree:
        stepwise = Stepwise(self.record)
        with looping(stepwise):
            answer = mapped(program, shared, clients)
        self.steps += stepwise.steps
        return answer

    def serving(self) -> AbstractContextManager[None]:
        def record(action: Action) -> Action:
            def replay() -> None:
                self.served += 1
                action()

            return replay

        return looping(Stepwise(record, under=0))

    def record(self, action: Action) -> Action:
        """Whether the action can be run is found out now; the first replay is that run."""
        action()
        self.recorded += 1
        begun = True

        def replay() -> None:
            nonlocal begun
            if not begun:
                action()
            begun = False
            self.replayed += 1

        return replay


class Rounded(Counting):
    """What a GPU records, run plainly: shapes rounded up, steps of those who may have a batch, masks kept."""

    cut = Captured.cut

    def __init__(self, whole: bool) -> None:
        super().__init__()
        self.whole = whole

    def each(self, program: Program, shared: Tree, clients: tuple[Tree, ...]) -> Tree:
        count = len(tree.leaves(clients)[0])
        program, clients = _rounded(program, clients, ceiling(count))
        with looping(narrowing if self.whole else Stepwise(self.record, warm=True)):
            answer = mapped(program, shared, clients)
        return answer if program.together else tree.take(answer, slice(0, count))


def trained(method: Method, engine: Engine) -> Tree:
    training, server = federation(method, engine, SIZES, 4, normalized_net)
    with torch.no_grad():
        servers = [closed.server for closed in training.rounds(server, 0, 2)]
        broadcast = training.broadcast(servers[-1], 2)
        return servers, models(engine, training.federation, broadcast, [2, 5], 2)


def longer(method: Method) -> Method:
    """With recipes of many steps, where the method lets its recipes be chosen."""
    if method.local.batch_size == 0:
        return method
    return replace(method, local=method.local._replace(**LOCAL, steps=0))  # type: ignore[type-var]


@pytest.mark.parametrize("name", [n for n in NAMES if not catalog.build(catalog.example(n), {}).needs_proxy])
def test_every_method_is_the_same_stepwise_and_narrowed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against clients one by one, to whom none of it is done."""
    method = catalog.build(catalog.example(name), {})
    if any(f == "local" for f in getattr(method, "__dataclass_fields__", {})):
        method = longer(method)
    plain = trained(method, Sequential(CPU))
    monkeypatch.setattr("apiece.engines.narrowing.settled", lambda batch: batch)
    for engine in (Counting(), Rounded(whole=False), Rounded(whole=True)):
        for a, b in zip(tree.tensors(plain), tree.tensors(trained(method, engine)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("name", [n for n in NAMES if catalog.build(catalog.example(n), {}).needs_proxy])
def test_what_a_server_trains_is_the_same_stepwise(name: str) -> None:
    """On digits: five passes over 100 proxy examples or so in batches of 20, the last ones shorter."""
    slot = {"feddf": "distill", "fedmeta_proxy": "meta"}.get(name, "aggregator")
    described = Experiment(
        method=catalog.example(name),
        settings={slot: {"batch_size": 20, "epochs": 5, "steps": 0}},
        rounds=2,
        cohort=2,
        proxy=0.1,
        engine="vectorized",
        threads=1,
    )
    session = prepare(described, None, None)
    ends, engine = [], Counting()
    for way in (Vectorized(CPU, 64), engine):
        training = replace(session.training, engine=way)
        with torch.no_grad():
            ends.append([closed.server for closed in training.rounds(session.server, 0, 2)])
    for a, b in zip(*map(tree.tensors, ends), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert engine.served >= 2 * 10


def test_most_steps_are_replayed() -> None:
    """One chunk of one width: 4 passes over 25 examples in batches of 5 are 20 steps, the first two plain."""
    engine = Counting()
    training, server = federation(catalog.build("fedavg", {"local": LOCAL}), engine, (25, 25), 2)
    with torch.no_grad():
        next(training.rounds(server, 0, 1))
    assert (engine.steps, engine.recorded, engine.replayed) == (20, 1, 20 - PLAIN)


def test_a_loop_that_is_differentiated_is_left_alone() -> None:
    """MAML takes a gradient through its inner loop, which a recording would not have."""
    engine = Counting()
    trained(catalog.build("maml", {"local": {"steps": 6}}), engine)
    plain = trained(catalog.build("maml", {"local": {"steps": 6}}), Vectorized(CPU, 64))
    assert tree.tensors(plain)[0].isfinite().all()


def test_a_full_batch_is_another_program_than_a_padded_one() -> None:
    padded = Batch(torch.ones(2, 3), torch.zeros(2), torch.ones(2), None, torch.zeros(()))
    assert _kind(padded) != _kind(padded._replace(full=True))
    assert _kind(padded) != _kind(padded._replace(live=torch.tensor(True)))
    assert _kind(padded) == _kind(padded._replace(x=torch.zeros(2, 3)))


def test_a_carry_that_is_handed_on_is_not_read_after_it_is_written_over() -> None:
    """w, before ← w + x, w: each step's `before` is the w of the step before."""
    batches = [
        Batch(torch.full((), float(k)), torch.zeros(()), torch.ones(()), None, torch.zeros(()))
        for k in range(6)
    ]

    def step(carry: tuple[torch.Tensor, torch.Tensor], batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        return carry[0] + batch.x, carry[0]

    start = torch.zeros(()), torch.zeros(())
    w, before = Stepwise(lambda action: action, under=0)(step, start, batches)
    assert (w.item(), before.item()) == (15.0, 10.0)
