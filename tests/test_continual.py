import json
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

from apiece import ApieceError, Experiment, run
from apiece.continual import plan
from apiece.session import run_or_resume

TASKS = ["digits[0-4]", "digits[5-9]"]
BASE = Experiment(
    rounds=3,
    clients=12,
    cohort=4,
    partition="classes:2",
    evaluate_every=3,
    engine="vectorized",
    threads=1,
    settings={"epochs": 2},
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("continual")
    admm = replace(BASE, method="admm_fedmeta", settings={"lam": 0.5, "rho": 0.1, "lr": 0.1})
    for step in plan([BASE, admm], BASE, TASKS, place, lambda name: name):
        run_or_resume(step.experiment, step.folder, lambda done, scores: None)
    return place


def scores(folder: Path, name: str) -> dict[str, object]:
    return json.loads((folder / name / "summary.json").read_text())


def test_a_later_task_starts_from_the_earlier_ones_model(folder: Path) -> None:
    """Before its first round, the second run's scores on the first task are the first run's last ones."""
    first = scores(folder, "first-s0")
    header, row = (
        line.split(",") for line in (folder / "fedavg-s0-task2/rounds.csv").read_text().splitlines()[:2]
    )
    begun = dict(zip(header, row, strict=True))
    for group in ("seen", "unseen"):
        at_once = float(begun[f"digits[0-4] {group}_initial_mean"])
        assert at_once == pytest.approx(first[group]["initial"], abs=1e-9)  # type: ignore[index]


def test_every_run_is_scored_on_the_clients_of_all_tasks(folder: Path) -> None:
    for name, other in (
        ("first-s0", TASKS[1]),
        ("fedavg-s0-task2", TASKS[0]),
        ("admm_fedmeta-s0-task2", TASKS[0]),
    ):
        assert list(scores(folder, name)["also"]) == [other]  # type: ignore[call-overload]
        tests = {line.split(",")[2] for line in (folder / name / "clients.csv").read_text().splitlines()[1:]}
        assert tests == {"test", other}


def test_the_prior_reaches_the_method(folder: Path) -> None:
    """With a huge λ and the exact proximal step, ADMM's model stays where its prior is."""
    prior = load_file(folder / "first-s0/model/initial.safetensors")
    held = replace(
        BASE,
        method="admm_fedmeta",
        data=TASKS[1],
        start=str(folder / "first-s0"),
        prior=str(folder / "first-s0"),
        settings={"lam": 1e6, "exact": True},
    )
    params = run(held).server.params
    for name, p in prior.items():
        assert (params[name] - p).abs().max() < 1e-3 * p.abs().max()


def test_a_model_that_does_not_fit_is_refused(folder: Path) -> None:
    with pytest.raises(ApieceError, match="is another one"):
        run(replace(BASE, model="logistic", start=str(folder / "first-s0")))
    with pytest.raises(ApieceError, match=r"cannot read a model from .*Is the run finished"):
        run(replace(BASE, prior=str(folder)))


def test_three_tasks_chain() -> None:
    steps = plan([BASE], BASE, ["a", "b", "c"], Path("out"), lambda name: name)
    assert [str(step.folder) for step in steps] == [
        "out/first-s0",
        "out/fedavg-s0-task2",
        "out/fedavg-s0-task3",
    ]
    assert [step.experiment.start for step in steps] == ["", "out/first-s0", "out/fedavg-s0-task2"]
    assert [step.experiment.also for step in steps] == [("b", "c"), ("a", "c"), ("a", "b")]
    assert [step.last for step in steps] == [True, False, True]
