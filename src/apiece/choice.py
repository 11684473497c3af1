"""Choosing an engine: by name, or by a short measurement. The choice is recorded and never made again."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from apiece.engines.base import Engine, Federation, client_phase
from apiece.engines.sequential import Sequential
from apiece.engines.vectorized import Vectorized
from apiece.errors import ApieceError, unknown
from apiece.method import Server
from apiece.sample import Cohort
from apiece.shard import Rows, Shard
from apiece.spec import OneBatch
from apiece.train import Training

ENGINES = ("auto", "sequential", "vectorized")
CHUNK = 64
PROBED_CLIENTS = 8


@dataclass(frozen=True)
class Choice:
    """What engine.json holds: all that a run's bits depend on besides the experiment."""

    engine: str
    device: str
    chunk: int
    threads: int
    store: str
    torch: str
    reason: str

    def build(self) -> Engine:
        device = torch.device(self.device)
        return Sequential(device) if self.engine == "sequential" else Vectorized(device, self.chunk)


def pick_device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ApieceError(f"unknown device {name!r}: auto, cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise ApieceError(f"device {name!r} is not supported: auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ApieceError("device cuda was asked for, but this PyTorch sees no CUDA device; use --device cpu")
    return device


def check_engine(name: str) -> None:
    if name not in ENGINES:
        raise unknown("engine", name, ENGINES)


class _Sketch(Federation):
    """The same federation, but every training loop ends after one batch."""

    def shard(self, rows: Rows, even: bool) -> Shard:
        return OneBatch(self.data.x, self.data.y, rows, even)


def choose(training: Training, server: Server, chunk: int, runnable: dict[str, str]) -> tuple[str, str]:
    """(engine, reason) for `auto`; `runnable` maps each engine to why it cannot run, or ''."""
    barred = [name for name, why in runnable.items() if why]
    if barred:
        name = next(name for name, why in runnable.items() if not why)
        return name, f"auto: {barred[0]} cannot run this model: {runnable[barred[0]]}"
    device = training.federation.task.device
    if device.type == "cuda":
        return "vectorized", "auto: a CUDA device"
    taken = {e.name: _probe(e, training, server) for e in (Sequential(device), Vectorized(device, chunk))}
    best = min(taken, key=lambda name: taken[name])
    figures = ", ".join(f"{name} {1e3 * seconds:.1f} ms" for name, seconds in taken.items())
    return best, f"auto: one batch of {PROBED_CLIENTS} clients at the most took {figures}"


def _probe(engine: Engine, training: Training, server: Server) -> float:
    """Seconds of one client phase of one batch; the better of two, after a warm-up. Nothing is kept."""
    federation = training.federation
    sketch = _Sketch(**vars(federation))
    round = training.round(0)
    cohort = training.sampler(federation.data, round)
    ids = cohort.ids[:PROBED_CLIENTS]
    cohort = Cohort(ids, cohort.train.take(range(len(ids))))
    broadcast = federation.method.broadcast(server, round)
    seconds = []
    for _ in range(3):
        begin = time.perf_counter()
        client_phase(engine, sketch, broadcast, cohort, round)
        seconds.append(time.perf_counter() - begin)
        federation.store.open(0)
    return min(seconds[1:])

