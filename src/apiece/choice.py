"""Choosing an engine: by name, or by a short measurement. The choice is recorded and never made again."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch

from apiece.data.federated import Federated
from apiece.engines.base import Engine, Federation, Known, Member, client_phase
from apiece.engines.capture import LANES, vectorized
from apiece.engines.pool import share
from apiece.engines.processes import HANDFUL, Processes
from apiece.engines.ray import Cluster, Ray, inside
from apiece.engines.sequential import Sequential
from apiece.engines.vectorized import Vectorized
from apiece.errors import ApieceError
from apiece.evaluate import evaluate
from apiece.method import Server
from apiece.sample import Cohort
from apiece.shard import Batch, Rows, Shard
from apiece.train import Training

PROCESSES = {"processes": "sequential", "processes(vectorized)": "vectorized"}  # and the engine inside
PROBED_CLIENTS = 8
CLOSE = 4.0, 1.5  # times the fastest on one batch, in a round: what is slower is not measured again
LEVEL = 1.05  # times the fastest: as good, and what takes less memory decides
SHARE, LEAST, MOST = 0.1, 1.0, 10.0  # of a run, for that comparison; in seconds at least, at most
REPEATS = 3


@dataclass(frozen=True)
class Choice:
    """What engine.json holds: all that a run's bits depend on besides the experiment."""

    engine: str
    device: str
    chunk: int
    threads: int  # of each process
    processes: int  # that compute clients, actors among them; 1: this one
    layers: dict[str, str]  # those not computed PyTorch's own way, and how
    store: str
    data: str  # a hash of the examples
    torch: str
    reason: str
    streamed: bool = False  # are the examples copied to the device cohort by cohort?
    code: str = ""  # a hash of the files of one's own that the experiment names


class Option(NamedTuple):
    """A way to compute clients."""

    engine: str
    threads: int
    processes: int = 1

    @property
    def pooled(self) -> bool:
        return self.engine in PROCESSES

    @property
    def together(self) -> bool:
        """Does it compute several clients in one program?"""
        return PROCESSES.get(self.engine, self.engine) == Vectorized.name

    def chunk(self, cohort: int, most: int) -> int:
        """Clients in a chunk at the most, of a cohort of so many."""
        inner = PROCESSES.get(self.engine)
        if inner == Sequential.name:
            return min(most, HANDFUL)
        return share(cohort, self.processes, inner, most) if inner else most

    def __str__(self) -> str:
        if self.pooled:
            return f"{self.processes} {self.engine}"
        return f"{self.engine} with {self.threads} thread{'s' * (self.threads > 1)}"


def build(name: str, device: torch.device, chunk: int, processes: int = 1) -> Engine:
    if name == Sequential.name:
        return Sequential(device)
    if name in PROCESSES:
        one_by_one = PROCESSES[name] == Sequential.name
        return Processes(device, processes, (Sequential if one_by_one else Vectorized)(device, chunk))
    return vectorized(device, chunk)


def rebuild(choice: Choice, actors: int, address: str) -> Engine:
    """The engine that was chosen. How many actors there are changes nothing; 0: as there is room for now."""
    device = torch.device(choice.device)
    if name := inside(choice.engine):
        cluster = Cluster(device, actors, choice.threads)
        return Ray(name, choice.chunk, cluster, address, choice.layers)
    return build(choice.engine, device, choice.chunk, choice.processes)


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


@dataclass(frozen=True)
class _Few(Shard):
    """A shard whose loops end early."""

    _few: int = 1

    def batches(self, batch_size: int, epochs: int = 1, steps: int = 0) -> Iterator[Batch]:
        return islice(super().batches(batch_size, epochs, steps), self._few)


@dataclass(frozen=True)
class _Sketch(Federation):
    """The same federation, but every training loop ends after some batches."""

    batches: int

    def shard(self, rows: Rows, known: Known | bool) -> Shard:
        return _Few(**vars(super().shard(rows, known)), _few=self.batches)


def choose(
    training: Training,
    server: Server,
    engines: dict[str, str],
    chunk: int,
    threads: int,
    processes: int,
    rounds: int,
    device: torch.device | None = None,
) -> tuple[Option, str]:
    """The fastest way, and how that is known. `engines`: those allowed, and why each cannot run, or ''.

    `threads` 0: any number of them; `processes`: how many where there are several; `rounds`: of the run;
    `device`: where clients are computed, if not where the task is.
    """
    device = device or training.federation.task.device
    able = [name for name, why in engines.items() if not why]
    barred = [f"{name} cannot run this model: {why}" for name, why in engines.items() if why]
    if device.type == "cuda":
        reason = "asked for" if len(engines) == 1 else "a CUDA device"
        return Option(able[0], threads or torch.get_num_threads()), "; ".join(barred) or reason
    counts = [threads] if threads else sorted({1, torch.get_num_threads()})
    options = [Option(name, count) for name in able if name not in PROCESSES for count in counts]
    options += [Option(name, 1, processes) for name in able if name in PROCESSES]
    if len(options) == 1:
        return options[0], "; ".join(barred) or "asked for"
    probe, taken = _Probe(training, server, chunk), {}
    for option in options:
        try:
            taken[option] = probe.batch(option)
        except ApieceError as error:
            if not option.pooled:
                raise
            barred.append(str(error))
    figures = [f"one batch of at most {PROBED_CLIENTS} clients took: {_told(taken)}"]
    close = _close(taken, CLOSE[0])
    repeats, batches = probe.affordable(close, rounds)
    if len(close) > 1 and batches:
        taken = probe.rounds(close, repeats, batches)
        figures.append(f"rounds would take, by at most {batches} batches: {_told(taken)}")
    return picked(taken), "; ".join([*barred, *figures])


def picked(taken: dict[Option, float]) -> Option:
    """The fastest; one that computes clients one by one if it is as good, for it takes far less memory."""
    return min(_close(taken, LEVEL), key=lambda option: (option.together, taken[option]))


def fitting(
    training: Training, server: Server, limit: int, engine: Callable[[int], Engine] | None = None
) -> int:
    """Clients that fit into a CUDA device's memory at once: `limit`, or half of it, or half of that, …

    Tried on the clients with most examples, for two batches. Each lane of the engine needs as much again.
    """
    f, round = training.federation, training.round(0)
    ids = f.data.seen_ids if isinstance(f.data.kept, Federated) else f.data.seen_ids[:limit]
    largest = ids[np.argsort(-f.data.sizes(ids)[0], kind="stable")[:limit]]
    broadcast = f.method.broadcast(server, round)
    made = engine or (lambda clients: Vectorized(f.task.device, clients))
    while limit > 1:
        some = tuple(sorted(int(i) for i in largest[:limit]))
        try:
            with _room(f.task.device):
                cohort = Cohort(some, f.data.take(some))
                sketch = _Sketch(**{**vars(f), "data": cohort.data}, batches=2)
                client_phase(made(limit), Member(sketch, broadcast, cohort, round))
            return limit
        except torch.OutOfMemoryError:
            limit //= 2
        finally:
            f.store.forget()
    return limit


@contextmanager
def _room(device: torch.device) -> Iterator[None]:
    """What is computed inside must leave room for the other lanes to do the same."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before, free = torch.cuda.memory_allocated(device), torch.cuda.mem_get_info(device)[0]
    yield
    if (torch.cuda.max_memory_allocated(device) - before) * LANES > free:
        raise torch.OutOfMemoryError("the lanes together would not fit")


def _close(taken: dict[Option, float], ratio: float) -> dict[Option, float]:
    return {option: seconds for option, seconds in taken.items() if seconds <= ratio * min(taken.values())}


def _told(taken: dict[Option, float]) -> str:
    return ", ".join(f"{option} {1e3 * seconds:.1f} ms" for option, seconds in taken.items())


class _Probe:
    """The first cohort, to measure on. Nothing of it is kept."""

    def __init__(self, training: Training, server: Server, chunk: int) -> None:
        self._federation, self._chunk = training.federation, chunk
        self._round = training.round(0)
        self._cohort = training.drawn(self._round)
        self._broadcast = self._federation.method.broadcast(server, self._round)
        self._engines: dict[tuple[Option, int], Engine] = {}

    def batch(self, option: Option) -> float:
        """Seconds to train and to score a few clients on one batch each: the best of some, warmed up."""
        ids = self._cohort.ids[:PROBED_CLIENTS]
        cohort = Cohort(ids, self._cohort.data.take(range(len(ids))))
        sketch = self._sketch(1)

        def once(engine: Engine) -> None:
            self._train(engine, sketch, cohort)
            evaluate(engine, sketch, self._broadcast, ids, 0)

        engine = self._engine(option, len(ids))
        return min([self._seconds(option, engine, once) for _ in range(1 + REPEATS)][1:])

    def affordable(self, taken: dict[Option, float], rounds: int) -> tuple[int, int]:
        """(repeats, batches) of a comparison on whole cohorts that takes a small share of the run's time."""
        steps = self._steps()
        # A batch of the cohort, from one of training and one of scoring for a few of its clients.
        ratio = len(steps) / min(len(steps), PROBED_CLIENTS) / 2
        run = rounds * ratio * min(taken.values()) * sum(steps) / len(steps)
        seconds = min(max(LEAST, SHARE * run), MOST)
        batches = seconds / (ratio * sum(taken.values())) - 1  # one to warm up
        most = max(steps)
        return min(REPEATS, max(1, int(batches / most))), max(0, min(most, int(batches)))

    def rounds(self, options: Iterable[Option], repeats: int, batches: int) -> dict[Option, float]:
        """Seconds that a client phase would take, told from few batches: the best of some, by turns, for the
        machine may have other work."""
        first, sketch = self._sketch(1), self._sketch(batches)
        engines = {option: self._engine(option, len(self._cohort.ids)) for option in options}
        for option, engine in engines.items():  # the room for a whole cohort's answers is made now
            self._seconds(option, engine, lambda engine: self._train(engine, first, self._cohort))
        longer = {option: self._longer(engine, batches) for option, engine in engines.items()}
        found = dict.fromkeys(engines, math.inf)
        for _ in range(repeats):
            for option in _close(found, CLOSE[1]):
                taken = self._seconds(option, engines[option], lambda e: self._train(e, sketch, self._cohort))
                found[option] = min(found[option], taken * longer[option])
        return found

    def _longer(self, engine: Engine, batches: int) -> float:
        """A whole round, in rounds of few batches: by clients' steps, and what each of a chunk's costs."""
        steps = self._steps()
        chunks = engine.cut(self._cohort.train.sizes.tolist(), self._federation.method.local)

        def price(most: int) -> float:
            taken = [[min(steps[at], most) for at in chunk] for chunk in chunks]
            return sum(sum(counts) + engine.overhead * max(counts) for counts in taken)

        return price(max(steps)) / max(1.0, price(batches))

    def _steps(self) -> list[int]:
        """Of each client in a round."""
        recipe, sizes = self._federation.method.local, self._cohort.train.sizes.tolist()
        return [recipe.steps or recipe.epochs * math.ceil(n / (recipe.batch_size or n or 1)) for n in sizes]

    def _sketch(self, batches: int) -> _Sketch:
        return _Sketch(**vars(self._federation), batches=batches)

    def _train(self, engine: Engine, sketch: _Sketch, cohort: Cohort) -> None:
        member = Member(replace(sketch, data=cohort.data), self._broadcast, cohort, self._round)
        client_phase(engine, member)

    def _engine(self, option: Option, clients: int) -> Engine:
        """For so many at once."""
        chunk = option.chunk(clients, self._chunk)
        if (option, chunk) not in self._engines:
            device = self._federation.task.device
            self._engines[option, chunk] = build(option.engine, device, chunk, option.processes)
        return self._engines[option, chunk]

    def _seconds(self, option: Option, engine: Engine, measured: Callable[[Engine], None]) -> float:
        torch.set_num_threads(option.threads)
        begin = time.perf_counter()
        measured(engine)
        seconds = time.perf_counter() - begin
        self._federation.store.forget()
        return seconds
