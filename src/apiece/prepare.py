"""An experiment made ready to run: its data, task, method, store and engine in their places."""

from __future__ import annotations

import logging
import multiprocessing
import os
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from apiece import data as datasets
from apiece import models, random, tree
from apiece.augment import AUGMENTATIONS
from apiece.choice import Choice, Option, build, choose, fitting, pick_device, rebuild
from apiece.data.federated import Clients, Examples, Federated, Ints, resident
from apiece.data.streamed import Streamed, fits, free_memory, streamed
from apiece.engines.base import Engine, Federation
from apiece.engines.lowering import fastest, lowered
from apiece.engines.pool import share
from apiece.engines.processes import cpus, keep_memory, obstacle
from apiece.engines.ray import CPU, Cluster, inside, join, measured_layers, serving
from apiece.errors import ApieceError
from apiece.evaluate import chosen, pool, score
from apiece.experiment import AUTO, Experiment
from apiece.importing import code
from apiece.method import Method, Server, newcomer
from apiece.models.validate import problems, validate
from apiece.params import Params
from apiece.record import Record, Scored, summaries
from apiece.sample import SAMPLERS
from apiece.shard import Rows, Shard
from apiece.store import Store
from apiece.task import Task
from apiece.train import Training, assemble
from apiece.wrappers.stages import Staged

log = logging.getLogger("apiece")

WITNESSES = 8  # clients whose examples stand for all where those are made when asked for
FAR = 10.0  # from 0: features that train badly


@dataclass(frozen=True)
class Session:
    """An experiment made ready: data, task, method and engine in their places."""

    experiment: Experiment
    choice: Choice
    engine: Engine
    federation: Federation
    training: Training
    server: Server  # before round 0
    record: Record
    also: dict[str, Federation]  # other datasets' clients, all newcomers

    def newcomer(self, server: Server, round: int) -> Params:
        """The initial model of a client never met."""
        f, broadcast = self.federation, self.training.broadcast(server, round)
        key = random.as_key(random.fold(f.root, "newcomer"), self.engine.device)
        return newcomer(f.method, f.task, broadcast, f.start, key)

    def scored(self, data: Clients, round: int) -> Ints:
        """The clients of `data` that are scored after so many rounds: the same for all methods and seeds."""
        e = self.experiment
        ended = round == e.rounds and e.evaluate_at_end >= 0
        count = e.evaluate_at_end if ended else e.evaluate_clients
        return chosen(data, count, random.fold(e.partition_seed, "scored"), e.evaluate_group)

    def scores(self, server: Server, round: int) -> list[Scored]:
        """The clients' scores after `round` rounds, and their figures: the run's own clients first."""
        broadcast = self.training.broadcast(server, round)
        found = []
        for test, federation in {"test": self.federation, **self.also}.items():
            data = federation.data
            ids = self.scored(data, round)
            pairs, outputs = score(self.engine, federation, broadcast, ids.tolist(), round)
            groups, seen = summaries(pairs[federation.task.headline], data, ids), data.seen[ids]
            parts = {"seen": seen, "unseen": ~seen} if outputs else {}
            pooled = {name: pool(federation.task, outputs, part) for name, part in parts.items()}
            found.append(Scored(test, data, ids, pairs, groups, pooled))
        return found


_kept: ContextVar[dict[Hashable, Clients] | None] = ContextVar("data kept", default=None)


@contextmanager
def loading_once() -> Iterator[None]:
    """Runs of the same data that follow each other load it once: the last one's is kept."""
    token = _kept.set({})
    try:
        yield
    finally:
        _kept.reset(token)


def load_data(experiment: Experiment, examples: Examples | None = None) -> Clients:
    asked: dict[str, Any] = {
        "partition": experiment.partition,
        "clients": experiment.clients,
        "test": experiment.test,
        "unseen": experiment.unseen,
        "key": random.fold(experiment.partition_seed, "partition"),
        "proxy": experiment.proxy,
        "testers": experiment.testers,
        "unseen_pick": experiment.unseen_pick,
        "data_dir": experiment.data_dir,
        "client_column": experiment.client_column,
        "label_column": experiment.label_column,
    }
    load = partial(datasets.prepare, experiment.data, **asked, examples=examples)
    kept = _kept.get()
    if kept is None or examples is not None:
        return load()
    key = experiment.data, *asked.values()
    if key not in kept:
        kept.clear()
        kept[key] = load()
    return kept[key]


def prepare(
    experiment: Experiment,
    folder: Path | None,
    choice: Choice | None,
    examples: Examples | None = None,
    dealt: Clients | None = None,
    beside: Session | None = None,
    replicas: int = 1,
) -> Session:
    """Load the data, unless it is `dealt` out already; build task and method, choose what is to be chosen.

    `beside`: a session of the same experiment with another seed, whose data, model and engine are shared;
    `replicas`: how many of them there will be, this one included.
    """
    if beside is not None:
        choice, dealt = beside.choice, beside.federation.data
    remote = inside(experiment.engine) != ""
    asked = experiment.device if choice is None else choice.device
    device = CPU if remote else pick_device(asked)  # the server's, and the clients' unless on a cluster
    _settle(device, experiment.precision)
    data = load_data(experiment, examples) if dealt is None else dealt
    _check(experiment, data)
    experiment = experiment.resolved(len(data.seen_ids), data.partition)
    method = experiment.build_method()
    held = fingerprint(data)  # while the examples are on the host
    data = _placed(data, device, choice.streamed if choice else _too_large(data, device, method))
    cluster = _cluster(experiment, data) if remote and choice is None else None
    computing = torch.device(choice.device) if choice else cluster.device if cluster else device
    if dealt is None:
        _tell_oddities(data)
        _tell_idle_stage(method, experiment.rounds)
    task = models.build(experiment.model, data.input_shape, data.classes, device)
    if computing.type == "cuda" and experiment.precision == "bf16":
        task = replace(task, precision=torch.bfloat16)
    task = replace(task, augment=AUGMENTATIONS[experiment.augment])
    engines = _engines(task, experiment, data)
    layers = choice.layers if choice else _layers(task, engines, method, experiment, data, cluster, replicas)
    if beside is not None:
        task = replace(task, module=beside.federation.task.module)
    elif not remote:
        task = lowered(task, layers)
    root = random.fold(experiment.seed, "apiece")
    task, start = _furnished(task, experiment, data, root)
    place = None if folder is None else folder / "checkpoint"

    def store(state: tree.Tree) -> Store:
        kind = (
            choice.store
            if choice is not None
            else _store_kind(experiment.store, state, data.population, device)
        )
        if kind == "mapped" and place is None:
            raise ApieceError("a mapped store needs an output folder (--out) to keep clients' states in")
        return Store(state, data.population, device, place, kind == "mapped")

    trained, cohort = data, experiment.cohort
    if method.pooled:
        trained, cohort = resident(data, f"--method {experiment.method}").pool(), 1
    training, server = assemble(
        build("sequential", device, 1),
        method,
        task,
        start,
        trained,
        cohort,
        root,
        SAMPLERS[experiment.sampler],
        store,
    )
    federation = replace(training.federation, data=data)
    if choice is None:
        option, chunk, reason = _chosen(training, server, engines, experiment, cluster)
        choice = Choice(
            option.engine,
            str(computing),
            chunk,
            option.threads,
            option.processes,
            layers,
            "mapped" if federation.store.mapped else "memory",
            held,
            torch.__version__,
            reason + _told_streamed(data),
            isinstance(data, Streamed),
            code(experiment.method, experiment.model),
        )
    torch.set_num_threads(choice.threads)
    engine = beside.engine if beside else rebuild(choice, experiment.processes, experiment.address)
    metrics = tuple(training.shapes.of(training.broadcast(server, 0)).metrics)
    record = Record(folder, experiment.id, metrics, experiment.also, experiment.target)
    also = {name: _newcomers(name, experiment, federation) for name in experiment.also}
    return Session(
        experiment, choice, engine, federation, replace(training, engine=engine), server, record, also
    )


def _settle(device: torch.device, precision: str) -> None:
    """What holds for the whole process."""
    if device == CPU:
        keep_memory()
    elif device.index is not None:  # streams and Triton's kernels are the current device's
        torch.cuda.set_device(device)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "tf32"
    torch.backends.cudnn.deterministic = True


def _check(experiment: Experiment, data: Clients) -> None:
    seen = len(data.seen_ids)
    if experiment.cohort > seen:
        raise ApieceError(
            f"a cohort of {experiment.cohort} cannot be drawn from {seen} seen clients "
            f"({data.population} clients, {data.population - seen} of them unseen): "
            f"lower --cohort, or have more clients"
        )
    if experiment.sampler != "uniform":
        resident(data.kept, f"--sampler {experiment.sampler}")


def _too_large(data: Clients, device: torch.device, method: Method) -> bool:
    """Must the cohorts' examples be copied to the device one after another? A pool is needed whole."""
    if not isinstance(data, Federated) or device.type != "cuda" or method.pooled:
        return False
    return data.y.device.type == "cpu" and not fits(tree.nbytes((data.x, data.y)), free_memory(device))


def _placed(data: Clients, device: torch.device, stream: bool) -> Clients:
    """The data on the device, or streamed to it."""
    return streamed(data, device) if stream and isinstance(data, Federated) else data.to(device)


def _told_streamed(data: Clients) -> str:
    if not isinstance(data, Streamed):
        return ""
    size = tree.nbytes((data.host.x, data.host.y)) / 1e9
    return f"; the examples, {size:.3g} GB, stay in the host's memory: a cohort's are copied to the device"


def _cluster(e: Experiment, data: Clients) -> Cluster:
    return join(e.address, e.device, e.processes, e.threads, data)


def _furnished(task: Task, experiment: Experiment, data: Clients, root: int) -> tuple[Task, Params]:
    """The task with the server's own prior and proxy, and the params to start from."""
    start = task.init(random.fold(root, "params"))
    if experiment.prior:
        task = replace(task, prior=load_params(experiment.prior, start))
    if experiment.start:
        start = load_params(experiment.start, start)
    kept = data.kept
    if isinstance(kept, Federated) and len(kept.proxy):
        task = replace(task, proxy=_proxy(data.brought(kept.holder("proxy", kept.proxy)), root))
    return task, start


def load_params(place: str, like: Params) -> Params:
    """The initial model of a run's folder, or the model in a .safetensors file."""
    path = Path(place) / "model" / "initial.safetensors" if Path(place).is_dir() else Path(place)
    try:
        found = Params(load_file(path, device=str(next(iter(like.values())).device)))
    except (OSError, SafetensorError) as error:
        raise ApieceError(f"cannot read a model from {path}: {error}. Is the run finished?") from error
    shapes = {name: tuple(t.shape) for name, t in found.items()}
    wanted = {name: tuple(t.shape) for name, t in like.items()}
    if shapes != wanted:
        raise ApieceError(f"the model in {path} is another one: it holds {shapes}, needed are {wanted}")
    return found


def _proxy(data: Federated, root: int) -> Shard:
    """The examples of the only client, who is the server."""
    device = data.y.device
    key = random.as_key(random.fold(root, "proxy"), device)
    place = torch.as_tensor(data.train[0], device=device)
    return Shard(data.x, data.y, Rows(place, random.as_key(len(place), device), key, key), True)


def _newcomers(name: str, experiment: Experiment, federation: Federation) -> Federation:
    """Another dataset's clients, dealt out and split as the run's own; none of them is ever trained on."""
    found = load_data(replace(experiment, data=name, proxy=0.0))
    data = _placed(found, federation.task.device, isinstance(federation.data, Streamed))
    if (data.input_shape, data.classes) != (federation.data.input_shape, federation.data.classes):
        raise ApieceError(
            f"{name} has other inputs or classes than {experiment.data}: the model does not fit"
        )
    return federation.newcomers(data, "also", name)


def fingerprint(data: Clients) -> str:
    """A hash of the examples that are in memory when a few clients' are: of all, where they are resident."""
    kept = data.kept
    held = kept if isinstance(kept, Federated) else kept.take(range(min(data.population, WITNESSES)))
    return held.digest


def _engines(task: Task, experiment: Experiment, data: Clients) -> dict[str, str]:
    """The engines allowed, each with why it cannot run the model, or ''; one that is asked for must."""
    asked = inside(experiment.engine) or experiment.engine
    validate(task, asked, data.input_shape, data.classes, (data.x, data.y))
    if asked != AUTO:
        return {asked: ""}
    found = problems(task, "vectorized", data.input_shape, data.classes, (data.x, data.y))
    engines = {"vectorized": found[0].why if found else "", "sequential": ""}
    if inside(experiment.engine):
        return engines
    # Who says how many threads, or is one of several processes already, leaves the other cores to others.
    alone = experiment.threads == 0 and multiprocessing.parent_process() is None and not serving()
    count = experiment.processes or (cpus() if alone else 1)
    if min(count, experiment.cohort) > 1 and not obstacle(task.device):
        engines["processes"], engines["processes(vectorized)"] = "", engines["vectorized"]
    return engines


def _chosen(
    training: Training, server: Server, engines: dict[str, str], e: Experiment, cluster: Cluster | None
) -> tuple[Option, int, str]:
    """How clients are computed, how many in a chunk at the most, and why so."""
    if cluster is None:
        processes = e.processes or cpus()
        option, reason = choose(training, server, engines, e.chunk, e.threads, processes, e.rounds)
        if option.engine != "vectorized" or training.federation.task.device.type != "cuda":
            return option, option.chunk(training.cohort_size, e.chunk), reason
        chunk = fitting(training, server, e.chunk)
        told = (
            f"; {e.chunk} clients at once do not fit into its memory, {chunk} do" if chunk < e.chunk else ""
        )
        return option, chunk, reason + told
    device, actors, threads = cluster
    option, reason = choose(training, server, engines, e.chunk, threads, 1, e.rounds, device)
    chunk = share(training.cohort_size, actors, option.engine, e.chunk)
    return Option(f"ray({option.engine})", threads, actors), chunk, reason


def _layers(
    task: Task,
    engines: dict[str, str],
    method: Method,
    experiment: Experiment,
    data: Clients,
    cluster: Cluster | None,
    replicas: int,
) -> dict[str, str]:
    """How the layers are computed where clients are computed together, by measuring on some examples."""
    device = cluster.device if cluster else task.device
    if device.type != "cuda" or engines.get("vectorized") != "":
        return {}
    held = data.take(data.seen_ids[:64].tolist())
    rows = torch.from_numpy(held.train.rows[: method.local.batch_size or 64]).to(task.device)
    x, y = tree.take((held.x, held.y), rows)
    if cluster is None:
        return fastest(task, x, y, min(experiment.cohort * replicas, experiment.chunk))
    chunk = share(experiment.cohort, cluster.actors, "vectorized", experiment.chunk)
    return measured_layers(cluster, task, x, y, chunk)


def _store_kind(asked: str, state: tree.Tree, population: int, device: torch.device) -> str:
    """`auto` maps what would take more than a quarter of the memory it would lie in."""
    if asked != AUTO:
        return asked
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if device.type == "cuda":
        memory = torch.cuda.mem_get_info(device)[1]
    return "mapped" if tree.nbytes(state) * population > memory // 4 else "memory"


def _tell_idle_stage(method: Method, rounds: int) -> None:
    if isinstance(method, Staged) and method.switch >= rounds:
        log.warning(
            "the first stage lasts %d rounds and the run %d: the second is never trained; "
            "raise --rounds, or shorten the first with --set switch=...",
            method.switch,
            rounds,
        )


def _tell_oddities(data: Clients) -> None:
    _tell_small_clients(data)
    if data.features and isinstance(data, Federated):
        _tell_odd_columns(data)


def _tell_small_clients(data: Clients) -> None:
    empty = single = unscored = 0
    for train, test in map(data.sizes, data.blocks()):
        empty, single = empty + int((train == 0).sum()), single + int((train == 1).sum())
        unscored += int((test == 0).sum())
    counts = {"no training example": empty, "one training example": single, "no test example": unscored}
    told = ", ".join(f"{count} have {what}" for what, count in counts.items() if count)
    if told:
        log.warning(
            "of %d clients %s: all are kept, and scored NaN where there is nothing to score",
            data.population,
            told,
        )


def _tell_odd_columns(data: Federated) -> None:
    """What trains badly unseen: columns in units of their own, classes that are a slip of the pen."""
    rows = torch.from_numpy(data.train.rows)
    x, y = data.x[rows].double(), data.y[rows]
    mean, std = x.mean(0), x.std(0)
    far = torch.maximum(mean.abs(), std) > FAR
    if far.any():
        columns = [
            f"{name} (mean {m:.4g}, standard deviation {s:.3g})"
            for name, m, s, odd in zip(data.features, mean, std, far, strict=True)
            if odd
        ]
        more = ", …" if len(columns) > 3 else ""
        log.warning(
            "columns far from 0, on which models train badly: %s%s: standardize them before (docs/data.md)",
            ", ".join(columns[:3]),
            more,
        )
    counts = torch.bincount(y, minlength=data.classes).tolist()
    rare = [name for name, count in zip(data.label_names, counts, strict=True) if count < 2]
    if rare:
        log.warning("classes with less than two training examples: %s: are they labels?", ", ".join(rare[:5]))
