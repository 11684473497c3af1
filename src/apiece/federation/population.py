"""Population: clients whose examples are on machines of their own; names and numbers are known."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from apiece import folder as files
from apiece.data.federated import Clients, Federated, Ints, Ragged, count_held_out
from apiece.errors import ApieceError


@dataclass(frozen=True)
class Population(Clients):
    """Clients by their place in it: first those that train, then those that came later."""

    names: tuple[str, ...]
    held: tuple[int, ...]  # numbers of examples
    trained: int  # how many of them train
    test: float  # share held out
    shape: tuple[int, ...]
    label_names: tuple[str, ...]
    device: torch.device = torch.device("cpu")
    partition = "natural"

    @property
    def classes(self) -> int:  # type: ignore[override]
        return len(self.label_names)

    @cached_property
    def x(self) -> Tensor:
        return torch.zeros((1, *self.shape), device=self.device)

    @cached_property
    def y(self) -> Tensor:  # type: ignore[override]
        return torch.zeros(1, dtype=torch.int64, device=self.device)

    @cached_property
    def seen(self) -> NDArray[np.bool_]:  # type: ignore[override]
        return np.arange(len(self.names)) < self.trained

    def sizes(self, ids: Sequence[int] | Ints) -> tuple[Ints, Ints]:
        held = np.array(self.held, dtype=np.int64)[np.asarray(ids, dtype=np.int64)]
        test = count_held_out(held, self.test)
        return held - test, test

    def take(self, ids: Sequence[int]) -> Federated:
        """These clients, without a row: their examples are elsewhere."""
        nothing = Ragged.of([np.zeros(0, dtype=np.int64)] * len(ids))
        names, none = tuple(self.names[i] for i in ids), nothing.rows
        seen = self.seen[list(ids)]
        return Federated(
            self.x, self.y, self.classes, self.label_names, names, nothing, nothing, seen, proxy=none
        )

    def to(self, device: torch.device) -> Population:
        return replace(self, device=device)

    def joined(self, name: str, examples: int) -> Population:
        """With a client that came later: it does not train."""
        return replace(self, names=(*self.names, name), held=(*self.held, examples))

    def write(self, path: Path) -> None:
        clients = [{"name": n, "examples": e} for n, e in zip(self.names, self.held, strict=True)]
        files.write_json(path, {"trained": self.trained, "clients": clients})


def read(path: Path, empty: Population) -> Population:
    """The population of a run that was begun."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        names = tuple(str(client["name"]) for client in table["clients"])
        held = tuple(int(client["examples"]) for client in table["clients"])
        return replace(empty, names=names, held=held, trained=int(table["trained"]))
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ApieceError(f"{path} is missing or damaged: restore it, or start a new run") from error
