"""Lazy: a population whose clients' examples are made, or loaded, when they take part or are scored.

Memory and time of a round are those of its cohort, however many clients there are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from apiece import random, tree
from apiece.data.federated import (
    Clients,
    Federated,
    Ints,
    Ragged,
    check_share,
    count_held_out,
    draw_seen,
    draw_testers,
    hold_out,
    with_padding,
)
from apiece.tree import Tree


class Source(ABC):
    """Where a client's examples come from: a pure function of the client."""

    classes: int
    label_names: tuple[str, ...]

    @abstractmethod
    def sizes(self, ids: Ints) -> Ints:
        """How many examples these clients have, without making one."""

    @abstractmethod
    def make(self, client: int) -> tuple[Any, Ints]:
        """A client's examples: x, an array or a tree of arrays, and the labels."""


@dataclass(frozen=True)
class Lazy(Clients):
    """As `federate` would split the same clients, but none of them is in memory until it is asked for."""

    source: Source
    x: Tree  # the row of padding alone
    y: Tensor
    classes: int
    label_names: tuple[str, ...]
    names: Sequence[str]
    seen: NDArray[np.bool_]
    holds_out: NDArray[np.bool_]
    test: float
    key: int
    partition: str = "natural"

    def take(self, ids: Sequence[int]) -> Federated:
        shares = [self.source.make(int(client)) for client in ids]
        begins = np.cumsum([0, *(len(y) for _, y in shares)])
        pairs = [
            hold_out(
                begin + np.arange(len(y)),
                self.test * bool(self.holds_out[client]),
                random.fold(self.key, "test", int(client)),
            )
            for client, begin, (_, y) in zip(ids, begins[:-1], shares, strict=True)
        ]
        together = Federated(
            x=tree.map(lambda *parts: with_padding(np.concatenate(parts)), *(x for x, _ in shares)),
            y=with_padding(np.concatenate([y for _, y in shares])),
            classes=self.classes,
            label_names=self.label_names,
            names=tuple(self.names[int(client)] for client in ids),
            train=Ragged.of([train for train, _ in pairs]),
            test=Ragged.of([test for _, test in pairs]),
            lasting=False,
            seen=self.seen[list(ids)],
            proxy=np.zeros(0, dtype=np.int64),
            partition=self.partition,
        )
        return together.to(self.y.device)

    def sizes(self, ids: Sequence[int] | Ints) -> tuple[Ints, Ints]:
        at = np.asarray(ids, dtype=np.int64)
        sizes = self.source.sizes(at)
        held_out = count_held_out(sizes, self.test) * self.holds_out[at]
        return sizes - held_out, held_out

    def to(self, device: torch.device) -> Lazy:
        return replace(self, x=tree.to(self.x, device), y=self.y.to(device))


def lazily(
    source: Source,
    clients: int,
    key: int,
    test: float = 0.25,
    unseen: float = 0.2,
    testers: str = "all",
    unseen_pick: str = "random",
) -> Lazy:
    """What `federate` makes of the source's clients 0 … clients − 1, one by one and when asked."""
    check_share("test", test)
    x, y = source.make(0)
    seen = draw_seen(clients, unseen, key, unseen_pick)
    return Lazy(
        source=source,
        x=tree.map(lambda array: with_padding(array[:0]), x),
        y=with_padding(y[:0]),
        classes=source.classes,
        label_names=source.label_names,
        names=Numbers(clients),
        seen=seen,
        holds_out=draw_testers(seen, testers),
        test=test,
        key=key,
    )


@dataclass(frozen=True)
class Numbers(Sequence[str]):
    """The names "0", "1", … of clients that have no others."""

    total: int

    def __len__(self) -> int:
        return self.total

    @overload
    def __getitem__(self, at: int) -> str: ...
    @overload
    def __getitem__(self, at: slice) -> list[str]: ...
    def __getitem__(self, at: int | slice) -> str | list[str]:
        found = range(self.total)[at]
        return str(found) if isinstance(found, int) else [str(i) for i in found]
