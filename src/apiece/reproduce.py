"""Tables and figures of papers, rerun: their cells are experiments; what is in the ledger is not run again.

A file in experiments/ describes one table or figure: `TABLE = Table(...)`. A cell is trained over seeds, each
run in a folder of its own, and leaves one line per seed in results/<table>.jsonl, the ledger. An interrupted
run goes on from its folder. Settings that a paper leaves open are searched before, with the same effort for
every row (`Search`); what was found is in results/<table>-search.jsonl, and the cells are trained with it.
"""

from __future__ import annotations

import hashlib
import math
import multiprocessing
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from apiece import session, tune
from apiece.data import toy
from apiece.errors import ApieceError, unknown
from apiece.experiment import Experiment
from apiece.importing import import_object
from apiece.ledger import Entry, Searched, append, provenance, read, read_searches
from apiece.report import results
from apiece.report.results import Run

SCALES = ("smoke", "full")

Place = tuple[str, str]  # row, column
T = TypeVar("T")


class Measured(NamedTuple):
    """What a table or figure shows of one run: numbers, curves as (x, y) pairs, and paths in a plane."""

    numbers: dict[str, float]
    curves: Mapping[str, Sequence[tuple[float, float]]] = {}
    paths: Mapping[str, Sequence[tuple[float, float]]] = {}


@dataclass(frozen=True)
class Cell:
    """One row under one column of a table."""

    experiment: Experiment
    measure: Callable[[Run], Measured]
    start: Place | None = None  # the cell whose model this one starts from, and keeps to as its prior
    start_seed: int | None = None  # of that cell, the same for all; None: each starts from its own seed's
    seeds: tuple[int, ...] = ()  # where they are other than the table's
    redeal: bool = False  # deal the data out anew for every seed


class Gain(NamedTuple):
    """What a paper says of two rows: the first is so much better in one of the numbers."""

    row: str
    over: str
    column: str
    figure: str
    published: float


@dataclass(frozen=True)
class Search:
    """How the settings that a paper leaves open are found: by equally many trials of every row.

    Trials are judged by a part of the clients' training examples; the first is the row as the table has it.
    """

    spaces: Mapping[Place, tune.Space]  # the cells that are searched: which settings
    columns: Mapping[str, str]  # column → the one whose searches its settings come from
    trials: int
    rounds: int  # of a trial, at the most
    initial: tuple[str, ...] = ()  # rows judged before personalization; the others after it
    validation: float = tune.VALIDATION

    def score(self, row: str) -> str:
        return "initial" if row in self.initial else "personalized"


@dataclass(frozen=True)
class Table:
    """A table or figure of a paper, and how each of its cells is made."""

    id: str
    title: str
    source: str
    cells: Mapping[Place, Cell]
    published: Mapping[Place, Mapping[str, float]]  # the paper's numbers, named as `Measured` names ours
    figures: Mapping[str, str]  # the numbers that are shown, and in which unit
    seeds: tuple[int, ...]
    settings: tuple[str, ...]  # what the paper fixes, what it leaves open and how it was settled
    departures: tuple[str, ...]
    findings: tuple[str, ...] = ()  # where ours are other than the paper's numbers, what is known of why
    gains: tuple[Gain, ...] = ()
    search: Search | None = None
    small: Callable[[Experiment], Experiment] = lambda experiment: experiment  # on top of `shrunk`

    def at(self, place: Place, scale: str) -> Experiment:
        """The experiment of a cell: the paper's, or with toy sizes on toy files."""
        full = self.cells[place].experiment
        return full if scale == "full" else self.small(shrunk(full))

    def seeds_of(self, place: Place, asked: Sequence[int] = ()) -> tuple[int, ...]:
        """Those that are asked for, or all; a cell that has its own has no others."""
        return self.cells[place].seeds or tuple(asked) or self.seeds

    def searched_at(self, place: Place) -> Place | None:
        """The cell whose search the settings of a cell come from, if some are searched."""
        if self.search is None or place[1] not in self.search.columns:
            return None
        at = place[0], self.search.columns[place[1]]
        return at if at in self.search.spaces else None

    def chosen(self, only: Sequence[str]) -> list[Place]:
        """The cells that one of the patterns ROW/COLUMN fits; all without a pattern."""
        for pattern in only:
            if not any(fnmatch("/".join(place), pattern) for place in self.cells):
                raise unknown("cell", pattern, ["/".join(place) for place in self.cells])
        return [p for p in self.cells if not only or any(fnmatch("/".join(p), pattern) for pattern in only)]


def shrunk(experiment: Experiment) -> Experiment:
    """An experiment of seconds: few rounds, few clients, short training."""
    return replace(
        experiment,
        settings=_short(experiment.settings),
        rounds=min(experiment.rounds, 2),
        clients=min(experiment.clients, 12),
        unseen=experiment.unseen if experiment.unseen < 1 else 0.2,
        cohort=min(experiment.cohort, 3),
        evaluate_clients=0,
        engine="vectorized",
        threads=1,
    )


def _short(settings: Mapping[str, Any]) -> dict[str, Any]:
    """One epoch for several, two steps for many; the same in what is inside."""
    most = {"epochs": 1, "steps": 2}

    def short(name: str, value: Any) -> Any:
        if isinstance(value, Mapping):
            return _short(value)
        return min(value, most[name]) if name in most else value

    return {name: short(name, value) for name, value in settings.items()}


def tables(folder: Path) -> dict[str, Table]:
    """The tables that the files of a folder describe, by id."""
    files = sorted(path for path in folder.glob("*.py") if not path.name.startswith("_"))
    if not files:
        raise ApieceError(f"{folder} holds no experiments: run this in a checkout, or give --experiments DIR")
    found: dict[str, Table] = {}
    for path in files:
        table = import_object(f"{path}:TABLE", "table")
        if not isinstance(table, Table):
            raise ApieceError(f"TABLE in {path} is no apiece.reproduce.Table")
        found[table.id] = table
    return found


@dataclass(frozen=True)
class Reproduction:
    """One table at one scale: where its runs and its ledger are."""

    table: Table
    scale: str
    runs: Path  # a folder for each run
    ledger: Path
    device: str = "auto"
    experiments: Path = Path("experiments")

    def missing(self, only: Sequence[str], seeds: Sequence[int]) -> dict[Place, list[int]]:
        """The seeds of each cell, its own where none are given, that the ledger does not have."""
        known = {(e.row, e.column, e.seed) for e in read(self.ledger) if e.scale == self.scale}
        # One seed of toy sizes shows that a cell runs.
        most = 1 if self.scale == "smoke" and not seeds else None
        wanted = {
            place: [s for s in self.table.seeds_of(place, seeds)[:most] if (*place, s) not in known]
            for place in self.table.chosen(only)
        }
        return {place: left for place, left in wanted.items() if left}

    def run(self, place: Place, seeds: Sequence[int], progress: session.Progress) -> list[Entry]:
        """Train what is not trained yet, measure, and write the ledger."""
        folders = self._trained(place, seeds, progress)
        entries = []
        for seed, folder in zip(seeds, folders, strict=True):
            run = results.load(folder)
            assert run.summary is not None
            numbers, curves, paths = self.table.cells[place].measure(run)
            row, column = place
            entries.append(
                Entry(
                    table=self.table.id,
                    row=row,
                    column=column,
                    scale=self.scale,
                    seed=seed,
                    numbers=numbers,
                    curves=_plain(curves),
                    paths=_plain(paths),
                    seconds=round(run.summary["seconds"], 1),
                    experiment=_portable(run.experiment),
                    **provenance(self.experiments, self.device),
                )
            )
        append(self.ledger, entries)
        return entries

    def unsearched(self, only: Sequence[str]) -> list[Place]:
        """The searches that some cells, or all, wait for."""
        if self.table.search is None:
            raise ApieceError(f"{self.table.id} searches nothing: all its settings are given")
        places = dict.fromkeys(self.table.searched_at(place) for place in self.table.chosen(only))
        return [place for place in places if place is not None and self._searched(place) is None]

    def search(self, place: Place, progress: Callable[[int], None]) -> Searched:
        """Try settings of a row under a column, and write all trials into the ledger of searches."""
        search, (row, column) = self.table.search, place
        assert search is not None
        experiment = self._started(self._described(place, self.table.seeds_of(place)[0]), place)
        found = tune.search(
            _trial(experiment, search),
            self._trials(search),
            space=search.spaces[place],
            log=self.runs / self.scale / tune.LOG,
            score=search.score(row),
            validation=search.validation,
            progress=progress,
        )
        if math.isnan(found.score):
            raise ApieceError(f"{row}/{column}: every trial diverged; search other settings")
        searched = Searched(
            table=self.table.id,
            row=row,
            column=column,
            scale=self.scale,
            plan=self._plan(place),
            rounds=found.experiment.rounds,
            validation=search.validation,
            score=search.score(row),
            settings=found.settings,
            trials=[
                {**trial._asdict(), "score": None if trial.diverged else trial.score}
                for trial in found.trials
            ],
            **provenance(self.experiments, self.device),
        )
        append(self.searches, [searched])
        return searched

    @property
    def searches(self) -> Path:
        """The ledger of searches, beside that of runs."""
        return searches_beside(self.ledger)

    def _trials(self, search: Search) -> int:
        return search.trials if self.scale == "full" else min(search.trials, 2)

    def _plan(self, place: Place) -> str:
        """A hash of a search as the table describes it now."""
        search = self.table.search
        assert search is not None
        row = place[0]
        trial = _trial(self.table.at(place, self.scale), search)
        space = sorted(search.spaces[place].items())
        parts = (trial.id, space, self._trials(search), search.score(row), search.validation)
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]

    def _searched(self, place: Place) -> Searched | None:
        """The search of a cell, unless the table describes another one by now."""
        known = [
            s
            for s in read_searches(self.searches)
            if (s.row, s.column, s.scale, s.plan) == (*place, self.scale, self._plan(place))
        ]
        return known[-1] if known else None

    def _found(self, place: Place) -> Mapping[str, Any]:
        """The settings that a search has found for a cell; at smoke scale those of the table stand."""
        at = self.table.searched_at(place)
        if at is None or self.scale == "smoke":
            return {}
        searched = self._searched(at)
        if searched is None:
            raise ApieceError(
                f"the settings of {'/'.join(place)} have not been searched yet: begin with "
                f'apiece reproduce {self.table.id} --search --only "{"/".join(at)}"'
            )
        return searched.settings

    def _folder(self, experiment: Experiment) -> Path:
        """Tables that share an experiment share its runs."""
        name = f"{experiment.method}-{experiment.data}-s{experiment.seed}-{experiment.id}"
        return self.runs / self.scale / re.sub(r"[^\w-]+", "-", name)

    def planned(
        self, place: Place, seeds: Sequence[int], progress: session.Progress = lambda done, scores: None
    ) -> list[tuple[Experiment, Path]]:
        """A cell's runs, and where they are; what they start from is trained."""
        experiments = [self._experiment(place, seed, progress) for seed in seeds]
        return [(experiment, self._folder(experiment)) for experiment in experiments]

    def _trained(self, place: Place, seeds: Sequence[int], progress: session.Progress) -> list[Path]:
        plan = self.planned(place, seeds, progress)
        if len(plan) > 1 and not self.table.cells[place].redeal and _side_by_side(plan[0][0]):
            session.run_or_resume_replicas(plan, progress)
        for experiment, folder in plan:
            if not (folder / "summary.json").exists():
                session.run_or_resume(experiment, folder, progress)
        return [folder for _, folder in plan]

    def _experiment(self, place: Place, seed: int, progress: session.Progress) -> Experiment:
        experiment = tune.with_settings(self._described(place, seed), self._found(place))
        return self._started(experiment, place, progress)

    def _described(self, place: Place, seed: int) -> Experiment:
        """As the table has it, here."""
        experiment = replace(self.table.at(place, self.scale), seed=seed, device=self.device)
        if self.table.cells[place].redeal:
            experiment = replace(experiment, partition_seed=seed)
        if self.scale == "smoke":
            experiment = replace(experiment, data_dir=str(toy.folder(self.runs / "toy")))
        return experiment

    def _started(
        self, experiment: Experiment, place: Place, progress: session.Progress = lambda done, scores: None
    ) -> Experiment:
        """From the model of another cell, where it is to start from one."""
        cell = self.table.cells[place]
        if cell.start is None:
            return experiment
        before = experiment.seed if cell.start_seed is None else cell.start_seed
        (model,) = self._trained(cell.start, [before], progress)
        return replace(experiment, start=str(model), prior=str(model))


def _side_by_side(experiment: Experiment) -> bool:
    """On a CPU, too, where a table says that its clients are vectorized: five replicas of a linear model take
    there as long as one to three. Runs of a comparison keep the bits that they have alone; a mean needs none.
    """
    return experiment.engine == "vectorized" or session.side_by_side(experiment)


def _plain(lines: Mapping[str, Sequence[tuple[float, float]]]) -> dict[str, list[tuple[float, float]]]:
    return {name: [(float(x), float(y)) for x, y in line] for name, line in lines.items()}


def searches_beside(ledger: Path) -> Path:
    return ledger.with_name(f"{ledger.stem}-search.jsonl")


def _trial(experiment: Experiment, search: Search) -> Experiment:
    """What is tried: fewer rounds, scored after the last; how often a run is scored does not matter to it."""
    return replace(
        experiment,
        rounds=min(experiment.rounds, search.rounds),
        evaluate_every=10,
        evaluate_last=0,
        checkpoint_every=10,
    )


def run_all(
    reproduction: Reproduction, missing: Mapping[Place, Sequence[int]], jobs: int
) -> Iterator[tuple[Place, list[Entry] | BaseException]]:
    """Cells as they are finished, several at once: those that others start from come first."""
    named = _named(reproduction)
    with _processes(jobs) as pool:
        for places in _ranks(reproduction.table, missing):
            yield from _finished(pool, {p: partial(_run_one, named, p, missing[p]) for p in places})


def search_all(
    reproduction: Reproduction, places: Sequence[Place], jobs: int
) -> Iterator[tuple[Place, Searched | BaseException]]:
    """Searches as they are finished, several at once."""
    named = _named(reproduction)
    with _processes(jobs) as pool:
        yield from _finished(pool, {place: partial(_search_one, named, place) for place in places})


def train_spread(
    reproduction: Reproduction, missing: Mapping[Place, Sequence[int]], address: str
) -> Iterator[int]:
    """Train the runs of these cells on a Ray cluster; how many are done, as they are. `run` measures them."""
    before = 0
    for places in _ranks(reproduction.table, missing):
        runs = [run for place in places for run in reproduction.planned(place, missing[place])]
        due = [(replace(e, address=address), f) for e, f in runs if not (f / "summary.json").exists()]
        if due:
            yield from (before + done for done in session.run_spread(due))
        before += len(due)


def _ranks(table: Table, places: Iterable[Place]) -> list[list[Place]]:
    """Cells that others start from before those others."""
    found: dict[int, list[Place]] = {}
    for place in places:
        found.setdefault(_depth(table, place), []).append(place)
    return [found[depth] for depth in sorted(found)]


def _processes(jobs: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _begin_process)


def _begin_process() -> None:
    torch.set_num_threads(1)


def _finished(
    pool: ProcessPoolExecutor, calls: Mapping[Place, Callable[[], T]]
) -> Iterator[tuple[Place, T | BaseException]]:
    waiting = {pool.submit(call): place for place, call in calls.items()}
    for done in as_completed(waiting):
        yield waiting[done], done.exception() or done.result()


def _named(reproduction: Reproduction) -> Any:
    """A table is functions, which do not travel: its name does."""
    return replace(reproduction, table=reproduction.table.id)  # type: ignore[arg-type]


def _here(named: Any) -> Reproduction:
    whole: Reproduction = replace(named, table=tables(named.experiments)[named.table])
    return whole


def _run_one(named: Any, place: Place, seeds: Sequence[int]) -> list[Entry]:
    return _here(named).run(place, seeds, lambda done, scores: None)


def _search_one(named: Any, place: Place) -> Searched:
    return _here(named).search(place, lambda done: None)


def _portable(experiment: Mapping[str, Any]) -> dict[str, Any]:
    """Without this machine's paths: of the runs it started from, the folders' names."""
    names = {key: Path(experiment[key]).name for key in ("start", "prior")}
    return {**experiment, "data_dir": "", **names}


def _depth(table: Table, place: Place) -> int:
    start = table.cells[place].start
    return 0 if start is None else 1 + _depth(table, start)


def score(group: str, which: str, weighted: bool = False) -> Callable[[Run], float]:
    """In percent after the last round: the mean over the group's clients, `initial` or `personalized`."""

    def figure(run: Run) -> float:
        assert run.summary is not None
        return 100 * float(run.summary[group][f"{which}_weighted" if weighted else which])

    return figure


def curve(run: Run, column: str) -> list[tuple[float, float]]:
    """(round, value in percent) of a column of rounds.csv, where it was measured."""
    found = [(row["round"], row[column]) for row in run.rounds]
    return [(x, 100 * y) for x, y in found if x is not None and y is not None]
