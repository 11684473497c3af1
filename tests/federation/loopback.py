"""A federation in one process: the server's rounds and the clients' work are real, the network is a list."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load_file
from torch import Tensor

from apiece import Experiment, run
from apiece.federation import client, server
from apiece.federation.client import Place
from apiece.federation.server import Plan, Rules, federated, new_run
from apiece.federation.wire import Message
from apiece.session import Result

SIZES = {"anna": 23, "bert": 40, "cora": 9}
SHAPE, LABELS = (5,), ("0", "1", "2")
MODEL = "mlp(hidden=8, dropout=0.2)"

Fate = Callable[[str, Message, Message], Message | None]  # (client, request, reply) → what arrives, if at all


def examples(size: int, seed: int) -> dict[str, Any]:
    """A noisy linear problem."""
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(size, *SHAPE)).astype(np.float32)
    weights = np.random.default_rng(7).normal(size=(*SHAPE, len(LABELS)))
    return {"x": x, "y": (x @ weights + draw.normal(size=(size, len(LABELS)))).argmax(1)}


def settle(folder: Path, sizes: Mapping[str, int] = SIZES) -> Path:
    """The folder of the clients' data files."""
    data = folder / "data"
    data.mkdir(parents=True, exist_ok=True)
    for seed, (name, size) in enumerate(sizes.items()):
        np.savez(data / f"{name}.npz", **examples(size, seed))
    return data


def experiment(method: str, **changes: Any) -> Experiment:
    values: dict[str, Any] = {"rounds": 3, "model": MODEL, "evaluate_every": 3, **changes}
    return Experiment(method=method, **values)


def plan(folder: Path, described: Experiment, clients: int = 3, cohort: int = 3, **rules: Any) -> Path:
    """The folder of a run that is planned and not begun."""
    folder.mkdir(parents=True)
    whole = federated(described, clients, cohort)
    Plan(whole, Rules(**{"deadline": 0.2, **rules}), clients, SHAPE, LABELS, new_run(whole)).write(folder)
    return folder


def simulated(described: Experiment, data: Path, cohort: int = 3) -> Result:
    """The same experiment by the sequential engine, from the folder of all clients' files."""
    values = {**vars(described), "data": str(data), "unseen": 0.0, "cohort": cohort}
    return run(Experiment(**{**values, "engine": "sequential", "threads": 1}))


class Loopback:
    """Clients that answer when they are asked; `fate` says what arrives of a reply."""

    def __init__(
        self,
        folder: Path,
        names: tuple[str, ...] = tuple(SIZES),
        fate: Fate = lambda name, request, reply: reply,
        keys: bool = True,
    ) -> None:
        self.data = folder / "data"
        self.places = {
            f"address of {name}": Place(self.data / f"{name}.npz", folder / "clients" / name, name)
            for name in names
        }
        self.fate, self._keys = fate, keys
        self.requests: list[tuple[str, Message]] = []
        self._arrived: list[tuple[str, Message]] = []

    def present(self) -> dict[str, str]:
        return {address: place.name if self._keys else "" for address, place in self.places.items()}

    def send(self, address: str, request: Message) -> str:
        place, ticket = self.places[address], str(len(self.requests))
        self.requests.append((place.name, request))
        reply = self.fate(place.name, request, client.answer(place, request))
        if reply is not None:
            self._arrived.append((ticket, reply))
        return ticket

    def replies(self) -> list[tuple[str, Message]]:
        arrived, self._arrived = self._arrived, []
        return arrived


def host(folder: Path, network: Loopback) -> dict[str, Any]:
    return server.host(folder, network)


def personalized(folder: Path, name: str) -> dict[str, Tensor]:
    return load_file(folder / "clients" / name / "personalized.safetensors")


def server_state(run_folder: Path) -> dict[str, Tensor]:
    """The newest checkpoint's leaves."""
    newest = sorted((run_folder / "checkpoint").glob("round-*"))[-1]
    return load_file(newest / "server.safetensors")


def wipe(folder: Path, name: str) -> None:
    shutil.rmtree(folder / "clients" / name)
