"""Real runs killed with SIGKILL, by the clock or between two lines of the code that writes, and resumed.

    python -m tests.killing --kills 20 --seed 0

runs one experiment whole, then kills and resumes it that many times, and compares every file.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

EXPERIMENT = [
    *("--method", "elastic(fedavg)", "--set", "inner.epochs=2", "--model", "mlp(hidden=32)"),
    *(
        "--clients",
        "12",
        "--cohort",
        "4",
        "--rounds",
        "9",
        "--checkpoint-every",
        "2",
        "--evaluate-every",
        "3",
    ),
    *("--engine", "vectorized", "--threads", "1"),
]
LAZY = ("--data", "population(1,1,60)", "--clients", "200", "--evaluate-clients", "20")
WRITERS = ("store.py", "checkpoint.py", "folder.py", "record.py")


def die_at_line(number: int, arguments: Sequence[str]) -> None:
    """Run apiece and kill this process before the `number`-th line that it executes in a writing module."""
    from apiece import cli

    left = number

    def trace(frame: Any, event: str, _: object) -> Any:
        nonlocal left
        if Path(frame.f_code.co_filename).name not in WRITERS:
            return None
        if event == "line":
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.argv = ["apiece", *arguments]
    sys.settrace(trace)
    cli.main()


def apiece(*arguments: str, line: int = 0, seconds: float = 0.0) -> int:
    """Run the command, killed at a line or after some seconds; its exit code, −9 if it was killed."""
    command = [sys.executable, "-m", "tests.killing", "--die-at", str(line), "--", *arguments]
    if not line:
        command = [sys.executable, "-c", "from apiece.cli import main; main()", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        _, errors = process.communicate(timeout=seconds or 300)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        process.communicate()
        return -signal.SIGKILL
    if process.returncode not in (0, -signal.SIGKILL):
        raise AssertionError(f"{arguments}: exit code {process.returncode}\n{errors.decode()}")
    return process.returncode


def contents(folder: Path) -> dict[str, object]:
    """Every file of a run folder, times left out."""

    def without_times(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: without_times(v) for k, v in value.items() if k != "seconds"}
        return value

    found: dict[str, object] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_dir() or name == ".lock":
            continue
        if path.suffix == ".json":
            found[name] = without_times(json.loads(path.read_text()))
        elif name == "rounds.csv":
            found[name] = [row[:-1] for row in csv.reader(path.read_text().splitlines())]
        else:
            found[name] = path.read_bytes()
    # rounds.csv holds times of varying width, so its length is one too.
    for name, value in found.items():
        if name.endswith("state.json"):
            value["log"]["lengths"].pop("rounds")  # type: ignore[index]
    return found


def run_and_resume(
    folder: Path, store: str, line: int = 0, seconds: float = 0.0, other: Sequence[str] = ()
) -> bool:
    """Run, killed once; resume until it ends. Was it killed at all? `other` flags override EXPERIMENT's."""
    arguments = ["run", *EXPERIMENT, *other, "--store", store, "--out", str(folder)]
    if apiece(*arguments, line=line, seconds=seconds) == 0:
        return False
    again = ["resume", str(folder)] if (folder / "experiment.toml").exists() else arguments
    if not (folder / "summary.json").exists():
        apiece(*again)
    return True


def differences(one: Path, other: Path) -> list[str]:
    a, b = contents(one), contents(other)
    return sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--die-at", type=int, default=0)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options, rest = parser.parse_known_args()
    if options.die_at:
        die_at_line(options.die_at, [argument for argument in rest if argument != "--"])
        return
    draw = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as place:
        whole: dict[str, Path] = {}
        for store in ("memory", "mapped"):
            whole[store] = Path(place) / f"whole-{store}"
            begin = time.monotonic()
            run_and_resume(whole[store], store)
            duration = time.monotonic() - begin
        equal = 0
        for number in range(options.kills):
            store = ("memory", "mapped")[number % 2]
            # Half by the clock, half between two lines of what writes (4500 of them in a run, or more).
            at: dict[str, Any] = {"seconds": draw.uniform(0.5, duration)}
            if number % 4 >= 2:
                at = {"line": draw.randrange(1, 4500)}
            folder = Path(place) / f"killed-{number}"
            killed = run_and_resume(folder, store, **at)
            found = differences(whole[store], folder)
            equal += not found
            ((kind, value),) = at.items()
            when = f"{value:.2f} s" if kind == "seconds" else f"line {value}"
            verdict = "equal" if not found else f"DIFFERENT: {found}"
            ended = "" if killed else "(it had ended)"
            print(f"{number + 1:3d}  {store:7s} killed at {when:10s} {ended} {verdict}", flush=True)
        print(f"{equal} of {options.kills} equal to the uninterrupted run")
    sys.exit(equal != options.kills)


if __name__ == "__main__":
    main()
