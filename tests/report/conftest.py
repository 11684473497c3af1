"""Run folders made by hand, so that the numbers a report must show are known beforehand."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

Rows = Sequence[Sequence[object]]


def write_csv(path: Path, header: str, rows: Rows) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(header.split(","))
        writer.writerows(rows)


def toml(experiment: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    lines = [f"{name} = {json.dumps(value)}" for name, value in experiment.items()]
    return "\n".join([*lines, "[settings]", *(f"{n} = {json.dumps(v)}" for n, v in settings.items()), ""])


ROUND_COLUMNS = ["round", "replies", "skipped", "bytes_up", "bytes_down"]
for _group in ("seen", "unseen"):
    for _score in ("initial", "personalized"):
        ROUND_COLUMNS += [f"{_group}_{_score}_{part}" for part in ("mean", "weighted", "std", "worst10")]
    ROUND_COLUMNS.append(f"{_group}_harmed")
ROUND_COLUMNS.append("seconds")


def group(initial: float, personalized: float, worst10: float = 0.5, harmed: float = 0.0) -> dict[str, float]:
    """A group of clients as summary.json tells of it."""
    return {
        "initial": initial,
        "personalized": personalized,
        "personalized_worst10": worst10,
        "harmed": harmed,
    }


def make(
    folder: Path,
    *,
    method: str = "fedavg",
    seed: int = 0,
    rounds: Sequence[Mapping[str, object]] = (),
    clients: Rows = (),
    partition: Rows = (),
    labels: Rows = (),
    adaptation: Rows = (),
    also: Mapping[str, Any] | None = None,
    seen: tuple[float, ...] = (0.5, 0.75),
    unseen: tuple[float, ...] | None = None,
    bytes_up: int = 1000,
    seconds: float = 10.0,
    finished: bool = True,
    settings: Mapping[str, Any] | None = None,
    **experiment: Any,
) -> Path:
    """A run folder. `rounds` name only the columns they fill; `seen`, `unseen`: see `group`.

    `adaptation`: (along, amount, personalized mean). `also`: as summary.json has it.
    """
    folder.mkdir(parents=True)
    described = {"method": method, "data": "digits", "rounds": 4, "seed": seed} | experiment
    (folder / "experiment.toml").write_text(toml(described, settings or {}), encoding="utf-8")
    columns = list(dict.fromkeys([*ROUND_COLUMNS, *(name for row in rounds for name in row)]))
    rows = [[row.get(name, "") for name in columns] for row in rounds]
    write_csv(folder / "rounds.csv", ",".join(columns), rows)
    write_csv(folder / "partition.csv", "client,name,seen,split,label,count", partition)
    if labels:
        write_csv(folder / "labels.csv", "round,label,count", labels)
    if adaptation:
        header = "along,amount,clients,personalized_mean,personalized_std,personalized_worst10"
        points = [[along, amount, 6, mean, 0.1, 0.2] for along, amount, mean in adaptation]
        write_csv(folder / "adaptation.csv", header, points)
    if finished:
        write_csv(
            folder / "clients.csv", "client,seen,test,metric,n_train,n_test,initial,personalized", clients
        )
        summary = {
            "method": method,
            "seed": seed,
            "engine": "sequential",
            "device": "cpu",
            "rounds": 4,
            "seconds": seconds,
            "bytes_up": bytes_up,
            "bytes_down": 2 * bytes_up,
            "metric": "accuracy",
            "seen": group(*seen),
            "unseen": group(*unseen) if unseen else None,
            "also": also or {},
        }
        (folder / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    return folder


@pytest.fixture
def fake(tmp_path: Path) -> Callable[..., Path]:
    """Make a run folder of a given name under tmp_path."""
    return lambda name, **what: make(tmp_path / name, **what)
