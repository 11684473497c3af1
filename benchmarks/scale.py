"""What Ray costs, beside the same work without it: `python -m benchmarks.scale`.

Rounds: FedAvg, 64 clients of 200 random images, by turns in this machine's pool of processes and by as many
actors of a Ray cluster that is begun here; on a GPU, in this process and by the one actor that has it. The
ratio is the median over the turns.

Calls: seconds of calls that do nothing, by the bytes of the broadcast before them and of their answers. All
is on one machine, so the network is not in it. Host: seconds to prepare the calls of a phase, per client.
docs/scale.md reasons from these figures to clusters.

    python -m benchmarks.scale --json results/scale-2cores.json
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from apiece import tree
from apiece.choice import pick_device
from apiece.engines.base import Call, Federation, Program, client_phase
from apiece.engines.ray import Cluster, Ray
from apiece.engines.vectorized import Vectorized
from apiece.tree import Tree
from benchmarks.peers import Work
from benchmarks.rounds import MODELS, Plan, cores, measure, ours, prepared, surroundings

CPU = torch.device("cpu")
NUMBERS = (10_000, 100_000, 1_000_000, 10_000_000)  # of 4 bytes: a broadcast's, an answer's
WITHOUT, WITH = "without Ray", "with Ray"


def rounds(model: str, plan: Plan) -> dict[str, Any]:
    """One model's round, with Ray and without, by turns."""
    work = Work(MODELS[model], (plan.examples,) * plan.clients, plan.clients, plan.batch)
    engines = {WITHOUT: "processes", WITH: "ray(sequential)"}
    if plan.device.type == "cuda":
        engines = {WITHOUT: "vectorized", WITH: "ray(vectorized)"}
    rows = [ours(name, prepared(work, plan, engine)) for name, engine in engines.items()]
    measure(rows, work, plan, per_block=1)
    figures = {row.name: row.figures() for row in rows}
    pairs = zip(*(row.blocks for row in rows), strict=False)
    parameters = sum(p.numel() for p in work.network().parameters())
    return {
        "clients": plan.clients,
        "parameters": parameters,
        "rows": figures,
        "ratio": median(many / one for one, many in pairs),
    }


def _nothing(federation: Federation, even: tuple[bool, ...], shared: Tensor, size: Tensor) -> Tree:
    return torch.zeros(int(size))


def calls(plan: Plan, numbers: tuple[int, ...], repeats: int) -> Iterator[dict[str, float]]:
    """What a call costs that does nothing."""
    work = Work("logistic", (4,) * 4, 2, 4)
    federation = prepared(work, replace(plan, device=CPU), "sequential").federation
    engine = Ray("sequential", 1, Cluster(CPU, 1, 1), "", {})

    def seconds(broadcast: int, answer: int, count: int) -> float:
        program, size = Program(_nothing, federation), torch.tensor([answer])
        some = [Call(program, torch.zeros(broadcast), (size,), "")] * count
        taken = []
        for _ in range(repeats + 1):
            begin = time.perf_counter()
            assert sum(found.numel() for found in engine.answers(some)) == answer * count
            taken.append(time.perf_counter() - begin)
        return median(taken[1:])

    for number in numbers:
        yield {
            "bytes": 4 * number,
            "phase_seconds": seconds(number, 1, 2),
            "call_seconds": seconds(1, number, 8) / 8,
        }


class _PreparedError(Exception):
    pass


class _Preparing(Vectorized):
    """Computes nothing: how long does it take to have something to compute?"""

    def answers(self, calls: Iterable[Call]) -> Iterator[Tree]:
        self.bytes = sum(tree.nbytes(call.clients) for call in calls)
        raise _PreparedError


def preparing(plan: Plan, clients: int, repeats: int) -> dict[str, float]:
    """Seconds of this process, for each client of a large cohort, before an engine computes."""
    work = Work("logistic", (plan.examples,) * clients, clients, plan.batch)
    session = prepared(work, replace(plan, device=CPU), "vectorized")
    taken = []
    for index in range(repeats + 1):
        engine, begin = _Preparing(CPU, clients), time.perf_counter()
        with suppress(_PreparedError):
            client_phase(engine, session.training.open(session.server, index))
        taken.append(time.perf_counter() - begin)
    return {"clients": clients, "seconds": median(taken[1:]) / clients, "bytes": engine.bytes / clients}


def told(facts: dict[str, Any]) -> str:
    lines = [f"| | parameters | {WITHOUT}, ms | {WITH}, ms | ratio |", "|---|---:|---:|---:|---:|"]
    for model, found in facts["rounds"].items():
        one, many = (found["rows"][name]["ms"] for name in (WITHOUT, WITH))
        lines.append(f"| {model} | {found['parameters']} | {one:.1f} | {many:.1f} | {found['ratio']:.2f} |")
    lines += ["", "| MB | as a broadcast, ms | as an answer, ms |", "|---:|---:|---:|"]
    for found in facts["calls"]:
        taken = (found[name] * 1e3 for name in ("phase_seconds", "call_seconds"))
        lines.append("| {:.2f} | {:.2f} | {:.2f} |".format(found["bytes"] / 1e6, *taken))
    host = facts["host"]
    lines += ["", f"Host: {1e6 * host['seconds']:.1f} µs and {host['bytes']:.0f} bytes for each client."]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="where to leave every figure")
    parser.add_argument("--models", choices=list(MODELS), nargs="+", default=["lenet"])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--small", action="store_true", help="a few steps of two clients: does it work?")
    options = parser.parse_args(arguments)
    plan = Plan(pick_device(options.device), 64, 200, 20, 2, options.turns, 0.0, cores())
    if options.small:
        plan = Plan.tiny()
    given = sys.argv[1:] if arguments is None else arguments
    facts = surroundings(plan.device, given) | {"command": " ".join(["python -m benchmarks.scale", *given])}
    numbers, repeats = (NUMBERS[:1], 1) if options.small else (NUMBERS, 7)
    host = preparing(plan, 8 if options.small else 512, repeats)
    facts |= {"rounds": {}, "host": host, "calls": list(calls(plan, numbers, repeats))}
    for model in options.models:
        facts["rounds"][model] = rounds(model, plan)
        facts["machine"]["load_after"] = os.getloadavg()
        if options.json is not None:
            options.json.write_text(json.dumps(facts, indent=1, ensure_ascii=False) + "\n")
        print(f"{model}: {facts['rounds'][model]['ratio']:.2f}", file=sys.stderr, flush=True)
    print(told(facts))


if __name__ == "__main__":
    from benchmarks import scale  # noqa: PLW0406 (actors find its functions by this name)

    scale.main()
