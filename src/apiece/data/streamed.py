"""Streamed: a population whose examples are too many for the device, of which a cohort's are copied to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from apiece.data.arena import Arena, copied
from apiece.data.federated import Clients, Federated, Ints, Ragged
from apiece.tree import Tree

SHARE = 0.5  # of the device's free memory for resident examples: the rest is for the clients' models


@dataclass(frozen=True)
class Streamed(Clients):
    """The clients of `host`, of whom those that are asked for are on the device, and nobody else."""

    host: Federated
    x: Tree  # the row of padding alone, on the device
    y: Tensor
    classes: int
    label_names: tuple[str, ...]
    names: Sequence[str]
    seen: NDArray[np.bool_]
    partition: str

    lack = (
        "on the device at once, and they are too many for it (docs/data.md): use --device cpu, a device with "
        "more memory, or fewer examples"
    )

    @property
    def kept(self) -> Federated:
        return self.host

    def take(self, ids: Sequence[int]) -> Federated:
        return self.brought(self.host.take(ids))

    def brought(self, some: Federated, into: Arena | None = None) -> Federated:
        rows = np.concatenate([some.train.rows, some.test.rows])
        examples, device = (some.x, some.y), self.y.device
        x, y = copied(examples, rows, device) if into is None else into.filled(examples, rows, device)
        first, places = len(some.train.rows), np.arange(len(rows))
        held = replace(
            some,
            x=x,
            y=y,
            train=Ragged(places[:first], some.train.offsets),
            test=Ragged(places[first:], some.test.offsets),
            proxy=places[:0],
            lasting=into is not None,
        )
        vars(held)["labels"] = some.labels[rows]  # the device need not be asked for them
        return held

    def sizes(self, ids: Sequence[int] | Ints) -> tuple[Ints, Ints]:
        return self.host.sizes(ids)

    def to(self, device: torch.device) -> Streamed:
        return self if device == self.y.device else streamed(self.host, device)


def streamed(host: Federated, device: torch.device) -> Streamed:
    """The clients of `host`, whose examples stay where they are until they are asked for on `device`."""
    x, y = copied((host.x, host.y), np.zeros(0, dtype=np.int64), device)
    return Streamed(
        host, x, y, host.classes, host.label_names, host.names, host.seen, partition=host.partition
    )


def fits(size: int, free: int) -> bool:
    """May examples of so many bytes lie on a device with so much free memory?"""
    return size <= SHARE * free


def free_memory(device: torch.device) -> int:
    """Of a CUDA device, in bytes; what PyTorch keeps for later is free."""
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + kept
