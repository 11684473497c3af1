"""Choosing an engine: by name, or by a short measurement. The choice is recorded and never made again."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import torch

from apiece.engines.base import Engine, Federation, Member, client_phase
from apiece.engines.capture import Captured
from apiece.engines.sequential import Sequential
from apiece.engines.vectorized import Vectorized
from apiece.errors import ApieceError
from apiece.evaluate import models
from apiece.method import Server
from apiece.sample import Cohort
from apiece.shard import Rows, Shard
from apiece.spec import OneBatch
from apiece.train import Training

PROBED_CLIENTS = 8


@dataclass(frozen=True)
class Choice:
    """What engine.json holds: all that a run's bits depend on besides the experiment."""

    engine: str
    device: str
    chunk: int
    threads: int
    layers: dict[str, str]  # those not computed PyTorch's own way, and how
    store: str
    data: str  # a hash of the examples
    torch: str
    reason: str


def build(name: str, device: torch.device, chunk: int) -> Engine:
    if name == "sequential":
        return Sequential(device)
    return Captured(device, chunk) if device.type == "cuda" else Vectorized(device, chunk)


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


class _Sketch(Federation):
    """The same federation, but every training loop ends after one batch."""

    def shard(self, rows: Rows, even: bool) -> Shard:
        return OneBatch(self.data.x, self.data.y, rows, even)


def choose(
    training: Training, server: Server, engines: dict[str, str], chunk: int, threads: int
) -> tuple[str, int, str]:
    """(engine, threads, reason). `engines`: those allowed, and why each cannot run, or ''; threads 0: any."""
    device = training.federation.task.device
    able = [name for name, why in engines.items() if not why]
    barred = "; ".join(f"{name} cannot run this model: {why}" for name, why in engines.items() if why)
    if device.type == "cuda":
        reason = "asked for" if len(engines) == 1 else "a CUDA device"
        return able[0], threads or torch.get_num_threads(), barred or reason
    counts = [threads] if threads else sorted({1, torch.get_num_threads()})
    options = [(name, count) for name in able for count in counts]
    if len(options) == 1:
        return *options[0], barred or "asked for"
    taken = {option: _probe(training, server, chunk, *option) for option in options}
    figures = ", ".join(f"{name} with {count} threads {1e3 * s:.1f} ms" for (name, count), s in taken.items())
    reason = f"one batch of at most {PROBED_CLIENTS} clients took: {figures}"
    return *min(taken, key=lambda option: taken[option]), f"{barred}; {reason}" if barred else reason


def _probe(training: Training, server: Server, chunk: int, name: str, threads: int) -> float:
    """Seconds to train and personalize on one batch per client: the best of three. Nothing is kept."""
    torch.set_num_threads(threads)
    engine = build(name, training.federation.task.device, chunk)
    federation = training.federation
    sketch = _Sketch(**vars(federation))
    round = training.round(0)
    cohort = training.sampler(federation.data, round)
    ids = cohort.ids[:PROBED_CLIENTS]
    cohort = Cohort(ids, cohort.data.take(range(len(ids))))
    broadcast = federation.method.broadcast(server, round)
    seconds = []
    for _ in range(4):
        begin = time.perf_counter()
        client_phase(engine, Member(replace(sketch, data=cohort.data), broadcast, cohort, round))
        models(engine, sketch, broadcast, list(ids), 0)
        seconds.append(time.perf_counter() - begin)
        federation.store.forget()
    return min(seconds[1:])
