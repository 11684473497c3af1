"""Small federations for tests: ragged clients of known sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np
import torch
from torch import nn

from apiece import Dropout, Method, Shard, Task, random, tree
from apiece.data.federated import Examples, Federated, federate
from apiece.engines.base import Engine
from apiece.method import Server
from apiece.sample import uniform
from apiece.store import Store
from apiece.train import Training, assemble

CPU = torch.device("cpu")
ROOT = 123


def ragged(sizes: tuple[int, ...], features: int = 5, classes: int = 3) -> Federated:
    """Clients of the given training sizes on a linearly separable problem; no tests, none unseen."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=(sum(sizes), features)).astype(np.float32)
    y = (x @ draw.normal(size=(features, classes))).argmax(1)
    edges = np.cumsum((0, *sizes))
    parts = [np.arange(a, b) for a, b in pairwise(edges)]
    labels, names = ([str(i) for i in range(n)] for n in (classes, len(sizes)))
    return federate(Examples(x, y, classes, tuple(labels)), parts, names, key=0, test=0.0, unseen=0.0)


def dropout_net() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), Dropout(0.3), nn.Linear(7, 3))


def normalized_net() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.GroupNorm(1, 7), nn.ReLU(), Dropout(0.3), nn.Linear(7, 3))


def linear_net() -> nn.Module:
    return nn.Linear(5, 3)


def federation(
    method: Method,
    engine: Engine,
    sizes: tuple[int, ...],
    cohort: int,
    net: Callable[[], nn.Module] = dropout_net,
) -> tuple[Training, Server]:
    task, data = Task(net), ragged(sizes)
    return assemble(
        engine,
        method,
        task,
        task.init(1),
        data,
        cohort,
        ROOT,
        uniform,
        lambda state: Store(state, data.population, CPU, None, mapped=False),
    )


def servers(training: Training, server: Server, rounds: int) -> Iterator[Server]:
    """One after another; gradients are off within a round only, not in whoever is asking."""
    closing = training.rounds(server, 0, rounds)
    for _ in range(rounds):
        with torch.no_grad():
            closed = next(closing)
        yield closed.server


def cohort_shards(training: Training, index: int) -> list[tuple[int, Shard]]:
    """(id, shard) of each client of round `index`; the shards' x are row numbers, for plain references."""
    f = training.federation
    round = training.round(index)
    cohort = training.sampler(f.data, round)
    key = random.fold(round.key, "client")
    out = []
    for at, client in enumerate(cohort.ids):
        rows, even = f.rows(cohort.train, [at], [client], key)
        out.append((client, Shard(torch.arange(len(f.data.y)), f.data.y, tree.take(rows, 0), even)))
    return out
