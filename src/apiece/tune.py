"""Tuning: a small search for a method's settings, with the same number of trials for every method.

Each seen client's training examples are split once into training and validation; a trial trains on the one
and is scored on the other. The examples held out for testing, and the unseen clients, are taken out before.
The first trial is the method's defaults; optuna's TPE proposes the others, a function of what came before.
So a search that finds trials in its log asks for the same ones again, and goes on where it was interrupted.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import multiprocessing
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import MISSING, fields, replace
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch

from apiece import catalog, random
from apiece import folder as files
from apiece.checkpoint import sync
from apiece.data.federated import Examples, Federated, resident
from apiece.errors import ApieceError, unknown
from apiece.experiment import Experiment
from apiece.importing import code
from apiece.method import Method, Span, inner_methods
from apiece.prepare import Session, fingerprint, load_data, prepare
from apiece.record import SCORES
from apiece.session import absolute
from apiece.settings import Settings, parse_flag

Space = Mapping[str, Span | tuple[Any, ...]]

TRIALS = 10
VALIDATION = 0.25
RANDOM = 5  # trials before TPE looks at the scores: its own default, 10, would make all of ours random
LOG = "trials.jsonl"
DIGITS = 3  # a value is rounded, so that what is printed is what was run


class Trial(NamedTuple):
    number: int
    settings: dict[str, Any]  # dotted, as for `--set`; none: the defaults
    score: float  # on the validation examples, mean over seeds of the mean over clients; NaN: it diverged
    seconds: float

    @property
    def diverged(self) -> bool:
        return math.isnan(self.score)


class Found(NamedTuple):
    settings: dict[str, Any]  # the best trial's; of equals the earliest
    score: float  # NaN: every trial diverged
    trials: list[Trial]
    experiment: Experiment  # with these settings


class Run(NamedTuple):
    """A line of the log: one trial with one seed. A score that is None was not finite."""

    id: str  # of all that the scores depend on
    method: str
    trial: int
    seed: int
    settings: dict[str, Any]
    initial: float | None
    personalized: float | None
    diverged: bool
    seconds: float
    engine: str
    threads: int


def search(
    experiment: Experiment,
    trials: int = TRIALS,
    seeds: Sequence[int] = (),
    space: Space | None = None,
    log: Path | None = None,
    *,
    score: str = "personalized",
    validation: float = VALIDATION,
    data: Examples | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> Found:
    """The best of some trials of an experiment's method, its defaults among them.

    `seeds`: of the trainings whose mean is a trial's score; else the experiment's. `space`: what to search,
    instead of `space_of`. `log`: a file of finished trials, which are not run again. `data`: as in `run`.
    """
    optuna = _optuna()
    if trials < 1:
        raise ApieceError(f"there must be at least 1 trial, got {trials}")
    if score not in SCORES:
        raise unknown("score", score, SCORES)
    experiment = absolute(experiment).with_proxy()
    seeds = list(seeds) or [experiment.seed]
    space = space_of(experiment) if space is None else _checked(experiment, space)
    table = catalog.settings_of(experiment.build_method())
    defaults = {key: _value(table, key) for key in space}
    bench = _Bench(experiment, data, validation, log)

    # The sampler's draws are the same for every method: equal ranges are tried at equal values.
    sampler = optuna.samplers.TPESampler(seed=seeds[0] % 2**32, n_startup_trials=RANDOM)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    scales = {key: _scale(optuna, values) for key, values in space.items()}
    done: list[Trial] = []
    for number in range(trials if space else 1):
        asked = study.ask(scales) if number else None
        settings = {key: _rounded(space[key], asked.params[key]) for key in space} if asked else {}
        runs = bench.trial(number, settings, seeds)
        scores = [getattr(run, score) for run in runs]
        mean = math.nan if None in scores else fmean(scores)
        done.append(Trial(number, settings, mean, sum(run.seconds for run in runs)))
        told = -math.inf if math.isnan(mean) else mean
        if asked:
            study.tell(asked, told)
        elif all(_inside(space[key], value) for key, value in defaults.items()):
            places = {key: _place(space[key], value) for key, value in defaults.items()}
            study.add_trial(optuna.trial.create_trial(params=places, distributions=scales, value=told))
        progress(number + 1)
    best = max((trial for trial in done if not trial.diverged), key=lambda trial: trial.score, default=None)
    settings = best.settings if best else {}
    return Found(settings, best.score if best else math.nan, done, with_settings(experiment, settings))


def search_all(
    searches: Mapping[str, Callable[..., Found]],
    jobs: int = 1,
    progress: Callable[[int], None] = lambda done: None,
) -> dict[str, Found]:
    """Carry out searches (partials of `search`), `jobs` at once; progress is told in trials."""
    if jobs < 1:
        raise ApieceError(f"there must be at least 1 job, got {jobs}")
    found: dict[str, Found] = {}
    if jobs == 1:
        for name, one in searches.items():
            before = sum(len(other.trials) for other in found.values())
            found[name] = one(progress=lambda done, before=before: progress(before + done))
        return found
    ours = set(multiprocessing.active_children())
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(min(jobs, len(searches)), spawn, _begin_process)
    try:
        names = {pool.submit(one): name for name, one in searches.items()}
        for future in as_completed(names):
            found[names[future]] = future.result()
            progress(sum(len(other.trials) for other in found.values()))
    except BaseException:
        # What the others have finished is in the log; nobody waits for the rest.
        for process in set(multiprocessing.active_children()) - ours:
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
    return {name: found[name] for name in searches}


def space_of(experiment: Experiment, over: Space | None = None) -> dict[str, Span | tuple[Any, ...]]:
    """What is searched: `search` of the method and of those inside it; `over` replaces and adds."""
    own = _composed(experiment.build_method())
    return {**_checked(experiment, own), **_checked(experiment, over or {})}


def parse(flags: Sequence[str]) -> dict[str, Span | tuple[Any, ...]]:
    """`lr=0.01..0.5` is a range, `constraint=kl,l2` are values to choose from."""
    space: dict[str, Span | tuple[Any, ...]] = {}
    for flag in flags:
        key, _, text = (part.strip() for part in flag.partition("="))
        texts = [part.strip() for part in text.split(".." if ".." in text else ",")]
        if not key or not all(texts):
            raise ApieceError(f"--search takes KEY=LOW..HIGH or KEY=a,b,c, got {flag!r}")
        if re.fullmatch(r"[\d.e]+-[\d.e]+", text):
            raise ApieceError(f"--search {flag}: a range is LOW..HIGH: {key}={text.replace('-', '..')}")
        values = tuple(parse_flag(f"{key}={part}")[1] for part in texts)
        if ".." in text and len(values) != 2:
            raise ApieceError(f"--search {flag}: a range is LOW..HIGH")
        space[key] = Span(*values) if ".." in text else values
    return space


def with_settings(experiment: Experiment, settings: Settings) -> Experiment:
    """The experiment with some settings changed, named in full and dotted."""
    table: dict[str, Any] = copy.deepcopy(dict(experiment.settings))
    known = catalog.settings_of(experiment.build_method())
    for key, value in settings.items():
        *path, last = key.split(".")
        place, level = table, known
        for name in path:
            if name == "local" and last not in level:
                place.pop(last, None)  # the same setting in short, which would override it
            place, level = place.setdefault(name, {}), level[name]
        place[last] = value
    return replace(experiment, settings=table)


def flags(settings: Settings) -> list[str]:
    """Settings as the command line takes them behind `--set`."""
    return [f"{k}={v if isinstance(v, str) else json.dumps(v)}" for k, v in settings.items()]


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """An output folder held by this search alone."""
    if (folder / "experiment.toml").exists():
        raise ApieceError(f"{folder} holds a run: choose another folder with --out")
    folder.mkdir(parents=True, exist_ok=True)
    with files.locked(folder):
        (folder / LOG).touch()
        yield


def write(path: Path, found: Found) -> Path:
    """The experiment with the best settings, for `apiece run`."""
    files.write_text(path, found.experiment.to_toml())
    return path


class _Bench:
    """Where trials are run: the validation split, and the log of what is finished."""

    def __init__(
        self, experiment: Experiment, examples: Examples | None, share: float, log: Path | None
    ) -> None:
        key = random.fold(experiment.partition_seed, "partition")
        self._data = resident(load_data(experiment, examples), "tuning").validation(share, key)
        if not self._data.test.sizes.any():
            raise ApieceError(
                f"a validation share of {share} leaves no client an example to validate on: "
                f"raise it, or have clients with more examples"
            )
        self._experiment = replace(experiment, also=(), store="memory")
        self._held = _digest(self._data)
        self._code = [own] if (own := code(experiment.method, experiment.model)) else []
        self._log = log
        self._known = {run.id: run for run in _read(log)}
        self._chosen: dict[str, Any] = {}  # engine and threads: those of the first trial are all trials'

    def trial(self, number: int, settings: dict[str, Any], seeds: Sequence[int]) -> list[Run]:
        """One run per seed, up to the first that has no score at all."""
        runs: list[Run] = []
        for seed in seeds:
            described = with_settings(replace(self._experiment, seed=seed), settings)
            whole = described.resolved(self._data.population, self._data.partition)
            place = hashlib.sha256(" ".join((whole.id, self._held, *self._code)).encode()).hexdigest()[:16]
            run = self._known.get(place) or self._run(described, place, number, settings)
            self._chosen = self._chosen or {"engine": run.engine, "threads": run.threads}
            runs.append(run)
            if run.initial is run.personalized is None:
                break
        return runs

    def _run(self, experiment: Experiment, place: str, number: int, settings: dict[str, Any]) -> Run:
        begin = time.perf_counter()
        session = prepare(replace(experiment, **self._chosen), None, None, dealt=self._data)
        scores = _scores(session)
        run = Run(
            place,
            experiment.method,
            number,
            experiment.seed,
            settings,
            *scores,
            None in scores,
            round(time.perf_counter() - begin, 3),
            session.choice.engine,
            session.choice.threads,
        )
        self._known[place] = run
        if self._log is not None:
            _append(self._log, run)
        return run


@torch.no_grad()
def _scores(session: Session) -> tuple[float | None, float | None]:
    """(initial, personalized) after the last round, mean over the clients that have examples to be judged by.

    None where the training, or the model of one of them, was not finite.
    """
    e, server, on_cpu = session.experiment, session.server, session.engine.device.type == "cpu"
    fine = torch.ones((), dtype=torch.bool, device=session.engine.device)
    for closed in session.training.rounds(server, 0, e.rounds):
        server, done = closed.server, closed.round.index + 1
        fine = fine & closed.finite.all()
        # On a GPU, reading the answer makes it wait.
        look = on_cpu or done % e.evaluate_every == 0 or done == e.rounds
        if e.on_nan == "stop" and look and not fine:
            return None, None
    scored = session.scores(server, e.rounds)[0]
    pair, judged = scored.pairs[session.federation.task.headline], scored.data.sizes(scored.ids)[1] > 0
    # Not finite: no score. Leaving such a client out of the mean would flatter the trial.
    initial, personalized = (float(scores[judged].mean()) for scores in pair)
    return _or_none(initial), _or_none(personalized)


def _or_none(score: float) -> float | None:
    return None if math.isnan(score) else score


def _composed(method: Method) -> dict[str, Span | tuple[Any, ...]]:
    """The ranges of a method; of one that is given other methods, theirs too, under their fields' names."""
    given = {f.name for f in fields(method) if f.default is MISSING}  # type: ignore[arg-type]
    inner = {
        f"{slot}.{key}": values
        for slot, inside in inner_methods(method).items()
        if slot in given
        for key, values in _composed(inside).items()
    }
    return {**method.search, **inner}


def _checked(experiment: Experiment, space: Space) -> dict[str, Span | tuple[Any, ...]]:
    """The space with its keys in full; a mistake in it is told now, before the first trial."""
    table = catalog.settings_of(experiment.build_method())
    checked: dict[str, Span | tuple[Any, ...]] = {}
    for key, values in space.items():
        full = _in_full(table, key)
        if isinstance(values, Span):
            values = _checked_span(key, values, _value(table, full))
        elif not values:
            raise ApieceError(f"there is no value to choose for {key}")
        for value in values:
            with_settings(experiment, {full: value}).build_method()
        checked[full] = values
    return checked


def _checked_span(key: str, span: Span, default: Any) -> Span:
    """The range, of ints where all that is known of the setting is ints."""
    if not _is_number(default):
        raise ApieceError(f"{key} is not a number: give the values to choose from, {key}=a,b,c")
    if not all(map(_is_number, span)) or not 0 < span.low < span.high < math.inf:
        raise ApieceError(
            f"the range of {key}, {span.low}..{span.high}, must be of two positive numbers, the lower one "
            f"first: its scale is logarithmic"
        )
    whole = all(isinstance(number, int) for number in (default, *span))
    return span if whole else Span(float(span.low), float(span.high))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _in_full(table: Settings, key: str) -> str:
    """A setting as it stands in the table of all: `lr` is short for `local.lr`."""
    path: list[str] = []
    for name in key.split("."):
        if name not in table and name in table.get("local", {}):
            path.append("local")
            table = table["local"]
        if name not in table:
            raise unknown("setting", key, (".".join([*path, n]) for n in {**table, **table.get("local", {})}))
        path.append(name)
        table = table[name] if isinstance(table[name], Mapping) else {}
    if table:
        raise ApieceError(f"{key} is a table: search its entries, for example {key}.{next(iter(table))}")
    return ".".join(path)


def _value(table: Any, key: str) -> Any:
    for name in key.split("."):
        table = table[name]
    return table


def _inside(values: Span | tuple[Any, ...], value: Any) -> bool:
    return bool(values.low <= value <= values.high) if isinstance(values, Span) else value in values


def _place(values: Span | tuple[Any, ...], value: Any) -> Any:
    """A value as the sampler knows it: of choices, their place."""
    return value if isinstance(values, Span) else values.index(value)


def _rounded(values: Span | tuple[Any, ...], place: Any) -> Any:
    """The value of a setting for what the sampler proposed."""
    if not isinstance(values, Span):
        return values[place]
    if isinstance(place, int):
        return place
    return min(max(float(f"{place:.{DIGITS}g}"), values.low), values.high)


def _scale(optuna: Any, values: Span | tuple[Any, ...]) -> Any:
    kinds = optuna.distributions
    if not isinstance(values, Span):
        return kinds.CategoricalDistribution(range(len(values)))
    kind = kinds.IntDistribution if isinstance(values.low, int) else kinds.FloatDistribution
    return kind(values.low, values.high, log=True)


def _digest(data: Federated) -> str:
    """A hash of the examples and of who holds them."""
    digest = hashlib.sha256(fingerprint(data).encode())
    for rows in (data.train, data.test):
        digest.update(rows.rows.tobytes() + rows.offsets.tobytes())
    return digest.hexdigest()


def _read(log: Path | None) -> list[Run]:
    """The runs in a log; what a kill cut short is passed over."""
    if log is None or not log.exists():
        return []
    runs = []
    for line in log.read_text(encoding="utf-8").splitlines():
        try:
            runs.append(Run(**json.loads(line)))
        except (TypeError, ValueError):
            continue
    return runs


def _append(log: Path, run: Run) -> None:
    """Add a line in one write: several processes may share a log."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a+b") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - 1, 0))
        cut_short = file.read(1) not in (b"\n", b"")
        file.write(f"{chr(10) * cut_short}{json.dumps(run._asdict(), allow_nan=False)}\n".encode())
    sync(log)


def _begin_process() -> None:
    """One core each; the parent decides when to stop, and whoever has lost it stops too."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def _optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise ApieceError("tuning needs optuna: pip install apiece[tune]") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
