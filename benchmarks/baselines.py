"""Every method on digits: `python -m benchmarks.baselines --out results/baselines --jobs 2`.

30 clients under three partitions, 50 rounds, 10 of 24 clients a round, MLP 64-128-10. Each method has one
search of the same number of trials (`apiece tune`: validation examples taken from the clients' training
examples, partition classes:4, seed 0), whose settings serve all partitions; then each partition is run over
the seeds. What is finished is not run again: stop it and go on whenever you like.
`--page docs/digits.md` fills the table into that page from the figures there are.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch

from apiece import Experiment, catalog, tune
from apiece.session import run_replicas
from apiece.wrappers import WRAPPERS
from benchmarks.claims import all_clients

PARTITIONS = ("classes:2", "classes:4", "dirichlet:0.3")
SEEDS = range(5)
BASE = Experiment(engine="vectorized", threads=1, evaluate_every=50, checkpoint_every=50, precision="fp32")
NORMALIZED = "mlp(norm=True)"  # FedBN needs normalization layers; FedAvg stands beside it


def rows() -> dict[str, Experiment]:
    """Every method once, on the MLP, FedBN on that with normalization layers; FedOpt is its variants."""
    left_out = {*WRAPPERS, "fedopt"}
    plain = {name: replace(BASE, method=name) for name in catalog.names() if name not in left_out}
    plain["fedbn"] = replace(BASE, method="fedbn", model=NORMALIZED)
    return {**plain, f"fedavg, {NORMALIZED}": replace(BASE, method="fedavg", model=NORMALIZED)}


def measure(row: str, out: Path, trials: int) -> Path:
    """Search, then run: one file per row, written when it is finished."""
    place = out / f"{re.sub(r'[^a-zA-Z0-9_]+', '-', row).strip('-')}.json"
    if place.exists():
        return place
    torch.set_num_threads(1)
    base = replace(rows()[row], partition="classes:4")
    found = tune.search(base, trials, seeds=[0], log=out / "trials.jsonl")
    scores: dict[str, list[dict[str, float]]] = {}
    for partition in PARTITIONS:
        described = replace(found.experiment, partition=partition)
        replicas = [(replace(described, seed=seed), None) for seed in SEEDS]
        scores[partition] = [all_clients(one) for one in run_replicas(replicas)]
    figures = {
        "row": row,
        "settings": found.settings,
        "validation": found.score,
        "trials": [trial._asdict() for trial in found.trials],
        "scores": scores,
    }
    draft = place.with_suffix(".draft")
    draft.write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n")
    draft.rename(place)
    return place


def finished(out: Path) -> Iterator[dict[str, Any]]:
    known = list(rows())
    found = [json.loads(path.read_text()) for path in sorted(out.glob("*.json"))]
    yield from sorted(found, key=lambda figures: known.index(figures["row"]))


def markdown(out: Path) -> str:
    columns = [(partition, score) for partition in PARTITIONS for score in ("initial", "personalized")]
    head = " | ".join(f"{partition} {score}" for partition, score in columns)
    lines = [f"| | {head} | settings found |", "|---|" + "---|" * (2 * len(PARTITIONS) + 1)]
    for figures in finished(out):
        cells = []
        for partition, score in columns:
            values = [100 * seed[score] for seed in figures["scores"][partition]]
            cells.append(f"{fmean(values):.1f} ± {stdev(values):.1f}")
        settings = ", ".join(tune.flags(figures["settings"])) or "defaults"
        lines.append(f"| {figures['row']} | {' | '.join(cells)} | {settings} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="a folder of figures, one file per row")
    parser.add_argument("--trials", type=int, default=tune.TRIALS)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--only", nargs="*", help="rows, if not all")
    parser.add_argument("--page", type=Path, help="a page to fill the table into, from what is finished")
    options = parser.parse_args()
    if options.page is not None:
        marks = r"(<!-- baselines -->\n).*?(<!-- end -->)"
        text = options.page.read_text()
        options.page.write_text(
            re.sub(marks, lambda m: f"{m[1]}{markdown(options.out)}\n{m[2]}", text, flags=re.DOTALL)
        )
        return
    options.out.mkdir(parents=True, exist_ok=True)
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.jobs, spawn) as pool:
        waiting = {
            pool.submit(measure, row, options.out, options.trials): row for row in options.only or rows()
        }
        for done in as_completed(waiting):
            print(waiting[done], done.exception() or done.result(), flush=True)


if __name__ == "__main__":
    main()
