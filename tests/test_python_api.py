"""Apiece from Python, as the README shows it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import apiece
from apiece import deploy
from apiece.data.federated import Examples
from tests.command import interrupted, strict, table

SMALL = {"clients": 8, "cohort": 3, "rounds": 2, "engine": "vectorized", "threads": 1, "checkpoint_every": 1}


@pytest.fixture
def examples() -> Examples:
    """Forty examples of four clients with a class that does not occur."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=(40, 3))
    return apiece.from_arrays(x, (x[:, 0] > 0).astype(int), np.arange(40) % 4, classes=3)


def test_the_readmes_lines(tmp_path: Path) -> None:
    result = apiece.run(apiece.Experiment(method="fedavg", **SMALL), out=tmp_path / "runs" / "first")  # type: ignore[arg-type]
    score = result.summary["unseen"]["personalized"]
    model = result.model(client=7)
    with pytest.raises(apiece.ApieceError, match="no client 99: ids are 0 to 7"):
        result.model(client=99)

    assert 0.0 <= score <= 1.0
    assert strict((tmp_path / "runs" / "first" / "summary.json").read_text()) == result.summary
    rows = [row for row in table(tmp_path / "runs" / "first" / "clients.csv") if row["metric"] == "accuracy"]
    assert score == pytest.approx(np.mean([float(row["personalized"]) for row in rows if row["seen"] == "0"]))
    assert result.pairs["accuracy"].personalized.tolist() == [float(row["personalized"]) for row in rows]
    deploy.export(tmp_path / "runs" / "first", "7", tmp_path / "seven.safetensors")
    from safetensors.torch import load_file

    exported = load_file(tmp_path / "seven.safetensors")
    assert exported.keys() == dict(model).keys()
    for name, value in exported.items():
        torch.testing.assert_close(value, model[name])


def test_without_a_folder_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    seen: list[int] = []
    result = apiece.run(
        apiece.Experiment(model="logistic", **SMALL),  # type: ignore[arg-type]
        progress=lambda done, scores: seen.append(done),
    )
    assert result.summary["rounds"] == 2
    assert seen == [0, 1, 2]
    assert list(tmp_path.iterdir()) == []


def test_arrays_in_memory(examples: Examples) -> None:
    experiment = apiece.Experiment(model="logistic", rounds=2, cohort=2, engine="vectorized", threads=1)
    result = apiece.run(experiment, data=examples)
    assert result.summary["seen"]["clients"] + result.summary["unseen"]["clients"] == 4
    assert [tuple(t.shape) for t in result.model(client=0).values() if t.dim() == 2] == [(3, 3)]


@pytest.mark.parametrize("labels", ["numbers", "words"])
def test_arrays_are_kept_in_the_folder_so_that_the_run_can_go_on(
    examples: Examples, tmp_path: Path, labels: str
) -> None:
    if labels == "words":
        words = np.array(["no", "yes"])[examples.y]
        examples = apiece.from_arrays(examples.x, words, [f"client {i}" for i in examples.client])  # type: ignore[union-attr]
    experiment = apiece.Experiment(
        model="logistic",
        rounds=2,
        cohort=2,
        engine="vectorized",
        threads=1,
        checkpoint_every=1,
        client_column="hospital",
    )
    folder = tmp_path / "run"
    with_folder = apiece.run(experiment, out=folder, data=examples)
    in_memory = apiece.run(experiment, data=examples)
    assert with_folder.summary["seen"] == in_memory.summary["seen"]
    with np.load(folder / "data.npz", allow_pickle=False) as saved:
        assert np.array_equal(saved["x"], examples.x)

    copy = interrupted(folder, tmp_path / "copy")
    resumed = apiece.resume(copy)
    assert resumed.summary["unseen"] == with_folder.summary["unseen"]
    assert (copy / "clients.csv").read_bytes() == (folder / "clients.csv").read_bytes()
    assert deploy.export(folder, "1", tmp_path / "m").round == 2


def test_what_cannot_be_saved_is_refused_before_round_0(examples: Examples, tmp_path: Path) -> None:
    strange = Examples(examples.x, examples.y, 3, examples.label_names)
    experiment = apiece.Experiment(
        model="logistic", partition="iid", rounds=1, cohort=1, clients=4, threads=1, engine="vectorized"
    )
    with pytest.raises(apiece.ApieceError, match="only examples that from_arrays made can be saved"):
        apiece.run(experiment, out=tmp_path / "run", data=strange)
    assert not (tmp_path / "run").exists()


def test_a_folder_is_free_again_after_a_mistake(tmp_path: Path) -> None:
    """In a notebook the process goes on: neither a lock nor an empty folder may stay behind."""
    folder = tmp_path / "run"
    for mistake in ({"method": "fedavgg"}, {"cohort": 100}, {"data": "digit"}):
        with pytest.raises(apiece.ApieceError):
            apiece.run(apiece.Experiment(**{**SMALL, **mistake}), out=folder)  # type: ignore[arg-type]
        assert not folder.exists()

    def stop(done: int, scores: object) -> None:
        if done == 1:
            raise KeyboardInterrupt

    experiment = apiece.Experiment(model="logistic", **SMALL)  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        apiece.run(experiment, out=folder, progress=stop)
    assert apiece.resume(folder).summary["rounds"] == 2


def test_experiments_are_checked() -> None:
    for key, value in (("rounds", 0), ("engine", "fast"), ("on_nan", "ignore")):
        with pytest.raises(apiece.ApieceError, match=key):
            apiece.Experiment(**{key: value})  # type: ignore[arg-type]


def test_importing_is_light() -> None:
    heavy = ("typer", "rich", "matplotlib", "sklearn", "pandas", "pyarrow", "tomlkit")
    code = f"import sys, apiece; print([name for name in {heavy} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"


def test_a_result_is_a_line() -> None:
    result = apiece.run(apiece.Experiment(rounds=1, clients=8, cohort=3, model="logistic", threads=1))
    assert re.fullmatch(
        r"<fedavg after 1 rounds, seen [\d.]+ → [\d.]+ %, unseen [\d.]+ → [\d.]+ %>", repr(result)
    )
