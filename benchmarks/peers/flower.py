"""Flower's simulation: a ServerApp with FedAvg and a ClientApp, in a pool of Ray actors, one per core."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from itertools import pairwise

import torch
import torch.nn.functional as F
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.server import Grid
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch import Tensor, nn

from benchmarks.peers import Work

ACTORS = 16  # at the most

app = ClientApp()


@cache
def _held(described: str) -> tuple[Work, nn.Module, list[tuple[Tensor, Tensor]]]:
    """The work, a model and everybody's examples on the device: made once in each actor."""
    fields = json.loads(described)
    work = Work(**{**fields, "sizes": tuple(fields["sizes"])})
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    data = work.data().to(device)
    rows = [torch.as_tensor(data.train[client], device=device) for client in range(data.population)]
    return work, work.network().to(device), [(data.x[mine], data.y[mine]) for mine in rows]


@app.train()
def train(message: Message, context: Context) -> Message:
    work, model, examples = _held(str(message.content["config"]["work"]))
    x, y = examples[int(context.node_config["partition-id"])]
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=work.lr)
    for _ in range(work.epochs):
        for batch in torch.randperm(len(y), device=y.device).split(work.batch):
            optimizer.zero_grad()
            F.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
    answer = {
        "arrays": ArrayRecord(model.state_dict()),
        "metrics": MetricRecord({"num-examples": len(y)}),
    }
    return Message(content=RecordDict(answer), reply_to=message)


def measure(work: Work, warm: int, rounds: int) -> tuple[list[float], Mapping[str, Tensor]]:
    """(ms of each round behind the warm-up, the server's params after the first of all)."""
    stamps: list[float] = []
    first: dict[str, Tensor] = {}
    server = ServerApp()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        def stamp(index: int, arrays: ArrayRecord) -> None:
            stamps.append(time.perf_counter())
            if index == 1:
                first.update(arrays.to_torch_state_dict())

        share = work.cohort / len(work.sizes)
        FedAvg(fraction_train=share, fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=1).start(
            grid,
            ArrayRecord(work.network().state_dict()),
            num_rounds=warm + rounds,
            train_config=ConfigRecord({"work": json.dumps(asdict(work))}),
            evaluate_fn=stamp,
        )

    actors = min(len(os.sched_getaffinity(0)), ACTORS)
    resources = {"num_cpus": 1, "num_gpus": 1 / actors if torch.cuda.is_available() else 0.0}
    init = {"num_cpus": actors, "log_to_driver": False, "logging_level": "ERROR"}
    config = {"client_resources": resources, "init_args": init}
    run_simulation(server, app, num_supernodes=len(work.sizes), backend_config=config)
    times = [1e3 * (after - before) for before, after in pairwise(stamps)]
    return times[warm:], first
