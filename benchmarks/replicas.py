"""Replicas as one program: `python -m benchmarks.replicas --json results/replicas.json`, best on a GPU.

A round of FedAvg with five clients of 200 images, batches of 20, ten epochs: one seed alone, and nine side by
side; ours is what `apiece compare --seeds 0-8` does on a GPU.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from apiece import Recipe, models, random
from apiece.choice import pick_device
from apiece.data.federated import Examples, Federated, federate
from apiece.engines.capture import vectorized
from apiece.engines.lowering import fastest, lowered
from apiece.method import Server
from apiece.methods.fedavg import FedAvg
from apiece.sample import uniform
from apiece.store import Store
from apiece.task import Task
from apiece.train import Training, assemble, together

MODELS = ("tff_cnn", "lenet")
CLIENTS, EXAMPLES, COHORT, REPLICAS = 20, 200, 5, 9
METHOD = FedAvg(local=Recipe(lr=0.02, batch_size=20, epochs=10))


def data(device: torch.device) -> Federated:
    draw = np.random.default_rng(0)
    x = draw.normal(size=(CLIENTS * EXAMPLES, 28, 28)).astype(np.float32)
    y = draw.integers(0, 62, len(x))
    parts = list(np.arange(len(x)).reshape(CLIENTS, EXAMPLES))
    examples = Examples(x, y, 62, tuple(map(str, range(62))))
    return federate(examples, parts, [str(i) for i in range(CLIENTS)], 0, test=0.0, unseen=0.0).to(device)


def replicas(task: Task, clients: Federated, count: int) -> tuple[list[Training], list[Server]]:
    """`count` runs with keys and starts of their own, on one engine."""
    engine = vectorized(task.device, limit=64)
    trainings, servers = [], []
    for seed in range(count):
        root = random.fold(seed, "apiece")
        training, server = assemble(
            engine,
            METHOD,
            task,
            task.init(random.fold(root, "params")),
            clients,
            COHORT,
            root,
            uniform,
            lambda state: Store(state, clients.population, task.device, None, mapped=False),
        )
        trainings.append(training)
        servers.append(server)
    return trainings, servers


@torch.no_grad()
def milliseconds(task: Task, clients: Federated, count: int, rounds: int, blocks: int = 3) -> float:
    """Of a round of all replicas: the median of some blocks of rounds, the first of them left out."""
    trainings, servers = replicas(task, clients, count)
    taken = []
    for block in range(blocks + 1):
        begin = time.perf_counter()
        for closed in together(trainings, servers, block * rounds, (block + 1) * rounds):
            servers = [one.server for one in closed]
        if task.device.type == "cuda":
            torch.cuda.synchronize()
        taken.append(1e3 * (time.perf_counter() - begin) / rounds)
    return median(taken[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=10, help="in a block")
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    options = parser.parse_args()
    device = pick_device("auto")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    clients = data(device)
    hardware = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    facts: dict[str, Any] = {"hardware": hardware, "torch": torch.__version__, "date": time.strftime("%F")}
    for name in options.models:
        task = models.build(name, (28, 28), 62, device)
        alone, side_by_side = (
            milliseconds(lowered(task, ways), clients, count, options.rounds)
            for count in (1, REPLICAS)
            for ways in [fastest(replace(task), clients.x[:20], clients.y[:20], count * COHORT)]
        )
        facts[name] = {"one": alone, "nine": side_by_side, "ratio": side_by_side / alone}
        print(
            f"{name}: one {alone:.1f} ms, nine {side_by_side:.1f} ms, {side_by_side / alone:.2f}×", flush=True
        )
    if options.json is not None:
        options.json.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
