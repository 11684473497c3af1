"""What a method sends and keeps, in model sizes: worked out on fake tensors, nothing is trained."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch

from apiece import models, tree
from apiece.method import Method, Round
from apiece.random import as_key
from apiece.shard import Rows, Shard
from apiece.spec import spec
from apiece.tree import Tree

# Far enough into training that what is sent at the start alone is over, and no stage has switched.
TYPICAL = Round(index=9, key=0, cohort_size=10, population=24, examples=1000)


class Traffic(NamedTuple):
    """Of one client in a typical round, in sizes of the model."""

    up: float
    down: float
    kept: float
    keeps: tuple[str, ...]  # the fields of its state that take room

    @property
    def memory(self) -> str:
        """What stays with the client, in words: `theta, y (2)`."""
        return f"{', '.join(self.keeps)} ({self.kept:.2g})" if self.keeps else "nothing"


def traffic(method: Method, model: str = "mlp(norm=True)") -> Traffic:
    """Measured on `model` for the digits: shares of a model differ with the model."""
    if method.pooled:
        return Traffic(0.0, 0.0, 0.0, ())
    task = models.build(model, (64,), 10)
    start = task.init(0)
    x, y, key = torch.zeros(2, 64), torch.zeros(2, dtype=torch.int64), as_key(0)
    rows = Rows(torch.zeros(1, dtype=torch.int64), as_key(1), key, key)
    server = method.init(replace(task, proxy=Shard(x, y, rows, True), prior=start), start, 0)
    broadcast = method.broadcast(server, TYPICAL)
    found = spec(method, task, broadcast, start, x, y)
    up, down, kept = (
        tree.nbytes(part) / tree.nbytes(start) for part in (found.update, broadcast, found.state)
    )
    return Traffic(up, down, kept, tuple(_fields(found.state)))


def _fields(state: Tree) -> list[str]:
    """Fields of a NamedTuple that hold more than a few numbers; of a wrapper's state, those inside."""
    found: list[str] = []
    for name, value in _named(state).items():
        if tree.nbytes(value) > 64:
            found += _fields(value) if name == "inner" and _named(value) else [name]
    return found


def _named(state: Tree) -> dict[str, Any]:
    return state._asdict() if hasattr(state, "_asdict") else {}
