"""The ledger: a line for each run of a reproduced table, and for each search, with all to make it again."""

from __future__ import annotations

import fcntl
import json
import platform
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from apiece.choice import pick_device
from apiece.errors import ApieceError


class Entry(NamedTuple):
    table: str
    row: str
    column: str
    scale: str
    seed: int
    numbers: Mapping[str, float]
    curves: Mapping[str, Sequence[tuple[float, float]]]
    seconds: float  # of training and scoring; of replicas trained together, the run's share
    experiment: Mapping[str, Any]
    commit: str
    when: str
    hardware: str
    versions: Mapping[str, str]
    paths: Mapping[str, Sequence[tuple[float, float]]] = {}


class Searched(NamedTuple):
    """A search for one row's settings under one column: what was tried, and what was best."""

    table: str
    row: str
    column: str
    scale: str
    plan: str  # a hash of what was searched, and with which effort
    rounds: int  # of a trial
    validation: float  # the share of the training examples that judged
    score: str  # which score of theirs
    settings: Mapping[str, Any]  # of the best trial, as for `--set`; none: the row's own
    trials: Sequence[Mapping[str, Any]]  # number, settings, score (None: diverged), seconds
    commit: str
    when: str
    hardware: str
    versions: Mapping[str, str]


Line = TypeVar("Line", Entry, Searched)


def read(path: Path) -> list[Entry]:
    return _lines(path, Entry)


def read_searches(path: Path) -> list[Searched]:
    return _lines(path, Searched)


def _lines(path: Path, kind: type[Line]) -> list[Line]:
    if not path.exists():
        return []
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            found.append(kind(**json.loads(line)))
        except (TypeError, ValueError) as error:
            raise ApieceError(f"{path}, line {number} is no line of a ledger: {error}") from error
    return found


def append(path: Path, entries: Sequence[Entry | Searched]) -> None:
    """Add lines; several processes may."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.writelines(json.dumps(entry._asdict(), ensure_ascii=False) + "\n" for entry in entries)


def provenance(checkout: Path, device: str) -> dict[str, Any]:
    """Where and when numbers come from: commit, date, hardware, versions."""
    return {
        "commit": _commit(checkout),
        "when": datetime.now(UTC).strftime("%Y-%m-%d"),
        "hardware": _hardware(device),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": version("numpy"),
        },
    }


def _commit(checkout: Path) -> str:
    """The commit of a checkout, with a + where what makes the numbers differs; empty outside of one."""

    def git(*words: str) -> str:
        asked = ["git", "-C", str(checkout), *words]
        return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()

    changed = git("status", "--porcelain", "-uno", "--", ".", ":/src")
    return git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")


def _hardware(device: str) -> str:
    place = pick_device(device)
    if place.type == "cuda":
        return torch.cuda.get_device_name(place)
    names = [line for line in _cpu_facts() if line.startswith("model name")]
    name = names[0].partition(":")[2].strip() if names else platform.machine()
    return f"{name}, {torch.get_num_threads()} threads"


def _cpu_facts() -> list[str]:
    facts = Path("/proc/cpuinfo")
    return facts.read_text().splitlines() if facts.exists() else []
