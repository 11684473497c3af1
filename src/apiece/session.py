"""A run from its experiment: carry out, resume, and what is left of it."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from apiece import data as datasets
from apiece import experiment as experiments
from apiece import folder as files
from apiece.choice import Choice, pick_device
from apiece.data.federated import Examples, Federated, Ints
from apiece.engines.ray import inside, join, spread
from apiece.errors import ApieceError
from apiece.evaluate import Pair
from apiece.evaluate import models as client_models
from apiece.experiment import Experiment
from apiece.importing import anchored, code
from apiece.method import Server
from apiece.params import Params
from apiece.prepare import Session, fingerprint, load_data, prepare
from apiece.record import Groups, Scored
from apiece.train import Closed, refuse_nan, together

log = logging.getLogger("apiece")

Progress = Callable[[int, Groups | None], None]  # rounds done, the scores if they were just measured

PARTITION_COLUMNS = ("client", "name", "seen", "split", "label", "count")


class Result(NamedTuple):
    """A finished run."""

    summary: dict[str, Any]
    pairs: dict[str, Pair]  # metric → initial and personalized scores of `clients`
    clients: Ints  # the ids of those that were scored: all, unless evaluate_clients says otherwise
    session: Session
    server: Server

    def __repr__(self) -> str:
        """In a line: all of it would fill pages."""
        found = {group: self.summary[group] for group in ("seen", "unseen") if self.summary[group]}
        scores = "".join(
            f", {group} {100 * one['initial']:.1f} → {100 * one['personalized']:.1f} %"
            for group, one in found.items()
            if one["initial"] is not None
        )
        return f"<{self.summary['method']} after {self.summary['rounds']} rounds{scores}>"

    def model(self, client: int) -> Params:
        """The personalized model of one client."""
        s = self.session
        if not 0 <= client < s.federation.data.population:
            raise ApieceError(f"no client {client}: ids are 0 to {s.federation.data.population - 1}")
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
    experiment = absolute(experiment).with_proxy()
    if out is None:
        return carry_out(prepare(experiment, None, None, data), progress)[0]
    folder = Path(out)
    with _claimed(folder):
        if data is not None:
            saved = folder.resolve() / "data.npz"
            experiment = replace(experiment, data=str(saved), client_column="client", label_column="label")
        session = prepare(experiment, folder, None, data)
        if data is not None:
            datasets.save(saved, data)
        _describe(session)
        return carry_out(session, progress)[0]


def side_by_side(experiment: Experiment) -> bool:
    """Are replicas faster together? On a GPU, which one run leaves idle much of the time."""
    if inside(experiment.engine):
        return False
    return pick_device(experiment.device).type == "cuda" and experiment.engine != "sequential"


def run_replicas(
    runs: Sequence[tuple[Experiment, Path | None]],
    progress: Progress = lambda done, scores: None,
) -> list[Result]:
    """Run an experiment with several seeds, starts or priors side by side, each one's files in its folder."""
    sessions: list[Session] = []
    with ExitStack() as claims:
        for experiment, folder in runs:
            if folder is not None:
                claims.enter_context(_claimed(folder))
            beside = sessions[0] if sessions else None
            asked = absolute(experiment).with_proxy()
            sessions.append(prepare(asked, folder, None, beside=beside, replicas=len(runs)))
        for session in sessions:
            if session.record.folder is not None:
                _describe(session)
        return carry_out(sessions[0], progress, *sessions[1:])


def run_or_resume_replicas(
    runs: Sequence[tuple[Experiment, Path]], progress: Progress = lambda done, scores: None
) -> None:
    """Side by side, where there are several: those not begun yet, and those interrupted that chose alike.

    `run_or_resume` does what is left.
    """
    fresh = [(experiment, folder) for experiment, folder in runs if not (folder / "experiment.toml").exists()]
    interrupted: dict[str, list[Path]] = {}
    for experiment, folder in runs:
        if (folder / "engine.json").exists() and not (folder / "summary.json").exists():
            _refuse_another(experiment, folder)
            interrupted.setdefault((folder / "engine.json").read_text(), []).append(folder)
    if len(fresh) > 1:
        run_replicas(fresh, progress)
    for folders in interrupted.values():
        if len(folders) > 1:
            _resume_replicas(folders, progress)


def _resume_replicas(folders: Sequence[Path], progress: Progress) -> None:
    sessions: list[Session] = []
    with ExitStack() as locks:
        for folder in folders:
            locks.enter_context(files.locked(folder))
            sessions.append(reopen(folder, sessions[0] if sessions else None))
        carry_out(sessions[0], progress, *sessions[1:])


def _describe(session: Session) -> None:
    """What is known before round 0, into the run's folder."""
    folder = session.record.folder
    assert folder is not None
    files.write_text(folder / "experiment.toml", session.experiment.to_toml())
    files.write_csv(folder / "partition.csv", PARTITION_COLUMNS, _partition(session))
    files.write_json(folder / "engine.json", asdict(session.choice))


def resume(out: str | Path, progress: Progress = lambda done, scores: None) -> Result:
    """Go on with an interrupted run; its files end as if it had never been interrupted."""
    folder = Path(out)
    if not folder.is_dir():
        raise ApieceError(f"there is no folder {folder}")
    if not (folder / "experiment.toml").exists():
        raise _no_run(folder)
    if (folder / "federation.json").exists():
        raise ApieceError(f"{folder} is a federation: go on with: apiece federate server --resume {folder}")
    with files.locked(folder):
        if (folder / "summary.json").exists():
            raise ApieceError(f"{folder} is finished: see it with: apiece report {folder} -o report.html")
        return carry_out(reopen(folder), progress)[0]


def _no_run(folder: Path) -> ApieceError:
    inside = sorted(path.parent.name for path in folder.glob("*/experiment.toml"))
    told = f"{folder} holds no run: there is no experiment.toml in it"
    if not inside:
        return ApieceError(told)
    names = ", ".join(inside[:5]) + (", …" if len(inside) > 5 else "")
    return ApieceError(
        f"{told}. It is a folder of runs: take one of {names}, or repeat the command that made it"
    )


def run_or_resume(
    experiment: Experiment, folder: Path, progress: Progress = lambda done, scores: None
) -> None:
    """Run an experiment unless the folder holds it finished; go on if it holds it interrupted."""
    if not (folder / "experiment.toml").exists():
        run(experiment, folder, progress)
        return
    _refuse_another(experiment, folder)
    if not (folder / "summary.json").exists():
        resume(folder, progress)


def _refuse_another(experiment: Experiment, folder: Path) -> None:
    """Who goes on with a run goes on with this one."""
    asked = absolute(experiment).with_proxy()
    data = load_data(asked)
    if experiments.read(folder / "experiment.toml") != asked.resolved(len(data.seen_ids), data.partition):
        raise ApieceError(f"{folder} holds another experiment: choose another folder with --out")
    _refuse_changed_code(asked, _recorded(folder), folder)


def _refuse_changed_code(experiment: Experiment, choice: Choice | None, folder: Path) -> None:
    """Files of one's own are to be those that the run was begun with."""
    if choice is not None and choice.code and choice.code != code(experiment.method, experiment.model):
        raise ApieceError(
            f"the code of {experiment.method!r} or {experiment.model!r} has changed since {folder} was "
            f"begun: what it left would be taken for another's. Put it back, or start a new run."
        )


def run_spread(runs: Sequence[tuple[Experiment, Path]]) -> Iterator[int]:
    """`run_or_resume` of each, several at once on a Ray cluster; how many are done, as they are.

    One whose machine is lost goes on elsewhere, from its last checkpoint.
    """
    first = runs[0][0]
    if inside(first.engine):
        raise ApieceError("--spread computes each run in one place: leave --engine ray out, or --spread")
    cluster = join(first.address, first.device, 0, first.threads)
    orders = [(absolute(experiment), folder.resolve()) for experiment, folder in runs]
    yield 0
    yield from (done for done, _ in enumerate(spread(run_or_resume, orders, cluster), 1))


def _recorded(folder: Path) -> Choice | None:
    """What a run's folder says was chosen; None: nothing yet."""
    place = folder / "engine.json"
    try:
        return Choice(**json.loads(place.read_text())) if place.exists() else None
    except (TypeError, ValueError) as error:
        raise ApieceError(
            f"{place} is damaged: {error}. Delete it to have the engine chosen again."
        ) from error


def reopen(folder: Path, beside: Session | None = None) -> Session:
    """The session of a run folder, with the engine it recorded; `beside` another that recorded the same."""
    if not (folder / "experiment.toml").exists():
        raise _no_run(folder)
    if (folder / "federation.json").exists():
        raise ApieceError(f"{folder} is a federation: each client has its model on its own disk")
    experiment = experiments.read(folder / "experiment.toml")
    choice = _recorded(folder)
    if choice is not None and choice.torch != torch.__version__:
        log.warning(
            "%s was begun with PyTorch %s; this is %s, and bits may differ",
            folder,
            choice.torch,
            torch.__version__,
        )
    _refuse_changed_code(experiment, choice, folder)
    session = prepare(experiment, folder, choice, beside=beside)
    rows = _partition(session)
    if choice is None:
        files.write_csv(folder / "partition.csv", PARTITION_COLUMNS, rows)
        files.write_json(folder / "engine.json", asdict(session.choice))
    elif (
        choice.data != fingerprint(session.federation.data)
        or files.csv_text([PARTITION_COLUMNS, *rows]) != (folder / "partition.csv").read_text()
    ):
        raise ApieceError(
            f"the data has changed since {folder} was begun. "
            f"Restore the data of {experiment.data!r}, or start a new run."
        )
    return session


def absolute(experiment: Experiment) -> Experiment:
    """The experiment with its paths made absolute, so that it can be resumed from anywhere."""

    def place(text: str) -> str:
        return str(Path(text).expanduser().resolve()) if text else text

    return replace(
        experiment,
        data=datasets.anchored(experiment.data),
        data_dir=place(experiment.data_dir),
        also=tuple(datasets.anchored(name) for name in experiment.also),
        start=place(experiment.start),
        prior=place(experiment.prior),
        method=anchored(experiment.method),
        model=anchored(experiment.model),
    )


def _partition(session: Session) -> list[tuple[Any, ...]]:
    """The rows of partition.csv: of all clients, or of those that are scored where not all are in memory."""
    data = session.federation.data.kept
    return datasets.partition_table(
        data, None if isinstance(data, Federated) else session.scored(data, session.experiment.rounds)
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


class _Book:
    """A run as its rounds close: evaluated, logged and checkpointed when it is time."""

    def __init__(self, session: Session, progress: Progress) -> None:
        self.session, self._progress = session, progress
        self.begin, self.server = session.record.open(session.server, session.engine.device)
        session.federation.store.open(self.begin)
        self._scored: list[Scored] = []
        self._pending: list[Closed] = []
        if self.begin == 0:
            self._scored = session.scores(self.server, 0)
            session.record.beginning(self._scored)
        progress(self.begin, self._scored[0].groups if self._scored else None)

    def close(self, closed: Closed) -> None:
        s, e, record = self.session, self.session.experiment, self.session.record
        self.server, done = closed.server, closed.round.index + 1
        self._pending.append(closed._replace(server=None))
        measure = done % e.evaluate_every == 0 or done == e.rounds or done > e.rounds - e.evaluate_last
        save = done % e.checkpoint_every == 0 or done == e.rounds
        self._scored = []
        # On a GPU nothing is read back between these points: the rounds queue up behind each other.
        if measure or save or s.engine.device.type == "cpu":
            if e.on_nan == "stop":
                refuse_nan(self._pending, _kept(record.folder))
            if measure:
                self._scored = s.scores(self.server, done)
                record.clients(self._scored)
            record.rounds(self._pending, self._scored)
            self._pending = []
        if save:
            record.checkpoint(done, self.server, s.federation.store)
        self._progress(done, self._scored[0].groups if self._scored else None)

    def end(self) -> Result:
        s, e, record = self.session, self.session.experiment, self.session.record
        scored = self._scored
        if not scored:
            scored = s.scores(self.server, e.rounds)
            record.clients(scored)
        _tell_diverged(scored[0].groups, e)
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
            write_model(record.folder / "model", s, s.newcomer(self.server, e.rounds))
        return Result(record.summary(facts, scored), scored[0].pairs, scored[0].ids, s, self.server)


def _tell_diverged(groups: Groups, experiment: Experiment) -> None:
    """Some clients' personalization went astray: the mean of the others is not that of all."""
    for name, group in groups.items():
        if group is not None and group.diverged:
            log.warning(
                "%s seed %d: the personalized models of %d of %d %s clients are not finite (NaN or "
                "infinity). They count as harmed and are left out of the other personalized figures. Lower "
                "--set personal.lr",
                experiment.method,
                experiment.seed,
                group.diverged,
                group.scored,
                name,
            )


@torch.no_grad()
def carry_out(session: Session, progress: Progress, *beside: Session) -> list[Result]:
    """All rounds from the last checkpoint on; of replicas `beside` it in the same program.

    A kill may have hit them when some had a checkpoint more than others: then these go first.
    """
    books = [_Book(session, progress), *(_Book(other, lambda done, scores: None) for other in beside)]
    ended: dict[_Book, Result] = {}
    for begin in sorted({book.begin for book in books}):
        level = [book for book in books if book.begin == begin]
        for book in level:
            book.session.record.share_time(len(level))
        trainings, servers = [book.session.training for book in level], [book.server for book in level]
        for closed in together(trainings, servers, begin, session.experiment.rounds):
            for book, one in zip(level, closed, strict=True):
                book.close(one)
        ended |= {book: book.end() for book in level}
    return [ended[book] for book in books]


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


def _kept(folder: Path | None) -> str:
    if folder is None:
        return "Nothing was saved: no output folder was given."
    if not any((folder / "checkpoint").glob("round-*")):
        return "There was no checkpoint yet."
    return f"The last good checkpoint stays in {folder / 'checkpoint'}."
