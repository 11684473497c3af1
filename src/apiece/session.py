"""A run from its experiment: prepare, carry out, resume."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from apiece import data as datasets
from apiece import experiment as experiments
from apiece import folder as files
from apiece import models, random, tree
from apiece.choice import Choice, build, choose, pick_device
from apiece.data.federated import Federated
from apiece.engines.base import Engine, Federation
from apiece.errors import ApieceError
from apiece.evaluate import Pair, evaluate, summarize
from apiece.evaluate import models as client_models
from apiece.experiment import AUTO, Experiment
from apiece.method import Server
from apiece.models.validate import problems, validate
from apiece.params import Params
from apiece.record import Groups, Record
from apiece.sample import uniform
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
    lock: int | None = None  # held while the run lasts

    def newcomer(self, server: Server, round: int) -> Params:
        """The initial model of a client never met."""
        f = self.federation
        task, broadcast = f.task.for_clients(), self.training.broadcast(server, round)
        key = random.as_key(random.fold(f.root, "newcomer"), self.engine.device)
        return f.method.initial(task, broadcast, f.method.init_client(task, broadcast, f.start, key))

    def scores(self, server: Server, round: int) -> tuple[dict[str, Pair], Groups]:
        """Every client's scores after `round` rounds, and their figures for the headline metric."""
        data = self.federation.data
        broadcast = self.training.broadcast(server, round)
        ids = list(range(data.population))
        pairs = evaluate(self.engine, self.federation, broadcast, ids, round)
        headline = pairs[self.federation.task.headline]
        groups = {
            "seen": summarize(headline, data.seen, data.test.sizes),
            "unseen": summarize(headline, ~data.seen, data.test.sizes),
        }
        return pairs, groups


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
    experiment: Experiment, out: str | Path | None = None, progress: Progress = lambda done, scores: None
) -> Result:
    """Run an experiment; with `out`, leave all its files there."""
    folder = None if out is None else Path(out)
    held = None if folder is None else _claim(folder)
    session = replace(prepare(_anchored(experiment), folder, None), lock=held)
    if folder is not None:
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
    held = files.lock(folder)
    if (folder / "summary.json").exists():
        raise ApieceError(f"{folder} is finished: see it with: apiece report {folder} -o report.html")
    return carry_out(replace(reopen(folder), lock=held), progress)


def run_or_resume(experiment: Experiment, folder: Path, progress: Progress) -> None:
    """Run an experiment unless the folder holds it finished; go on if it holds it interrupted."""
    if not (folder / "experiment.toml").exists():
        run(experiment, folder, progress)
        return
    asked = _anchored(experiment)
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
    choice = Choice(**json.loads(recorded.read_text())) if recorded.exists() else None
    session = prepare(experiment, folder, choice)
    rows = datasets.partition_table(session.federation.data)
    if choice is None:
        files.write_csv(folder / "partition.csv", PARTITION_COLUMNS, rows)
        files.write_json(recorded, asdict(session.choice))
    elif files.csv_text([PARTITION_COLUMNS, *rows]) != (folder / "partition.csv").read_text():
        raise ApieceError(
            f"the data has changed since {folder} was begun: its partition differs from partition.csv. "
            f"Restore the data of {experiment.data!r}, or start a new run."
        )
    return session


def _anchored(experiment: Experiment) -> Experiment:
    """The experiment with its paths made absolute, so that it can be resumed from anywhere."""

    def anchor(text: str) -> str:
        path, colon, name = text.rpartition(":")
        file = Path(path if colon else name)
        return f"{file.resolve()}{colon}{name if colon else ''}" if file.exists() else text

    named: dict[str, Any] = {field: anchor(getattr(experiment, field)) for field in ("method", "model")}
    data = str(Path(experiment.data).resolve()) if Path(experiment.data).exists() else experiment.data
    return replace(experiment, data=data, **{k: v for k, v in named.items() if ":" in v})


def _claim(folder: Path) -> int:
    """Make an output folder ours, or say whose it is; its lock."""
    if (folder / "experiment.toml").exists():
        finished = (folder / "summary.json").exists()
        mend = "" if finished else f", or continue it with: apiece resume {folder}"
        raise ApieceError(f"{folder} already holds a run: choose another folder with --out{mend}")
    if folder.exists() and not folder.is_dir():
        raise ApieceError(f"{folder} is a file: choose another folder with --out")
    folder.mkdir(parents=True, exist_ok=True)
    held = files.lock(folder)
    if any(path.suffix != ".draft" and path.name != ".lock" for path in folder.iterdir()):
        raise ApieceError(f"{folder} is not empty and holds no run: choose another folder with --out")
    return held


def load_data(experiment: Experiment) -> Federated:
    return datasets.prepare(
        experiment.data,
        partition=experiment.partition,
        clients=experiment.clients,
        test=experiment.test,
        unseen=experiment.unseen,
        key=random.fold(experiment.partition_seed, "partition"),
        client_column=experiment.client_column,
        label_column=experiment.label_column,
    )


def prepare(experiment: Experiment, folder: Path | None, choice: Choice | None) -> Session:
    """Load the data, build the task and the method, choose what is to be chosen."""
    device = pick_device(experiment.device if choice is None else choice.device)
    # Convolutions in TF32 would break the agreement of engines; matmuls are fp32 by default.
    torch.backends.cudnn.allow_tf32 = False
    data = load_data(experiment).to(device)
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
    place = None if folder is None else folder / "checkpoint"

    def store(state: tree.Tree) -> Store:
        kind = choice.store if choice is not None else _store_kind(experiment.store, state, data.population)
        if kind == "mapped" and place is None:
            raise ApieceError("a mapped store needs an output folder (--out) to keep clients' states in")
        return Store(state, data.population, device, place, kind == "mapped")

    trained, cohort = (data.pool(), 1) if method.pooled else (data, experiment.cohort)
    training, server = assemble(
        build("sequential", device, 1), method, task, start, trained, cohort, root, uniform, store
    )
    federation = replace(training.federation, data=data)
    if choice is None:
        name, threads, reason = choose(training, server, engines, experiment.chunk, experiment.threads)
        kind = "mapped" if federation.store.mapped else "memory"
        choice = Choice(name, str(device), experiment.chunk, threads, kind, torch.__version__, reason)
    torch.set_num_threads(choice.threads)
    engine = build(choice.engine, device, choice.chunk)
    metrics = tuple(training.shapes.of(training.broadcast(server, 0)).metrics)
    record = Record(folder, experiment.id, metrics, experiment.target)
    return Session(experiment, choice, engine, federation, replace(training, engine=engine), server, record)


@torch.no_grad()
def carry_out(session: Session, progress: Progress) -> Result:
    """All rounds from the last checkpoint on, evaluated, logged and checkpointed as they close."""
    s, e, record, store = session, session.experiment, session.record, session.federation.store
    begin, server = record.open(session.server, session.engine.device)
    store.open(begin)
    pairs, groups = None, None
    if begin == 0:
        pairs, groups = s.scores(server, 0)
        record.beginning(groups)
    progress(begin, groups)
    pending: list[Closed] = []
    for closed in s.training.rounds(server, begin, e.rounds):
        server, done = closed.server, closed.round.index + 1
        pending.append(closed._replace(server=None))
        measure = done % e.evaluate_every == 0 or done == e.rounds
        save = done % e.checkpoint_every == 0 or done == e.rounds
        groups = None
        # On a GPU nothing is read back between these points: the rounds queue up behind each other.
        if measure or save or s.engine.device.type == "cpu":
            if e.on_nan == "stop":
                refuse_nan(pending, _kept(record.folder, e))
            if measure:
                pairs, groups = s.scores(server, done)
                record.clients(s.federation.data, pairs)
            record.rounds(pending, groups)
            pending = []
        if save:
            record.checkpoint(done, server, store)
        progress(done, groups)
    if pairs is None or groups is None:
        pairs, groups = s.scores(server, e.rounds)
        record.clients(s.federation.data, pairs)
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
    summary = record.summary(facts, groups)
    if s.lock is not None:
        os.close(s.lock)
    return Result(summary, pairs, s, server)


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
    return f"The last good checkpoint stays in {folder / 'checkpoint'}."


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
