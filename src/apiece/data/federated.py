"""Examples before they are dealt out, and Federated: the clients' shares of them, resident on one device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from apiece import random, tree
from apiece.errors import ApieceError
from apiece.tree import Tree

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Examples:
    """A dataset: arrays with one row per example."""

    x: Any  # float32 array, or a tree of arrays
    y: Ints
    classes: int
    label_names: tuple[str, ...]
    client: NDArray[Any] | None = None  # the natural client of each row
    client_names: tuple[str, ...] | None = None  # given where some have no row


@dataclass(frozen=True)
class Ragged:
    """Rows of many clients in one array: client i's are rows[offsets[i]:offsets[i + 1]]."""

    rows: Ints
    offsets: Ints

    @staticmethod
    def of(parts: Sequence[Ints]) -> Ragged:
        sizes = np.array([len(part) for part in parts], dtype=np.int64)
        rows = np.concatenate([np.asarray(p, dtype=np.int64) for p in parts]) if len(parts) else sizes
        return Ragged(rows, np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64))

    @property
    def sizes(self) -> Ints:
        return np.diff(self.offsets)

    def __getitem__(self, client: int | np.integer) -> Ints:
        return self.rows[self.offsets[client] : self.offsets[client + 1]]

    def take(self, clients: Sequence[int]) -> Ragged:
        return Ragged.of([self[i] for i in clients])

    def padded(self, clients: Sequence[int], filler: int) -> Ints:
        """The clients' rows as a rectangle, `filler` behind the shorter ones."""
        parts = [self[i] for i in clients]
        out = np.full((len(parts), max(len(part) for part in parts)), filler, dtype=np.int64)
        for line, part in zip(out, parts, strict=True):
            line[: len(part)] = part
        return out


@dataclass(frozen=True)
class Federated:
    """Every client's training and test rows over arrays whose last row is padding (zeros)."""

    x: Tree
    y: Tensor
    classes: int
    label_names: tuple[str, ...]
    names: tuple[str, ...]  # the clients', by id
    train: Ragged
    test: Ragged
    seen: NDArray[np.bool_]  # False: never sampled, only scored
    proxy: Ints  # rows of the server's own, taken out of the seen clients' training rows
    partition: str = ""  # how it was dealt out

    @property
    def padding(self) -> int:
        return len(self.y) - 1

    @property
    def population(self) -> int:
        return len(self.seen)

    @property
    def seen_ids(self) -> Ints:
        return np.flatnonzero(self.seen)

    @cached_property
    def labels(self) -> Ints:
        """y on the host."""
        labels: Ints = self.y.cpu().numpy()
        return labels

    @property
    def input_shape(self) -> tuple[int, ...]:
        return tuple(tree.leaves(self.x)[0].shape[1:])

    def to(self, device: torch.device) -> Federated:
        return replace(self, x=tree.to(self.x, device), y=self.y.to(device))

    def pool(self) -> Federated:
        """The seen clients' training rows as one client: what the centralized baseline trains on."""
        rows = np.concatenate([self.train[i] for i in self.seen_ids])
        empty: Ints = np.zeros(0, dtype=np.int64)
        everyone = np.ones(1, dtype=bool)
        return replace(self, names=("pool",), train=Ragged.of([rows]), test=Ragged.of([empty]), seen=everyone)


def federate(
    examples: Examples,
    parts: Sequence[Ints],
    names: Sequence[str],
    key: int,
    test: float = 0.25,
    unseen: float = 0.2,
    proxy: float = 0.0,
) -> Federated:
    """Split each client's rows into train and test, and the clients into seen and unseen.

    A client of one example keeps it for training: it is trained, and scored NaN. `proxy` is the share of the
    seen clients' training rows that becomes the server's.
    """
    if not 0.0 <= test < 1.0:
        raise ApieceError(f"the test share must lie in [0, 1), got {test}")
    if not 0.0 <= unseen < 1.0:
        raise ApieceError(f"the unseen share must lie in [0, 1), got {unseen}")
    if not 0.0 <= proxy < 1.0:
        raise ApieceError(f"the proxy share must lie in [0, 1), got {proxy}")
    train_parts, test_parts = [], []
    for client, rows in enumerate(parts):
        shuffled = generator(random.fold(key, "test", client)).permutation(rows)
        held_out = min(round(test * len(rows)), max(len(rows) - 1, 0))
        test_parts.append(np.sort(shuffled[:held_out]))
        train_parts.append(np.sort(shuffled[held_out:]))
    seen = np.ones(len(parts), dtype=bool)
    seen[random.choose(random.fold(key, "unseen"), round(unseen * len(parts)), len(parts))] = False

    if not seen.any():
        raise ApieceError(f"an unseen share of {unseen} leaves none of {len(parts)} clients to train with")
    theirs = np.concatenate([part for part, mine in zip(train_parts, seen, strict=True) if mine])
    taken = generator(random.fold(key, "proxy")).permutation(theirs)[: round(proxy * len(theirs))]
    train_parts = [part[~np.isin(part, taken)] for part in train_parts]

    def resident(array: Any) -> Tensor:
        rows = torch.from_numpy(np.ascontiguousarray(array))
        return torch.cat([rows, torch.zeros_like(rows[:1])])

    return Federated(
        x=tree.map(resident, examples.x),
        y=resident(examples.y),
        classes=examples.classes,
        label_names=examples.label_names,
        names=tuple(names),
        train=Ragged.of(train_parts),
        test=Ragged.of(test_parts),
        seen=seen,
        proxy=np.sort(taken),
    )


def generator(key: int) -> np.random.Generator:
    """NumPy's counter-based generator at `key`, for dealing data out on the host."""
    return np.random.Generator(np.random.Philox(key=key & (2**64 - 1)))
