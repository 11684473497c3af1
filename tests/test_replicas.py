"""Replicas that go together against each of them alone."""

import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from apiece import ApieceError, Experiment, Method, Recipe, resume, run, tree
from apiece.engines.base import Engine
from apiece.engines.capture import Captured
from apiece.engines.sequential import Sequential
from apiece.engines.vectorized import Vectorized
from apiece.method import Server
from apiece.methods.apfl_ewc import ApflEwc
from apiece.methods.fedavg import FedAvg
from apiece.methods.fedec import FedEC
from apiece.methods.l2gd import L2GD
from apiece.methods.scaffold import Scaffold
from apiece.random import fold
from apiece.session import run_or_resume_replicas, run_replicas
from apiece.store import Store
from apiece.train import Training, together
from apiece.tree import Tree
from tests import graphs
from tests.killing import differences
from tests.worlds import CPU, federation

SIZES = (7, 23, 0, 12, 4, 30)
SEEDS = (3, 11, 12)
LOCAL = Recipe(batch_size=5, epochs=2)


def replica(method: Method, engine: Engine, seed: int) -> tuple[Training, Server]:
    """A training with keys, a start and client states of its own; data and model are shared."""
    training, _ = federation(method, engine, SIZES, 4)
    f = training.federation
    start = f.task.init(seed)
    store = Store(f.store.template, f.data.population, CPU, None, mapped=False)
    own = replace(f, root=fold(seed, "apiece"), start=start, store=store, data=DATA, task=TASK)
    return replace(training, federation=own), method.init(TASK, start, 0)


TASK = federation(FedAvg(), Sequential(CPU), SIZES, 4)[0].federation.task
DATA = federation(FedAvg(), Sequential(CPU), SIZES, 4)[0].federation.data


def states(training: Training, server: Server) -> Tree:
    broadcast = training.broadcast(server, 5)
    return training.federation.states(Sequential(CPU), broadcast, range(len(SIZES)))


of_each_kind = pytest.mark.parametrize(
    "method",
    [
        FedAvg(local=LOCAL),
        FedEC(local=LOCAL),
        Scaffold(local=LOCAL),
        ApflEwc(local=LOCAL, z=1),
        L2GD(local=LOCAL, p=0.5),  # replicas toss coins of their own: their static fields differ
    ],
    ids=lambda method: type(method).__name__,
)


@of_each_kind
@pytest.mark.parametrize(
    "engine",
    [Sequential(CPU), Vectorized(CPU, 5), Vectorized(CPU, 64)],
    ids=["sequential", "fives", "vectorized"],
)
def test_each_replica_is_as_it_would_be_alone(method: Method, engine: Engine) -> None:
    as_alone(method, engine, engine)


@of_each_kind
def test_so_it_is_where_graphs_are_recorded(method: Method, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs.pretend(monkeypatch)
    engine = Captured(CPU, 64)
    as_alone(method, Sequential(CPU), engine)
    assert engine.captures > 0


def as_alone(method: Method, one_run: Engine, engine: Engine) -> None:
    with torch.no_grad():
        alone = []
        for seed in SEEDS:
            training, server = replica(method, one_run, seed)
            closed = list(training.rounds(server, 0, 5))
            alone.append((training, closed))
        side_by_side = [replica(method, engine, seed) for seed in SEEDS]
        trainings, servers = zip(*side_by_side, strict=True)
        rounds = list(together(trainings, servers, 0, 5))
        for at, (training, expected) in enumerate(alone):
            for one, row in zip(expected, rounds, strict=True):
                ours = row[at]
                assert (ours.round.key, ours.ids) == (one.round.key, one.ids)
                assert (ours.bytes_up, ours.bytes_down) == (one.bytes_up, one.bytes_down)
                assert ours.finite.tolist() == one.finite.tolist()
                assert_close((ours.server, ours.metrics), (one.server, one.metrics))
            assert_close(states(trainings[at], rounds[-1][at].server), states(training, expected[-1].server))


def assert_close(ours: Tree, theirs: Tree) -> None:
    """Within 1e-5 of the largest entry of each tensor."""
    for path, a in tree.flatten(ours).items():
        b = tree.flatten(theirs)[path]
        if isinstance(b, torch.Tensor) and b.numel() and b.is_floating_point():
            assert (a - b).abs().max() <= 1e-5 * b.abs().max().clamp(min=1e-3), path


def test_replicas_differ() -> None:
    with torch.no_grad():
        trainings, servers = zip(*(replica(FedAvg(), Vectorized(CPU, 64), s) for s in SEEDS), strict=True)
        (row,) = together(trainings, servers, 0, 1)
    assert len({one.ids for one in row}) > 1
    assert not torch.equal(*(one.server.params["0.weight"] for one in row[:2]))


def test_folders_are_those_of_separate_runs(tmp_path: Path) -> None:
    """Same cohorts and partition, models within 1e-5, scores within one test example; each is finished."""
    experiment = Experiment(
        method="fedec", clients=8, cohort=3, rounds=4, evaluate_every=2, engine="vectorized", threads=1
    )
    begin = time.perf_counter()
    run_replicas([(replace(experiment, seed=seed), tmp_path / f"together-{seed}") for seed in SEEDS])
    taken = time.perf_counter() - begin
    summaries = [json.loads((tmp_path / f"together-{seed}" / "summary.json").read_text()) for seed in SEEDS]
    assert 0 < sum(summary["seconds"] for summary in summaries) <= taken, "each one's is its share"
    for seed in SEEDS:
        run(replace(experiment, seed=seed), tmp_path / f"alone-{seed}")
        one, other = (tmp_path / f"{kind}-{seed}" for kind in ("together", "alone"))
        for name in ("experiment.toml", "cohorts.csv", "partition.csv"):
            assert (one / name).read_text() == (other / name).read_text()
        ours, theirs = (load_file(folder / "model" / "initial.safetensors") for folder in (one, other))
        assert_close(ours, theirs)
        files = {path.name for path in one.iterdir()}
        assert files == {path.name for path in other.iterdir()}
        scores = [json.loads((folder / "summary.json").read_text())["seen"] for folder in (one, other)]
        assert abs(scores[0]["personalized"] - scores[1]["personalized"]) < 0.01
        with pytest.raises(ApieceError, match="is finished"):
            resume(one)


INTERRUPTED = Experiment(
    clients=8, cohort=3, rounds=6, evaluate_every=2, checkpoint_every=2, engine="vectorized", threads=1
)


def interrupted(folder: Path, seeds: Sequence[int], at: int) -> list[tuple[Experiment, Path]]:
    """Replicas that are stopped when so many rounds are done; the last checkpoint is of an even number."""
    runs = [(replace(INTERRUPTED, seed=seed), folder / str(seed)) for seed in seeds]

    def stop(done: int, scores: object) -> None:
        if done == at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_replicas(runs, stop)
    return runs


def model(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model" / "initial.safetensors")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    run_replicas([(replace(INTERRUPTED, seed=seed), folder / str(seed)) for seed in SEEDS])
    return folder


def test_an_interrupted_replica_goes_on_alone(tmp_path: Path, whole: Path) -> None:
    (_, folder), *_ = interrupted(tmp_path, SEEDS, 3)
    resume(folder)
    assert_close(model(folder), model(whole / folder.name))


def test_interrupted_replicas_go_on_side_by_side(tmp_path: Path, whole: Path) -> None:
    """Rounds 2 to 6 are gone through once; files are those of replicas that were never interrupted."""
    runs = interrupted(tmp_path, SEEDS, 3)
    rounds: list[int] = []
    run_or_resume_replicas(runs, lambda done, scores: rounds.append(done))
    assert rounds == [2, 3, 4, 5, 6]
    for _, folder in runs:
        assert differences(folder, whole / folder.name) == []


def test_those_with_a_checkpoint_less_go_first(tmp_path: Path, whole: Path) -> None:
    runs = interrupted(tmp_path, SEEDS, 5)
    shutil.rmtree(tmp_path / str(SEEDS[1]) / "checkpoint" / "round-000004")
    run_or_resume_replicas(runs)
    for _, folder in runs:
        assert_close(model(folder), model(whole / folder.name))
        assert json.loads((folder / "summary.json").read_text())["rounds"] == 6


def test_another_experiment_is_refused_before_any_goes_on(tmp_path: Path) -> None:
    (first, one), (_, two), *_ = interrupted(tmp_path, SEEDS, 3)
    others = [(first, one), (replace(first, seed=SEEDS[1], settings={"lr": 0.2}), two)]
    with pytest.raises(ApieceError, match="holds another experiment"):
        run_or_resume_replicas(others)
    assert not any((folder / "summary.json").exists() for folder in (one, two))


def test_what_is_not_begun_is_run_side_by_side_too(tmp_path: Path, whole: Path) -> None:
    runs = interrupted(tmp_path, SEEDS[:1], 3)
    both = [*runs, *((replace(INTERRUPTED, seed=seed), tmp_path / str(seed)) for seed in SEEDS[1:])]
    rounds: list[int] = []
    run_or_resume_replicas(both, lambda done, scores: rounds.append(done))
    assert rounds == list(range(7))
    assert [(folder / "summary.json").exists() for _, folder in both] == [False, True, True]
    for _, folder in both[1:]:
        assert_close(model(folder), model(whole / folder.name))
