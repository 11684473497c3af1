"""What run folders say: their files read back, runs that differ only in seed put together, one row each.

Headline metrics (accuracy and its like) are fractions, higher is better.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple, TypeVar

from apiece.errors import ApieceError

GROUPS = ("seen", "unseen")
SCORES = ("initial", "personalized")
OWN = "test"  # clients.csv calls the run's own test examples so; other names are other data's clients
METRIC = "accuracy"  # what a run is taken to measure that has not scored a client yet
ABSENT = "–"
FOLLOWING = ("also", "prior", "start")  # they name other data and runs; the rest mostly implies which
# A whole text that is a path, or the `file.py:name`s within an expression.
PATH = re.compile(r"^/(?!.*\.py:).*|(?<![^(,])/[^(),]*")

T = TypeVar("T")


class Client(NamedTuple):
    """One client's two scores under the headline metric, on the run's own data; None: nothing to score."""

    id: int
    seen: bool
    initial: float | None
    personalized: float | None

    @property
    def harmed(self) -> bool:
        return self.initial is not None and self.personalized is not None and self.personalized < self.initial


class Count(NamedTuple):
    """How many examples of one class a client holds in one split."""

    client: int
    name: str
    seen: bool
    split: str
    label: int
    examples: int


class Label(NamedTuple):
    """How many training examples of one class the cohort of one round held."""

    round: int
    label: int
    examples: int


class Point(NamedTuple):
    """The mean personalized score at one amount of epochs or examples; None: nobody was scored."""

    along: str
    amount: int
    mean: float | None


class Run(NamedTuple):
    folder: Path
    toml: str
    experiment: dict[str, Any]
    rounds: tuple[dict[str, float | None], ...]
    clients: tuple[Client, ...]
    partition: tuple[Count, ...]
    labels: tuple[Label, ...]
    adaptation: tuple[Point, ...]
    summary: dict[str, Any] | None  # None: unfinished
    metric: str  # the headline

    @property
    def finished(self) -> bool:
        return self.summary is not None

    @property
    def method(self) -> str:
        return str(self.experiment["method"])

    @property
    def data(self) -> str:
        return str(self.experiment.get("data", ""))

    @property
    def seed(self) -> Any:
        return self.experiment.get("seed")


class Group(NamedTuple):
    """Runs of one experiment that differ only in seed, under a label that tells it from the other groups."""

    label: str
    runs: tuple[Run, ...]

    @property
    def finished(self) -> tuple[Run, ...]:
        return tuple(run for run in self.runs if run.finished)

    @property
    def unfinished(self) -> tuple[Run, ...]:
        return tuple(run for run in self.runs if not run.finished)


class Stat(NamedTuple):
    """Over seeds: the mean, and the sample standard deviation (None for a single seed)."""

    mean: float | None
    std: float | None


class Scores(NamedTuple):
    initial: Stat
    personalized: Stat
    worst10: Stat  # personalized, over the worst tenth of the clients
    harmed: Stat


class TableRow(NamedTuple):
    label: str
    method: str
    data: str
    seeds: tuple[Any, ...]  # of the finished runs, the ones the numbers are about
    unfinished: int
    seen: Scores
    unseen: Scores
    bytes_up: Stat
    bytes_down: Stat
    seconds: Stat


class Column(NamedTuple):
    """One column of the table: for every row the number and its text; and which rows are the best."""

    group: str
    name: str
    stats: tuple[Stat, ...]
    cells: tuple[str, ...]
    means: tuple[str, ...]  # the cells without their ±
    best: frozenset[int]  # of the rows on the same data


class Curve(NamedTuple):
    """Mean and standard deviation over seeds at each evaluated round, or amount of epochs or examples."""

    rounds: tuple[int, ...]
    means: tuple[float, ...]
    stds: tuple[float, ...]


def load(folder: Path) -> Run:
    """Read a run folder; files that an unfinished run has not written yet are empty."""
    path = folder / "experiment.toml"
    if not path.is_file():
        raise ApieceError(f"{folder} is no run folder: it holds no experiment.toml")
    toml = _text(path)
    try:
        experiment = tomllib.loads(toml)
    except tomllib.TOMLDecodeError as error:
        raise ApieceError(f"{path}: {error}") from error
    if "method" not in experiment:
        raise ApieceError(f"{path} names no method")
    clients, summary = _rows(folder, "clients.csv", _client), _summary(folder)
    # The headline's rows are the first.
    metric = str((summary or {}).get("metric", clients[0].metric if clients else METRIC))
    return Run(
        folder=folder,
        toml=toml,
        experiment=experiment,
        rounds=_rows(folder, "rounds.csv", _round),
        clients=tuple(row.client for row in clients if row.metric == metric and row.test == OWN),
        partition=_rows(folder, "partition.csv", _count),
        labels=_rows(folder, "labels.csv", _label),
        adaptation=_rows(folder, "adaptation.csv", _point),
        summary=summary,
        metric=metric,
    )


def shortened(runs: Sequence[Run]) -> list[Run]:
    """The runs with every path in their experiments cut to its shortest end that no other name in them has.

    `/x/own.py:Mine` is `Mine`; beside `/y/other.py:Mine` it is `own.py:Mine`, beside `/y/own.py:Mine`
    `x/own.py:Mine`. `toml` stays as it is.
    """
    texts = {text for run in runs for value in flat(run.experiment).values() for text in _texts(value)}
    paths = {path for text in texts for path in PATH.findall(text)}
    words = {word for text in texts for word in re.split(r"[(),]", text)} - paths
    ends = {path: [path[cut.end() :] for cut in re.finditer(r"/|\.py:", path)] for path in paths}
    held = Counter([*words, *(end for found in ends.values() for end in found)])
    names = {path: next((e for e in reversed(found) if held[e] == 1), path) for path, found in ends.items()}
    return [
        run._replace(experiment=_renamed(run.experiment, names), summary=_renamed(run.summary, names))
        for run in runs
    ]


def groups(runs: Sequence[Run]) -> list[Group]:
    """Runs put together that differ only in seed, in the order in which they came.

    Those that go on from others, `first-s0` with seed 0 and `first-s1` with seed 1, differ only in seed, too.
    """
    found: dict[str, list[Run]] = {}
    for run in runs:
        key = {
            name: re.sub(rf"(?<=-s){run.seed}(?!\d)", "*", str(value))
            if name in ("start", "prior")
            else value
            for name, value in flat(run.experiment).items()
            if name != "seed"
        }
        same = found.setdefault(json.dumps(key, sort_keys=True, default=str), [])
        for other in same:
            if other.seed == run.seed:
                raise ApieceError(
                    f"{other.folder} and {run.folder} are the same experiment with the same seed: "
                    "leave one out, a spread over seeds that counts one twice is wrong"
                )
        same.append(run)
    metrics = sorted({run.metric for run in runs if run.finished})
    if len(metrics) > 1:
        raise ApieceError(f"these runs measure different things ({', '.join(metrics)}): compare them apart")
    members = list(found.values())
    return [
        Group(label, tuple(same))
        for label, same in zip(_labels([m[0] for m in members]), members, strict=True)
    ]


def metric(runs: Iterable[Run]) -> str:
    return next((run.metric for run in runs if run.finished), METRIC)


def table(runs: Sequence[Run]) -> list[TableRow]:
    """One row for each group of runs that differ only in seed; numbers of its finished runs."""
    return [row(group) for group in groups(runs)]


def row(group: Group) -> TableRow:
    summaries = [run.summary for run in group.finished if run.summary is not None]
    return TableRow(
        label=group.label,
        method=group.runs[0].method,
        data=group.runs[0].data,
        seeds=tuple(run.seed for run in group.finished),
        unfinished=len(group.unfinished),
        seen=_scores([s.get("seen") or {} for s in summaries]),
        unseen=_scores([s.get("unseen") or {} for s in summaries]),
        bytes_up=_over(summaries, "bytes_up"),
        bytes_down=_over(summaries, "bytes_down"),
        seconds=_over(summaries, "seconds"),
    )


def columns(rows: Sequence[TableRow]) -> list[Column]:
    """The table by columns, those without any number left out: what the page and the terminal both print."""
    column = partial(_column, [row.data for row in rows])
    found = []
    for group in GROUPS:
        scores: list[Scores] = [getattr(row, group) for row in rows]
        title = f"{group} clients, %"
        found += [
            column(title, "initial", [s.initial for s in scores], cell, max),
            column(title, "personalized", [s.personalized for s in scores], cell, max),
            column(title, "worst 10 %", [s.worst10 for s in scores], cell, max),
            column(title, "harmed", [s.harmed for s in scores], cell, min),
        ]
    found += [
        column("cost", "sent up", [row.bytes_up for row in rows], size, min),
        column("cost", "sent down", [row.bytes_down for row in rows], size, min),
        column("cost", "time", [row.seconds for row in rows], duration, min),
    ]
    return [one for one in found if any(stat.mean is not None for stat in one.stats)]


def other_columns(groups: Sequence[Group]) -> list[Column]:
    """Initial and personalized means on the own data and on each other data that a run was scored on."""
    summaries = [[run.summary for run in group.finished if run.summary is not None] for group in groups]
    names = dict.fromkeys(name for same in summaries for s in same for name in s.get("also") or {})
    found = []
    for name in (None, *names) if names else ():
        column = partial(_column, [group.runs[0].data if name is None else name for group in groups])
        for group in GROUPS:
            parts = [[_part(s, name).get(group) or {} for s in same] for same in summaries]
            title = f"{'own data' if name is None else name}, {group} clients, %"
            found += [column(title, score, [_over(p, score) for p in parts], cell, max) for score in SCORES]
    return [one for one in found if any(stat.mean is not None for stat in one.stats)]


def curve(runs: Sequence[Run], column: str) -> Curve:
    """A column of rounds.csv over the rounds that every one of `runs` has evaluated."""
    tracks = [
        {int(r["round"] or 0): value for r in run.rounds if (value := r.get(column)) is not None}
        for run in runs
    ]
    return _mean_curve(tracks)


def adaptation(runs: Sequence[Run], along: str) -> Curve:
    """adaptation.csv along epochs or examples, over the amounts that every one of `runs` has."""
    return _mean_curve(
        [
            {p.amount: p.mean for p in run.adaptation if p.along == along and p.mean is not None}
            for run in runs
        ]
    )


def mixes(labels: Sequence[Label]) -> dict[int, dict[int, float]]:
    """Round → class → share of the examples of that round's cohort."""
    counts: dict[int, Counter[int]] = {}
    for entry in labels:
        counts.setdefault(entry.round, Counter())[entry.label] += entry.examples
    return {round: _shares(counts[round]) for round in sorted(counts) if counts[round].total()}


def whole_mix(labels: Sequence[Label]) -> dict[int, float]:
    """Class → share of the examples of all rounds put together."""
    counts: Counter[int] = Counter()
    for entry in labels:
        counts[entry.label] += entry.examples
    return _shares(counts)


def drift(labels: Sequence[Label]) -> float:
    """Mean over rounds of ½ Σ |share in the round - share in all rounds|: 0 is no period drift."""
    whole = whole_mix(labels)
    return fmean(
        0.5 * sum(abs(mix.get(label, 0.0) - share) for label, share in whole.items())
        for mix in mixes(labels).values()
    )


def _shares(counts: Counter[int]) -> dict[int, float]:
    total = counts.total()
    return {label: counts[label] / total for label in sorted(counts) if counts[label]}


def _part(summary: Mapping[str, Any], name: str | None) -> Mapping[str, Any]:
    """The figures on the own data (None) or on the other data of that name."""
    part: Mapping[str, Any] = summary if name is None else (summary.get("also") or {}).get(name) or {}
    return part


def _mean_curve(tracks: Sequence[Mapping[int, float]]) -> Curve:
    shared = sorted(set.intersection(*(set(track) for track in tracks))) if tracks else []
    stats = [_stat([track[at] for track in tracks]) for at in shared]
    return Curve(tuple(shared), tuple(s.mean or 0.0 for s in stats), tuple(s.std or 0.0 for s in stats))


def differing(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Keys of the experiment, other than method, its settings and the seed, whose values are not all one."""
    tables = [flat(run.experiment) for run in runs]
    names = dict.fromkeys(name for table in tables for name in table)
    values = {name: list(dict.fromkeys(_said(t.get(name, ABSENT)) for t in tables)) for name in names}
    return {
        name: seen
        for name, seen in values.items()
        if len(seen) > 1 and name not in ("method", "seed") and not name.startswith("settings.")
    }


def flat(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} as {"a.b": 1}."""
    found: dict[str, Any] = {}
    for name, value in nested.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return found


def cell(mean: float | None, std: float | None = None) -> str:
    """A fraction in percent: 97.9 ± 0.3."""
    return _plus_minus(mean, std, 0.01)


def size(mean: float | None, std: float | None = None) -> str:
    """Bytes in human units: 12.3 MB."""
    if mean is not None and mean < 1e3:
        return f"{mean:.0f} B"
    return _scaled(mean, std, (("kB", 1e3), ("MB", 1e6), ("GB", 1e9), ("TB", 1e12)))


def duration(mean: float | None, std: float | None = None) -> str:
    """Seconds in human units: 3.5 min."""
    return _scaled(mean, std, (("s", 1.0), ("min", 60.0), ("h", 3600.0)))


def _scaled(mean: float | None, std: float | None, units: tuple[tuple[str, float], ...]) -> str:
    if mean is None:
        return ABSENT
    name, unit = [(name, unit) for name, unit in units if mean >= unit or unit == units[0][1]][-1]
    # Traffic rarely depends on the seed: "± 0.0" would be noise.
    return f"{_plus_minus(mean, std if std and std >= 0.05 * unit else None, unit)} {name}"


def _plus_minus(mean: float | None, std: float | None, unit: float) -> str:
    if mean is None:
        return ABSENT
    return f"{mean / unit:.1f}" + ("" if std is None else f" ± {std / unit:.1f}")


def _column(
    data: Sequence[str],
    group: str,
    name: str,
    stats: Sequence[Stat],
    text: Callable[[float | None, float | None], str],
    better: Callable[[Iterable[float]], float],
) -> Column:
    """`data`: what each row was scored on; only rows on the same are compared."""
    cells = tuple(text(stat.mean, stat.std) for stat in stats)
    means = tuple(text(stat.mean, None) for stat in stats)
    best: set[int] = set()
    for one in set(data):
        known = {i: stat.mean for i, stat in enumerate(stats) if data[i] == one and stat.mean is not None}
        top = text(better(known.values()), None) if known else ABSENT
        leading = {i for i in known if means[i] == top}
        # Where all are best nobody is singled out.
        best |= leading if len(leading) < len(known) else set()
    return Column(group, name, tuple(stats), cells, means, frozenset(best))


def _labels(first: Sequence[Run]) -> list[str]:
    """The method, what tells experiments with one method apart, and the data where the page has several.

    `start`, `prior` and `also`, in this order, are told only while two labels would be alike without.
    """
    tables = [flat(run.experiment) for run in first]
    untold = list(FOLLOWING)
    while len(set(labels := [_title(mine, tables, untold) for mine in tables])) < len(labels) and untold:
        untold.pop()
    return labels


def _title(mine: Mapping[str, Any], tables: Sequence[Mapping[str, Any]], untold: Sequence[str]) -> str:
    same = [table for table in tables if table["method"] == mine["method"]]
    telling = [
        f"{name.removeprefix('settings.')}={_said(value)}"
        for name, value in mine.items()
        if name not in ("seed", *untold)
        and any(other.get(name) != value for other in (tables if name == "data" else same))
    ]
    return f"{mine['method']} ({', '.join(telling)})" if telling else str(mine["method"])


def _said(value: Any) -> str:
    return (" and ".join(map(str, value)) if isinstance(value, list) else str(value)) or ABSENT


def _texts(value: Any) -> list[str]:
    return [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, str)]


def _renamed(value: Any, names: Mapping[str, str]) -> Any:
    """`value` with new names for the paths in all its texts, keys among them."""
    if isinstance(value, str):
        return PATH.sub(lambda path: names.get(path[0], path[0]), value)
    if isinstance(value, list):
        return [_renamed(one, names) for one in value]
    if isinstance(value, Mapping):
        return {_renamed(name, names): _renamed(one, names) for name, one in value.items()}
    return value


def _scores(parts: Sequence[Mapping[str, Any]]) -> Scores:
    return Scores(
        *(_over(parts, name) for name in ("initial", "personalized", "personalized_worst10", "harmed"))
    )


def _over(summaries: Sequence[Mapping[str, Any]], name: str) -> Stat:
    return _stat([value for s in summaries if (value := _number(s.get(name))) is not None])


def _stat(values: Sequence[float]) -> Stat:
    return Stat(fmean(values) if values else None, stdev(values) if len(values) > 1 else None)


def _number(value: Any) -> float | None:
    if value is None or value == "":
        return None
    number = float(value)
    return number if math.isfinite(number) else None


def _round(row: Mapping[str, Any]) -> dict[str, float | None]:
    int(row["round"])
    return {name: _number(value) for name, value in row.items()}


def _count(row: Mapping[str, Any]) -> Count:
    return Count(
        int(row["client"]),
        row["name"],
        row["seen"] == "1",
        row["split"],
        int(row["label"]),
        int(row["count"]),
    )


def _label(row: Mapping[str, Any]) -> Label:
    return Label(int(row["round"]), int(row["label"]), int(row["count"]))


def _point(row: Mapping[str, Any]) -> Point:
    return Point(row["along"], int(row["amount"]), _number(row["personalized_mean"]))


class _ClientRow(NamedTuple):
    metric: str
    test: str
    client: Client


def _client(row: Mapping[str, Any]) -> _ClientRow:
    scores = (_number(row[score]) for score in SCORES)
    return _ClientRow(row["metric"], row["test"], Client(int(row["client"]), row["seen"] == "1", *scores))


def _summary(folder: Path) -> dict[str, Any] | None:
    path = folder / "summary.json"
    if not path.is_file():
        return None
    try:
        summary: dict[str, Any] = json.loads(_text(path))
    except json.JSONDecodeError as error:
        raise ApieceError(f"{path}: {error}") from error
    return summary


def _rows(folder: Path, name: str, read: Callable[[Mapping[str, Any]], T]) -> tuple[T, ...]:
    path = folder / name
    if not path.is_file():
        return ()
    text = _text(path)
    whole = text[: text.rfind("\n") + 1]  # a run that is still going may be half through its last line
    found = []
    for line, row in enumerate(csv.DictReader(io.StringIO(whole)), start=2):
        try:
            found.append(read(row))
        except (KeyError, TypeError, ValueError) as error:
            raise ApieceError(f"{path}, line {line}: cannot read {error}") from error
    return tuple(found)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ApieceError(f"{path}: {error}") from error
