"""Runs over a population that is not in memory, and runs that score some of their clients."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from benchmarks import population

from apiece import ApieceError, Experiment, resume, run
from apiece.data import synthetic
from tests.command import apiece, strict, table

LAZY = (
    *("--data", "population(1,1,60)", "--clients", "100000", "--cohort", "5", "--evaluate-clients", "12"),
    *("--method", "fedec", "--model", "logistic", "--rounds", "2", "--store", "mapped"),
    *("--checkpoint-every", "1", "--engine", "vectorized", "--threads", "1"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("runs") / "lazy"
    outcome = apiece("run", *LAZY, "--out", str(place))
    assert outcome.code == 0, outcome.err
    return place


def test_files_tell_of_the_clients_that_are_scored(folder: Path) -> None:
    """Twelve of a hundred thousand, two of them unseen: a fifth, rounded."""
    clients = [row for row in table(folder / "clients.csv") if row["metric"] == "accuracy"]
    ids = [int(row["client"]) for row in clients]
    assert len(set(ids)) == 12
    assert [row["seen"] for row in clients].count("0") == 2
    held = table(folder / "partition.csv")
    assert sorted({int(row["client"]) for row in held}) == sorted(ids)
    for row in clients:
        for split in ("train", "test"):
            counts = [int(r["count"]) for r in held if (r["client"], r["split"]) == (row["client"], split)]
            assert sum(counts) == int(row[f"n_{split}"])
    summary = strict((folder / "summary.json").read_text())
    assert (summary["seen"]["clients"], summary["unseen"]["clients"]) == (10, 2)
    assert len({row["client"] for row in table(folder / "cohorts.csv")}) == 10


def test_one_of_the_others_can_be_exported(folder: Path, tmp_path: Path) -> None:
    outcome = apiece("export", str(folder), "--client", "99999", "-o", str(tmp_path / "one.safetensors"))
    assert outcome.code == 0, outcome.err
    assert "client 99999" in outcome.out
    missing = apiece("export", str(folder), "--client", "100000", "-o", str(tmp_path / "none.safetensors"))
    assert missing.code == 2
    assert "ids are 0 to 99999, names are 0, 1, 2, 3, 4, …" in " ".join(missing.err.split())


def test_the_report_reads_it(folder: Path, tmp_path: Path) -> None:
    assert apiece("report", str(folder), "-o", str(tmp_path / "page.html")).code == 0


@pytest.mark.parametrize(
    "flags",
    [("--method", "centralized"), ("--sampler", "period_drift"), ("--proxy", "0.1"), ("--method", "fedpa")],
    ids=" ".join,
)
def test_what_needs_everybody_is_refused_before_anything_is_written(
    flags: tuple[str, ...], tmp_path: Path
) -> None:
    outcome = apiece("run", *LAZY, *flags, "--out", str(tmp_path / "run"))
    assert outcome.code == 2
    assert "needs every client's examples in memory" in " ".join(outcome.err.split())
    assert not (tmp_path / "run").exists()


def test_curves_are_refused(folder: Path) -> None:
    outcome = apiece("curves", str(folder))
    assert outcome.code == 2
    assert "an adaptation curve needs every client's examples" in " ".join(outcome.err.split())


class Stop(Exception):  # noqa: N818
    """Ends a run between two rounds."""


def test_a_population_that_is_made_differently_is_not_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(done: int, scores: object) -> None:
        if done == 1:
            raise Stop

    small = {"clients": 300, "cohort": 3, "rounds": 2, "evaluate_clients": 6, "model": "logistic"}
    experiment = Experiment(
        data="population(1,1,60)", engine="sequential", threads=1, checkpoint_every=1, **small
    )
    with pytest.raises(Stop):
        run(experiment, tmp_path / "run", stop)
    monkeypatch.setattr(synthetic, "_MEAN", 3.0)
    with pytest.raises(ApieceError, match="the data has changed"):
        resume(tmp_path / "run")
    monkeypatch.undo()
    assert resume(tmp_path / "run").summary["rounds"] == 2


def test_scores_of_some_are_those_of_all() -> None:
    """One client a chunk: the bits do not depend on who else is scored."""
    common = {"model": "logistic", "rounds": 1, "cohort": 3, "engine": "sequential", "threads": 1}
    whole, some = (run(Experiment(evaluate_clients=n, seed=n, **common)) for n in (0, 9))
    same_training = run(Experiment(evaluate_clients=9, seed=0, **common))
    assert whole.clients.tolist() == list(range(30))
    assert some.clients.tolist() == same_training.clients.tolist()
    assert len(some.clients) == 9
    for metric, pair in same_training.pairs.items():
        for found, of_all in zip(pair, whole.pairs[metric], strict=True):
            np.testing.assert_array_equal(found, of_all[same_training.clients])


def test_the_number_of_clients_to_score_is_checked() -> None:
    with pytest.raises(ApieceError, match="evaluate_clients must be at least 0"):
        Experiment(evaluate_clients=-1)


def test_the_benchmark_of_populations_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two small ones, each in its process; no time is asserted."""
    file = tmp_path / "population.json"
    sizes = ("--populations", "200", "2000", "--rounds", "7", "--repeat", "1")
    monkeypatch.setattr(sys, "argv", ["population", *sizes, "--json", str(file)])
    population.main()
    rows = json.loads(file.read_text())["populations"]
    assert [row["clients"] for row in rows] == [200, 2000]
    assert all(row["round_seconds"] > 0 and row["peak_mb"] > 0 for row in rows)
    assert {row["state_parameters"] for row in rows} == {10_022}
    assert rows[0]["ratios"] == dict.fromkeys(population.FIGURES, 1.0)
