"""Clients whose examples are copied to the device when they are asked for, against resident ones."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from apiece import Experiment, Recipe, Task, resume, run, tree
from apiece import data as datasets
from apiece.adaptation import curves
from apiece.data import streamed as module
from apiece.data.arena import Arena
from apiece.data.federated import Clients, Examples, Federated, federate, resident
from apiece.data.streamed import Streamed, fits, streamed
from apiece.engines import capture
from apiece.engines.base import Call, Engine
from apiece.engines.capture import LANES, Captured
from apiece.engines.processes import Processes, obstacle
from apiece.engines.sequential import Sequential
from apiece.engines.vectorized import Vectorized
from apiece.errors import ApieceError
from apiece.evaluate import evaluate
from apiece.method import Method
from apiece.methods.fedec import FedEC
from apiece.prepare import fingerprint, load_data, prepare
from apiece.sample import SAMPLERS
from apiece.session import Result, carry_out
from apiece.store import Store
from apiece.train import Closed, Training, assemble, together
from apiece.tree import Tree
from tests.worlds import CPU, ROOT, dropout_net

SIZES = (0, 1, 4, 9, 17, 25, 25, 40, 12, 3)
METHOD = FedEC(local=Recipe(lr=0.1, batch_size=5, epochs=2))
KEPT = Experiment(
    model="logistic", rounds=4, cohort=5, checkpoint_every=1, engine="sequential", device="cpu", threads=1
)


def ragged(sizes: tuple[int, ...] = SIZES, unseen: float = 0.2) -> Federated:
    """Rows lie scattered, as they do in data that was dealt out."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=(sum(sizes), 5)).astype(np.float32)
    y = (x @ draw.normal(size=(5, 3))).argmax(1)
    rows = draw.permutation(sum(sizes))
    parts = [rows[a:b] for a, b in pairwise(np.cumsum((0, *sizes)))]
    names = [str(i) for i in range(len(sizes))]
    return federate(Examples(x, y, 3, ("a", "b", "c")), parts, names, key=0, unseen=unseen)


def of(data: Federated, position: int) -> list[torch.Tensor]:
    """One client's training and test examples."""
    rows = (data.train[position], data.test[position])
    return [leaf[torch.from_numpy(part)] for part in rows for leaf in (*tree.leaves(data.x), data.y)]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# --- What is brought to the device ----------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 9), min_size=2, max_size=9),
    st.lists(st.lists(st.integers(0, 8), min_size=1, max_size=12), min_size=1, max_size=4),
    st.booleans(),
)
def test_every_clients_examples_are_its_own(
    sizes: list[int], asked: list[list[int]], in_an_arena: bool
) -> None:
    """Whoever else is asked for, twice or after others; inputs are two arrays and labels are many."""
    rows = np.random.default_rng(len(sizes)).permutation(sum(sizes))
    parts = [rows[a:b] for a, b in pairwise(np.cumsum((0, *sizes)))]
    count = np.arange(1, sum(sizes) + 1)
    x = {"u": np.stack([count, -count], 1).astype(np.float32), "v": (count % 251).astype(np.uint8)}
    examples = Examples(x, np.stack([count % 2, (count + 1) % 3], 1), 3, ("a", "b", "c"))
    whole = federate(examples, parts, [str(i) for i in range(len(sizes))], key=1, unseen=0.0)
    population, arena = streamed(whole, CPU), Arena() if in_an_arena else None
    for ids in ([client % len(sizes) for client in some] for some in asked):
        held = population.brought(whole.take(ids), arena)
        assert held.lasting == in_an_arena
        assert held.names == tuple(str(client) for client in ids)
        for at, client in enumerate(ids):
            assert same(of(held, at), of(whole, client))
            assert held.counts(held.train[at]).tolist() == whole.counts(whole.train[client]).tolist()
        for leaf in (*tree.leaves(held.x), held.y):
            assert not leaf[held.padding].any()
        used = np.concatenate([held.train.rows, held.test.rows])
        assert held.padding not in used


def test_it_is_the_population_that_the_host_keeps() -> None:
    whole = ragged()
    population = streamed(whole, CPU)
    assert isinstance(population, Streamed)
    assert (population.population, population.examples) == (whole.population, whole.examples)
    assert tuple(population.names) == whole.names
    assert population.seen_ids.tolist() == whole.seen_ids.tolist()
    assert population.input_shape == whole.input_shape
    for mine, theirs in zip(population.sizes([3, 7]), whole.sizes([3, 7]), strict=True):
        assert mine.tolist() == theirs.tolist()
    assert population.to(CPU) is population
    assert datasets.partition_table(population) == datasets.partition_table(whole)
    assert fingerprint(population) == fingerprint(whole)
    assert fingerprint(streamed(replace(whole, y=whole.y.roll(1)), CPU)) != fingerprint(whole)


def test_no_more_is_on_the_device_than_who_is_asked_for() -> None:
    """The row of padding of all; a cohort's rows and one; in an arena less than twice as many."""
    whole = ragged((400, *SIZES))
    population, arena = streamed(whole, CPU), Arena()
    assert len(population.y) == len(population.x) == 1
    for ids in ([3, 4], [7], [1, 2, 3]):
        rows = sum(SIZES[client - 1] for client in ids)
        held = population.take(ids)
        assert len(held.y) == len(held.x) == rows + 1
        assert rows < len(Arena().filled((whole.x, whole.y), np.arange(rows), CPU)[1]) <= 2 * rows
    most = max(len(population.brought(whole.take(ids), arena).y) for ids in ([3, 4], [7], [1, 2, 3]))
    assert most == 32 + 1  # the largest of them has 25 rows


def test_an_arena_stays_where_it_is_until_it_is_too_small() -> None:
    x, y = torch.arange(1.0, 41).reshape(20, 2), torch.arange(1, 21)
    arena = Arena()
    first = arena.filled((x, y), np.arange(5), CPU)
    assert len(first[1]) == 8 + 1
    again = arena.filled((x, y), np.array([19, 3]), CPU)
    assert again[0] is first[0]
    assert again[1] is first[1]
    assert again[1][:2].tolist() == [20, 4]
    full = arena.filled((x, y), np.arange(8), CPU)
    assert full[1] is first[1]
    assert full[1].tolist() == [*range(1, 9), 0]
    larger = arena.filled((x, y), np.arange(9), CPU)
    assert larger[1] is not first[1]
    assert len(larger[1]) == 16 + 1
    others = arena.filled((x.double(), y), np.arange(3), CPU)
    assert others[0].dtype == torch.float64
    assert arena.filled((x, y), np.arange(2), CPU)[0] is larger[0]


# --- In rounds ------------------------------------------------------------------------------------------


class Late(Sequential):
    """Computes a chunk as late as a GPU may: when as many others as it has lanes have been made ready."""

    under_way: ClassVar[int] = LANES

    def answers(self, calls: Iterable[Call]) -> Iterator[Tree]:
        waiting: deque[Call] = deque()
        for call in calls:
            waiting.append(call)
            if len(waiting) == LANES:
                yield from super().answers([waiting.popleft()])
        yield from super().answers(waiting)


ENGINES: dict[str, Callable[[], Engine]] = {
    "sequential": lambda: Sequential(CPU),
    "vectorized": lambda: Vectorized(CPU, 3),
    "late": lambda: Late(CPU),
}
if not obstacle(CPU):
    ENGINES["processes"] = lambda: Processes(CPU, 2)


def training(
    data: Clients, engine: Engine, sampler: str = "uniform", method: Method = METHOD, root: int = ROOT
) -> Training:
    task = Task(dropout_net, device=engine.device)
    start = tree.to(Task(dropout_net).init(1), engine.device)

    def store(state: Tree) -> Store:
        return Store(state, data.population, engine.device, None, mapped=False)

    return assemble(engine, method, task, start, data, 6, root, SAMPLERS[sampler], store)[0]


def ends(play: Training, rounds: int = 5) -> tuple[list[Closed], Tree]:
    """The rounds, evaluations of everybody between them, and nobody of one in the memory of the other."""
    server = play.federation.method.init(play.federation.task, play.federation.start, 0)
    everyone = list(range(play.federation.data.population))
    closed: list[Closed] = []
    scores = []
    with torch.no_grad():
        for done in play.rounds(server, 0, rounds):
            closed.append(done)
            broadcast = play.broadcast(done.server, done.round.index + 1)
            scores.append(evaluate(play.engine, play.federation, broadcast, everyone, done.round.index + 1))
    return closed, scores


def same_bits(ours: tuple[list[Closed], Tree], theirs: tuple[list[Closed], Tree]) -> None:
    for a, b in zip(ours[0], theirs[0], strict=True):
        assert a.ids == b.ids
        assert a.labels.tolist() == b.labels.tolist()
        mine, others = tree.flatten(a.server), tree.flatten(b.server)
        assert all(torch.equal(leaf, others[path]) for path, leaf in mine.items())
    for mine, others in zip(ours[1], theirs[1], strict=True):
        for name, pair in mine.items():
            np.testing.assert_array_equal(pair, others[name])


@pytest.mark.parametrize("name", ENGINES)
def test_rounds_and_scores_have_the_bits_of_resident_clients(name: str) -> None:
    """Ragged clients with states, and dropout; an arena that is too small is left for a larger one."""
    whole = ragged()
    ours = ends(training(streamed(whole, CPU), ENGINES[name]()))
    same_bits(ours, ends(training(whole, ENGINES[name]())))


@pytest.mark.parametrize("sampler", ["client_drift", "period_drift", "no_drift"])
def test_samplers_that_deal_rows_anew_see_all_of_them(sampler: str) -> None:
    whole = ragged()
    ours = ends(training(streamed(whole, CPU), Vectorized(CPU, 3), sampler))
    same_bits(ours, ends(training(whole, Vectorized(CPU, 3), sampler)))


def test_cohorts_of_replicas_do_not_lie_in_each_others_place() -> None:
    """Both are open before one is computed; each run has the bits of it alone, on resident data."""
    whole, engine, roots = ragged(), Sequential(CPU), (ROOT, ROOT + 1)
    population = streamed(whole, CPU)
    plays = [training(population, engine, root=root) for root in roots]
    start = METHOD.init(plays[0].federation.task, plays[0].federation.start, 0)
    with torch.no_grad():
        found = list(together(plays, [start, start], 0, 4))
        for at, root in enumerate(roots):
            alone = list(training(whole, engine, root=root).rounds(start, 0, 4))
            same_bits(([closed[at] for closed in found], []), (alone, []))


# --- As a run -------------------------------------------------------------------------------------------


def carried_out(experiment: Experiment, data: Clients) -> Result:
    session = prepare(experiment, None, None, dealt=data)
    return carry_out(session, lambda done, scores: None)[0]


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_a_run_is_that_of_resident_data(engine: str) -> None:
    experiment = replace(KEPT, method="scaffold", engine=engine)
    whole = load_data(experiment)
    assert isinstance(whole, Federated)
    ours, theirs = carried_out(experiment, streamed(whole, CPU)), carried_out(experiment, whole)
    assert ours.session.choice.streamed
    assert "stay in the host's memory" in ours.session.choice.reason
    assert not theirs.session.choice.streamed
    assert ours.session.choice.data == theirs.session.choice.data
    same_bits(([], [ours.pairs]), ([], [theirs.pairs]))
    server = tree.flatten(theirs.server)
    assert all(torch.equal(leaf, server[path]) for path, leaf in tree.flatten(ours.server).items())


def test_the_engine_is_measured_on_it() -> None:
    experiment = replace(KEPT, engine="auto", processes=1, rounds=1)
    whole = load_data(experiment)
    assert isinstance(whole, Federated)
    session = prepare(experiment, None, None, dealt=streamed(whole, CPU))
    assert "one batch of at most" in session.choice.reason


def test_a_proxy_set_is_copied_once() -> None:
    experiment = replace(KEPT, method="fedmeta_proxy", proxy=0.1)
    whole = load_data(experiment)
    assert isinstance(whole, Federated)
    ours, theirs = carried_out(experiment, streamed(whole, CPU)), carried_out(experiment, whole)
    proxy = ours.session.federation.task.proxy
    assert proxy is not None
    examples = proxy.all()
    rows = torch.from_numpy(whole.proxy)
    assert torch.equal(examples.x, whole.x[rows])
    assert torch.equal(examples.y, whole.y[rows])
    assert len(proxy._x) == len(rows) + 1
    same_bits(([], [ours.pairs]), ([], [theirs.pairs]))


class Stop(Exception):  # noqa: N818
    """Ends a run between two rounds."""


@pytest.mark.parametrize("streams", [True, False, None])
def test_a_run_goes_on_as_it_is_recorded(streams: bool | None, tmp_path: Path) -> None:
    """Streamed or resident, and resident where an older version said nothing: the same files."""

    def stop(done: int, scores: object) -> None:
        if done == 2:
            raise Stop

    whole = run(KEPT, tmp_path / "whole")
    with pytest.raises(Stop):
        run(KEPT, tmp_path / "run", stop)
    file = tmp_path / "run" / "engine.json"
    choice = json.loads(file.read_text())
    assert choice.pop("streamed") is False
    file.write_text(json.dumps(choice if streams is None else {**choice, "streamed": streams}))
    rest = resume(tmp_path / "run")
    assert isinstance(rest.session.federation.data, Streamed if streams else Federated)
    for name in ("clients.csv", "cohorts.csv", "labels.csv", "model/initial.safetensors"):
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert rest.summary["seen"] == whole.summary["seen"]


def test_what_needs_all_examples_on_the_device_says_so() -> None:
    whole = load_data(KEPT)
    assert isinstance(whole, Federated)
    population = streamed(whole, CPU)
    told = "needs every client's examples on the device at once, .* use --device cpu"
    with pytest.raises(ApieceError, match=f"tuning {told}"):
        resident(population, "tuning")
    with pytest.raises(ApieceError, match=f"--method centralized {told}"):
        prepare(replace(KEPT, method="centralized"), None, None, dealt=population)
    session = prepare(KEPT, None, None, dealt=population)
    with pytest.raises(ApieceError, match=f"an adaptation curve {told}"):
        curves(session, session.server, 0)


def test_examples_fit_that_leave_half_of_the_free_memory() -> None:
    assert fits(50, 100)
    assert not fits(51, 100)
    assert fits(0, 0)


# --- On CUDA --------------------------------------------------------------------------------------------


cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@cuda
@pytest.mark.parametrize("long", [1000, 6], ids=["whole programs", "single steps"])
def test_a_streamed_round_replays_its_graphs(long: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All are scored after every round, on three lanes; the CPU's numbers to 1e-5, and few recordings."""
    monkeypatch.setattr(capture, "LONG", long)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    whole = ragged(SIZES * 6)
    device = torch.device("cuda")
    engine = Captured(device, 4)
    play = training(streamed(whole, device), engine)
    ours = ends(play, 8)
    met = engine.captures
    play.federation.store.forget()
    again = ends(play, 8)
    theirs = ends(training(whole, Sequential(CPU)), 8)
    for found in (ours, again):
        for a, b in zip(found[0], theirs[0], strict=True):
            expected = tree.flatten(b.server)
            for path, leaf in tree.flatten(a.server).items():
                torch.testing.assert_close(leaf.cpu(), expected[path], rtol=1e-5, atol=1e-5)
        for mine, others in zip(found[1], theirs[1], strict=True):
            np.testing.assert_allclose(mine["loss"], others["loss"], rtol=1e-4, atol=1e-5)
    if long > 6:
        assert met > 0
        # The same cohorts again: what is recorded now was met once only, or went down another lane.
        assert engine.captures - met <= met


@cuda
def test_what_does_not_fit_is_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where resident examples may take no memory, none do, but for a pool, which is needed whole."""
    experiment = replace(KEPT, engine="vectorized", device="cuda", precision="fp32")
    whole = load_data(experiment)
    assert isinstance(whole, Federated)
    held = streamed(whole, torch.device("cuda")).take([3, 1])
    assert held.y.device.type == "cuda"
    host = replace(held, x=held.x.cpu(), y=held.y.cpu())
    assert same(of(host, 0), of(whole, 3))
    assert same(of(host, 1), of(whole, 1))
    theirs = run(experiment)
    assert not theirs.session.choice.streamed
    monkeypatch.setattr(module, "SHARE", 0.0)
    ours = run(experiment)
    assert ours.session.choice.streamed
    assert ours.session.choice.chunk == theirs.session.choice.chunk
    assert not run(replace(experiment, method="centralized")).session.choice.streamed
    np.testing.assert_allclose(ours.pairs["loss"], theirs.pairs["loss"], rtol=1e-4, atol=1e-5)
