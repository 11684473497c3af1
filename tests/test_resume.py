"""Real processes, real SIGKILL; the twenty of docs/reliability.md are made by `python -m tests.killing`."""

from pathlib import Path

import pytest

from apiece import Experiment, catalog, resume, run
from tests import killing
from tests.methods.test_registry import EVERY_METHOD


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An uninterrupted run for each kind of store."""
    place = tmp_path_factory.mktemp("whole")
    for store in ("memory", "mapped"):
        killing.run_and_resume(place / store, store)
    return {store: place / store for store in ("memory", "mapped")}


@pytest.mark.parametrize(
    ("store", "at"),
    [
        ("memory", {"line": 1680}),
        ("mapped", {"line": 2170}),
        ("mapped", {"seconds": 3.0}),
    ],
    ids=["memory-write", "mapped-write", "mapped-clock"],
)
def test_killed_and_resumed_is_as_if_never_interrupted(
    whole: dict[str, Path], tmp_path: Path, store: str, at: dict[str, float]
) -> None:
    killing.run_and_resume(tmp_path / "run", store, **at)  # type: ignore[arg-type]
    assert killing.differences(whole[store], tmp_path / "run") == []


def test_clients_that_are_made_when_asked_for_are_resumed_too(tmp_path: Path) -> None:
    """Killed in the second commit, while its rows are written."""
    killing.run_and_resume(tmp_path / "whole", "mapped", other=killing.LAZY)
    assert killing.run_and_resume(tmp_path / "killed", "mapped", line=2200, other=killing.LAZY)
    assert killing.differences(tmp_path / "whole", tmp_path / "killed") == []


def test_both_stores_end_with_the_same_scores(whole: dict[str, Path]) -> None:
    """And the comparison can fail: files that tell of the store differ."""
    names = killing.differences(whole["memory"], whole["mapped"])
    assert "engine.json" in names
    assert "clients.csv" not in names
    assert "rounds.csv" not in names


class Stop(Exception):  # noqa: N818
    """Stands for whatever ends a process between two rounds."""


@pytest.mark.parametrize("name", EVERY_METHOD)
def test_every_method_resumes_bit_for_bit(name: str, tmp_path: Path) -> None:
    """Interrupted after round 3, one round behind its last checkpoint; both stages of a staged method run."""
    settings = {"switch": 2} if "first" in catalog.settings_of(catalog.build(name, {})) else {}
    experiment = Experiment(
        method=name,
        settings=settings,
        model="mlp(hidden=8, norm=True)",
        clients=8,
        test=0.8,  # little to train on
        cohort=3,
        rounds=4,
        evaluate_every=2,
        checkpoint_every=2,
        engine="vectorized",
        threads=1,
    )
    run(experiment, tmp_path / "whole")

    def stop(done: int, scores: object) -> None:
        if done == 3:
            raise Stop

    with pytest.raises(Stop):
        run(experiment, tmp_path / "stopped", stop)
    assert not (tmp_path / "stopped" / "summary.json").exists()
    resume(tmp_path / "stopped")
    assert killing.differences(tmp_path / "whole", tmp_path / "stopped") == []
