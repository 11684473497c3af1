"""What a round costs as the population grows: `python -m benchmarks.population`.

Every population is run in a fresh process: FedEC on a perceptron, so that each client met keeps a state of
about 10,000 parameters; a cohort of 100; the states in the mapped store, with a checkpoint every ten rounds;
the examples made when a client takes part; 200 clients scored before and after. The rounds of all populations
are equal work: every client has 50 examples.

In a large population hardly anybody is met twice. So all rounds are then played once more with the same
cohorts: everybody has been met, and states are read from a file that the system no longer holds in memory.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from apiece import Experiment, run, tree
from apiece.session import Result

POPULATIONS = (10**3, 10**4, 10**5, 10**6)
WARM_UP = 5
EXPERIMENT = Experiment(
    method="fedec",
    settings={"local": {"epochs": 1}},
    data="population(1,1,50)",
    model="mlp(hidden=141)",
    cohort=100,
    rounds=35,
    store="mapped",
    evaluate_every=1000,
    evaluate_clients=200,
    engine="vectorized",
    device="cpu",
    threads=1,
)


def memory() -> dict[str, float]:
    """Of this process, in MB: the peak so far, and now: all, anonymous, pages of files."""
    names = {"VmHWM": "peak", "VmRSS": "resident", "RssAnon": "anonymous", "RssFile": "file"}
    lines = (line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return {names[key]: int(value.split()[0]) / 1024 for key, value in lines if key in names}


def play_again(result: Result, rounds: int, rows: Path) -> list[float]:
    """Seconds of the same rounds once more, after each of which all states are on disk and nowhere else."""
    training, store = result.session.training, result.session.federation.store
    seconds = []
    with torch.no_grad():
        playing = training.rounds(result.server, 0, rounds)
        for index in range(rounds):
            store.commit(rounds + index)
            with rows.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            begin = time.perf_counter()
            closed = next(playing)
            seconds.append(time.perf_counter() - begin)
            assert store.known(closed.ids).all()
    return seconds


def measure(clients: int, rounds: int) -> dict[str, Any]:
    """One run in this process. Medians: rounds without a checkpoint; means: all behind the warm-up."""
    experiment = replace(EXPERIMENT, clients=clients, rounds=rounds)
    ticks: list[tuple[float, float]] = []
    held: list[dict[str, float]] = []

    def tick(done: int, scores: object) -> None:
        ticks.append((time.perf_counter(), time.process_time()))
        held.append(memory())

    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        result = run(experiment, folder, tick)
        again = play_again(result, rounds, Path(folder) / "checkpoint" / "clients.rows")[WARM_UP:]
        files = [(Path(folder) / "checkpoint" / name).stat() for name in ("clients.rows", "clients.tags")]
    # The last tick is behind the last evaluation: it is not a round's.
    steps = np.diff(np.array(ticks), axis=0)[WARM_UP:-1]
    saves = [at for at in range(len(steps)) if (WARM_UP + at + 1) % experiment.checkpoint_every == 0]
    plain = np.delete(steps, saves, axis=0)
    steady = {key: median(one[key] for one in held[WARM_UP:]) for key in held[0]}
    return {
        "clients": clients,
        "state_parameters": sum(t.numel() for t in tree.leaves(result.session.federation.store.template)),
        "seconds_before_round_0": ticks[0][0] - begin,
        "round_seconds": float(np.median(plain[:, 0])),
        "round_cpu_seconds": float(np.median(plain[:, 1])),
        "mean_round_seconds_with_checkpoints": float(steps[:, 0].mean()),
        "mean_round_cpu_seconds_with_checkpoints": float(steps[:, 1].mean()),
        "met_round_seconds": median(again),
        "peak_mb": memory()["peak"],
        "resident_mb": steady["resident"],
        "anonymous_mb": steady["anonymous"],
        "file_mb": steady["file"],
        "store_on_disk_mb": sum(file.st_blocks * 512 for file in files) / 2**20,
        "store_apparent_mb": sum(file.st_size for file in files) / 2**20,
    }


FIGURES = (
    "round_seconds",
    "round_cpu_seconds",
    "mean_round_seconds_with_checkpoints",
    "mean_round_cpu_seconds_with_checkpoints",
    "met_round_seconds",
    "peak_mb",
    "resident_mb",
    "anonymous_mb",
)


def fresh(clients: int, rounds: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.population", "--one", str(clients), "--rounds", str(rounds)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    answer = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    figures: dict[str, Any] = json.loads(answer.stdout)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--populations", type=int, nargs="+", default=POPULATIONS)
    parser.add_argument("--rounds", type=int, default=EXPERIMENT.rounds)
    parser.add_argument("--repeat", type=int, default=5, help="runs of each population, in turn")
    parser.add_argument("--json", type=Path, help="where to leave the figures")
    parser.add_argument("--one", type=int, help="measure one population, in this process")
    options = parser.parse_args()
    if options.one is not None:
        print(json.dumps(measure(options.one, options.rounds)))
        return
    found: dict[int, list[dict[str, Any]]] = {clients: [] for clients in options.populations}
    for _ in range(options.repeat):
        for clients, runs in found.items():
            runs.append(fresh(clients, options.rounds))
    # Others on the machine only ever add: of seconds the least is nearest to the truth, of memory the most.
    rows = [
        {key: (max if key.endswith("_mb") else min)(one[key] for one in runs) for key in runs[0]}
        for runs in found.values()
    ]
    for row in rows:
        row["ratios"] = {name: row[name] / rows[0][name] for name in FIGURES}
        cells = "  ".join(f"{name} {row[name]:.3f} ({row['ratios'][name]:.2f}×)" for name in FIGURES)
        print(f"{row['clients']:>9,} clients  {cells}", flush=True)
    if options.json is not None:
        facts = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": " ".join(["python -m benchmarks.population", *sys.argv[1:]]),
            "machine": {"cpu": processor(), "cores": os.cpu_count(), "load": os.getloadavg()},
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
            "populations": rows,
            "runs": found,
        }
        options.json.write_text(json.dumps(facts, indent=1) + "\n")


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "unknown")


if __name__ == "__main__":
    main()
