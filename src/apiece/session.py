"""A run from its experiment: prepare, carry out, resume."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from apiece import data as datasets
from apiece import experiment as experiments
from apiece import folder as files
from apiece import models, random, tree
from apiece.choice import Choice, build, choose, pick_device
from apiece.data.federated import Examples, Federated
from apiece.engines.base import Engine, Federation
from apiece.errors import ApieceError
from apiece.evaluate import Pair, evaluate, summarize
from apiece.evaluate import models as client_models
from apiece.experiment import AUTO, Experiment
from apiece.importing import anchored
from apiece.method import Server
from apiece.models.validate import problems, validate
from apiece.params import Params
from apiece.record import Groups, Record, Scored
from apiece.sample import SAMPLERS
from apiece.shard import Rows, Shard
from apiece.store import Store
from apiece.task import Task
from apiece.train import Closed, Training, assemble, refuse_nan

log = logging.getLogger("apiece")

Progress = Callable[[int, Groups | None], None]  # rounds done, the scores if they were just measured

PARTITION_COLUMNS = ("client", "name", "seen", "split", "label", "count")


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
        f = self.federation
        task, broadcast = f.task.for_clients(), self.training.broadcast(server, round)
        key = random.as_key(random.fold(f.root, "newcomer"), self.engine.device)
        return f.method.initial(task, broadcast, f.method.init_client(task, broadcast, f.start, key))

    def scores(self, server: Server, round: int) -> list[Scored]:
        """Every client's scores after `round` rounds, and their figures: the run's own clients first."""
        broadcast = self.training.broadcast(server, round)
        found = []
        for test, federation in {"test": self.federation, **self.also}.items():
            data = federation.data
            pairs = evaluate(self.engine, federation, broadcast, list(range(data.population)), round)
            headline = pairs[federation.task.headline]
            groups = {
                "seen": summarize(headline, data.seen, data.test.sizes),
                "unseen": summarize(headline, ~data.seen, data.test.sizes),
            }
            found.append(Scored(test, data, pairs, groups))
        return found


class Result(NamedTuple):
    """A finished run."""

    summary: dict[str, Any]
    pairs: dict[str, Pair]  # metric → every client's initial and personalized score
    session: Session
    server: Server

    def model(self, client: int) -> Params:
        """The personalized model of one client."""
        s = self.session
        broadcast = s.training.broadcast(self.server, s.experiment.rounds)
        return client_models(s.engine, s.federation, broadcast, [client], s.experiment.rounds)[0][1]


def run(
    experiment: Experiment,
    out: str | Path | None = None,
    progress: Progress = lambda done, scores: None,
    data: Examples | None = None,
) -> Result:
    """Run an experiment; with `out`, leave all its files there.

    `data`: what `from_arrays` made, instead of what experiment.data names; it is saved in `out` as data.npz.
    """
    experiment = _anchored(experiment).with_proxy()
    if out is None:
        return carry_out(prepare(experiment, None, None, data), progress)
    folder = Path(out)
    with _claimed(folder):
        if data is not None:
            saved = folder.resolve() / "data.npz"
            experiment = replace(experiment, data=str(saved), client_column="client", label_column="label")
        session = prepare(experiment, folder, None, data)
        if data is not None:
            datasets.save(saved, data)
        files.write_text(folder / "experiment.toml", session.experiment.to_toml())
        rows = datasets.partition_table(session.federation.data)
        files.write_csv(folder / "partition.csv", PARTITION_COLUMNS, rows)
        files.write_json(folder / "engine.json", asdict(session.choice))
        return carry_out(session, progress)


def resume(out: str | Path, progress: Progress = lambda done, scores: None) -> Result:
    """Go on with an interrupted run; its files end as if it had never been interrupted."""
    folder = Path(out)
    if not folder.is_dir():
        raise ApieceError(f"there is no folder {folder}")
    if not (folder / "experiment.toml").exists():
        raise ApieceError(f"{folder} holds no run: there is no experiment.toml in it")
    with files.locked(folder):
        if (folder / "summary.json").exists():
            raise ApieceError(f"{folder} is finished: see it with: apiece report {folder} -o report.html")
        return carry_out(reopen(folder), progress)


def run_or_resume(experiment: Experiment, folder: Path, progress: Progress) -> None:
    """Run an experiment unless the folder holds it finished; go on if it holds it interrupted."""
    if not (folder / "experiment.toml").exists():
        run(experiment, folder, progress)
        return
    asked = _anchored(experiment).with_proxy()
    seen = int(load_data(asked).seen.sum())
    if experiments.read(folder / "experiment.toml") != asked.resolved(seen):
        raise ApieceError(f"{folder} holds another experiment: choose another folder with --out")
    if not (folder / "summary.json").exists():
        resume(folder, progress)


def reopen(folder: Path) -> Session:
    """The session of a run folder, with the engine it recorded."""
    if not (folder / "experiment.toml").exists():
        raise ApieceError(f"{folder} holds no run: there is no experiment.toml in it")
    experiment = experiments.read(folder / "experiment.toml")
    recorded = folder / "engine.json"
    try:
        choice = Choice(**json.loads(recorded.read_text())) if recorded.exists() else None
    except (TypeError, ValueError) as error:
        raise ApieceError(
            f"{recorded} is damaged: {error}. Delete it to have the engine chosen again."
        ) from error
    session = prepare(experiment, folder, choice)
    rows = datasets.partition_table(session.federation.data)
    if choice is None:
        files.write_csv(folder / "partition.csv", PARTITION_COLUMNS, rows)
        files.write_json(recorded, asdict(session.choice))
    elif (
        choice.data != _fingerprint(session.federation.data)
        or files.csv_text([PARTITION_COLUMNS, *rows]) != (folder / "partition.csv").read_text()
    ):
        raise ApieceError(
            f"the data has changed since {folder} was begun. "
            f"Restore the data of {experiment.data!r}, or start a new run."
        )
    return session


def _anchored(experiment: Experiment) -> Experiment:
    """The experiment with its paths made absolute, so that it can be resumed from anywhere."""

    def place(text: str) -> str:
        return str(Path(text).resolve()) if text else text

    return replace(
        experiment,
        data=datasets.anchored(experiment.data),
        also=tuple(datasets.anchored(name) for name in experiment.also),
        start=place(experiment.start),
        prior=place(experiment.prior),
        method=anchored(experiment.method),
        model=anchored(experiment.model),
    )


@contextmanager
def _claimed(folder: Path) -> Iterator[None]:
    """An output folder that is ours alone; if nothing comes of the run, it is gone again."""
    if (folder / "experiment.toml").exists():
        finished = (folder / "summary.json").exists()
        mend = "" if finished else f", or continue it with: apiece resume {folder}"
        raise ApieceError(f"{folder} already holds a run: choose another folder with --out{mend}")
    if folder.exists() and not folder.is_dir():
        raise ApieceError(f"{folder} is a file: choose another folder with --out")
    made = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    with files.locked(folder):
        if any(path.suffix != ".draft" and path.name != ".lock" for path in folder.iterdir()):
            raise ApieceError(f"{folder} is not empty and holds no run: choose another folder with --out")
        try:
            yield
        except BaseException:
            if made and not (folder / "experiment.toml").exists():
                shutil.rmtree(folder)
            raise


def load_data(experiment: Experiment, examples: Examples | None = None) -> Federated:
    return datasets.prepare(
        experiment.data,
        partition=experiment.partition,
        clients=experiment.clients,
        test=experiment.test,
        unseen=experiment.unseen,
        key=random.fold(experiment.partition_seed, "partition"),
        proxy=experiment.proxy,
        client_column=experiment.client_column,
        label_column=experiment.label_column,
        examples=examples,
    )


def prepare(
    experiment: Experiment, folder: Path | None, choice: Choice | None, examples: Examples | None = None
) -> Session:
    """Load the data, build the task and the method, choose what is to be chosen."""
    device = pick_device(experiment.device if choice is None else choice.device)
    # Convolutions in TF32 would break the agreement of engines; matmuls are fp32 by default.
    torch.backends.cudnn.allow_tf32 = False
    data = load_data(experiment, examples).to(device)
    seen = int(data.seen.sum())
    if experiment.cohort > seen:
        raise ApieceError(
            f"a cohort of {experiment.cohort} cannot be drawn from {seen} seen clients "
            f"({data.population} clients, {data.population - seen} of them unseen): "
            f"lower --cohort, or raise --clients"
        )
    _tell_small_clients(data)
    experiment = experiment.resolved(seen)
    task = models.build(experiment.model, data.input_shape, data.classes, device)
    engines = _engines(task, experiment.engine, data)
    method = experiment.build_method()
    root = random.fold(experiment.seed, "apiece")
    start = task.init(random.fold(root, "params"))
    if experiment.prior:
        task = replace(task, prior=load_params(experiment.prior, start))
    if experiment.start:
        start = load_params(experiment.start, start)
    if len(data.proxy):
        task = replace(task, proxy=_proxy(data, root))
    place = None if folder is None else folder / "checkpoint"

    def store(state: tree.Tree) -> Store:
        kind = choice.store if choice is not None else _store_kind(experiment.store, state, data.population)
        if kind == "mapped" and place is None:
            raise ApieceError("a mapped store needs an output folder (--out) to keep clients' states in")
        return Store(state, data.population, device, place, kind == "mapped")

    trained, cohort = (data.pool(), 1) if method.pooled else (data, experiment.cohort)
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
        name, threads, reason = choose(training, server, engines, experiment.chunk, experiment.threads)
        kind = "mapped" if federation.store.mapped else "memory"
        choice = Choice(
            name, str(device), experiment.chunk, threads, kind, _fingerprint(data), torch.__version__, reason
        )
    torch.set_num_threads(choice.threads)
    engine = build(choice.engine, device, choice.chunk)
    metrics = tuple(training.shapes.of(training.broadcast(server, 0)).metrics)
    record = Record(folder, experiment.id, metrics, experiment.also, experiment.target)
    also = {name: _newcomers(name, experiment, federation) for name in experiment.also}
    training = replace(training, engine=engine)
    return Session(experiment, choice, engine, federation, training, server, record, also)


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
    device = data.y.device
    key = random.as_key(random.fold(root, "proxy"), device)
    place = torch.as_tensor(data.proxy, device=device)
    return Shard(data.x, data.y, Rows(place, random.as_key(len(place), device), key, key), True)


def _newcomers(name: str, experiment: Experiment, federation: Federation) -> Federation:
    """Another dataset's clients, dealt out and split as the run's own; none of them is ever trained on."""
    data = load_data(replace(experiment, data=name, proxy=0.0)).to(federation.task.device)
    if (data.input_shape, data.classes) != (federation.data.input_shape, federation.data.classes):
        raise ApieceError(
            f"{name} has other inputs or classes than {experiment.data}: the model does not fit"
        )
    store = Store(federation.store.template, data.population, federation.task.device, None, mapped=False)
    return replace(federation, data=data, store=store, root=random.fold(federation.root, "also", name))


@torch.no_grad()
def carry_out(session: Session, progress: Progress) -> Result:
    """All rounds from the last checkpoint on, evaluated, logged and checkpointed as they close."""
    s, e, record, store = session, session.experiment, session.record, session.federation.store
    begin, server = record.open(session.server, session.engine.device)
    store.open(begin)
    scored: list[Scored] = []
    if begin == 0:
        scored = s.scores(server, 0)
        record.beginning(scored)
    progress(begin, scored[0].groups if scored else None)
    pending: list[Closed] = []
    for closed in s.training.rounds(server, begin, e.rounds):
        server, done = closed.server, closed.round.index + 1
        pending.append(closed._replace(server=None))
        measure = done % e.evaluate_every == 0 or done == e.rounds
        save = done % e.checkpoint_every == 0 or done == e.rounds
        scored = []
        # On a GPU nothing is read back between these points: the rounds queue up behind each other.
        if measure or save or s.engine.device.type == "cpu":
            if e.on_nan == "stop":
                refuse_nan(pending, _kept(record.folder, e))
            if measure:
                scored = s.scores(server, done)
                record.clients(scored)
            record.rounds(pending, scored)
            pending = []
        if save:
            record.checkpoint(done, server, store)
        progress(done, scored[0].groups if scored else None)
    if not scored:
        scored = s.scores(server, e.rounds)
        record.clients(scored)
    facts = {
        "method": e.method,
        "seed": e.seed,
        "engine": s.choice.engine,
        "device": s.choice.device,
        "rounds": e.rounds,
        "metric": s.federation.task.headline,
        "id": e.id,
    }
    if record.folder is not None:
        write_model(record.folder / "model", s, s.newcomer(server, e.rounds))
    return Result(record.summary(facts, scored), scored[0].pairs, s, server)


def write_model(folder: Path, session: Session, params: Params) -> None:
    """A model and what one needs to load it."""
    data = session.federation.data
    card = {
        "model": session.experiment.model,
        "input_shape": list(data.input_shape),
        "classes": data.classes,
        "label_names": list(data.label_names),
    }
    files.write_tensors(folder / "initial.safetensors", dict(params))
    files.write_json(folder / "model.json", card)


def _kept(folder: Path | None, experiment: Experiment) -> str:
    if folder is None:
        return "Nothing was saved: no output folder was given."
    if not any((folder / "checkpoint").glob("round-*")):
        return "There was no checkpoint yet."
    return f"The last good checkpoint stays in {folder / 'checkpoint'}."


def _fingerprint(data: Federated) -> str:
    """A hash of the examples."""
    digest = hashlib.sha256()
    for array in (*tree.leaves(data.x), data.y):
        digest.update(array.cpu().numpy())
    return digest.hexdigest()[:16]


def _engines(task: Task, asked: str, data: Federated) -> dict[str, str]:
    """The engines allowed, each with why it cannot run the model, or ''; one that is asked for must."""
    validate(task, asked, data.input_shape, data.classes)
    if asked != AUTO:
        return {asked: ""}
    found = problems(task, "vectorized", data.input_shape, data.classes)
    return {"vectorized": found[0].why if found else "", "sequential": ""}


def _store_kind(asked: str, state: tree.Tree, population: int) -> str:
    if asked != AUTO:
        return asked
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return "mapped" if tree.nbytes(state) * population > memory // 4 else "memory"


def _tell_small_clients(data: Federated) -> None:
    empty, single = int((data.train.sizes == 0).sum()), int((data.train.sizes == 1).sum())
    unscored = int((data.test.sizes == 0).sum())
    if empty or single or unscored:
        log.warning(
            "%d clients have no training example, %d have one, %d have no test example: "
            "all are kept, and scored NaN where there is nothing to score",
            empty,
            single,
            unscored,
        )
