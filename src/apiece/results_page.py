"""Reproduced tables beside their papers, as Markdown, as one HTML page and for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from itertools import groupby
from statistics import fmean, stdev
from typing import NamedTuple

from apiece.ledger import Entry, Searched
from apiece.report import plots
from apiece.report.document import document
from apiece.report.results import Curve
from apiece.reproduce import Place, Table
from apiece.tune import flags

NOT_RUN = "not run"
NONE = "–"


class Figure(NamedTuple):
    """One number of a cell: ours over seeds, and the paper's."""

    name: str
    unit: str
    values: tuple[float, ...]
    published: float | None
    absent: str = NOT_RUN  # what stands where ours would

    @property
    def ours(self) -> str:
        if not self.values:
            return self.absent
        spread = f" ± {stdev(self.values):.2f}" if len(self.values) > 1 else ""
        return f"{fmean(self.values):.2f}{spread}"

    @property
    def paper(self) -> str:
        return "" if self.published is None else f"{self.published:.2f}"

    @property
    def difference(self) -> str:
        return (
            f"{fmean(self.values) - self.published:+.2f}"
            if self.values and self.published is not None
            else ""
        )


class Line(NamedTuple):
    """One cell of a table, with all its numbers."""

    place: Place
    seeds: int
    figures: tuple[Figure, ...]


def lines(table: Table, entries: Sequence[Entry]) -> list[Line]:
    """Every cell, column by column; those that the ledger does not have too."""
    found = []
    for place in sorted(table.cells, key=lambda place: _column_order(table).index(place[1])):
        mine = _of(place, entries)
        published = table.published.get(place, {})
        figures = tuple(
            Figure(
                name,
                unit,
                tuple(e.numbers[name] for e in mine if name in e.numbers),
                published.get(name),
                NONE if mine else NOT_RUN,
            )
            for name, unit in table.figures.items()
        )
        found.append(Line(place, len(mine), figures))
    return found


def _begun(entries: Sequence[Entry]) -> set[str]:
    """The columns of which something was run."""
    return {entry.column for entry in entries if entry.scale == "full"}


def _parted(table: Table, entries: Sequence[Entry]) -> tuple[list[Line], list[Line]]:
    """(the lines of such columns, those of the others)."""
    columns, listed = _begun(entries), lines(table, entries)
    return (
        [line for line in listed if line.place[1] in columns],
        [line for line in listed if line.place[1] not in columns],
    )


def gains(table: Table, entries: Sequence[Entry]) -> list[tuple[str, Figure]]:
    """The differences between rows that the paper speaks of, seed by seed where both rows have it.

    Under columns of which something was run.
    """
    found = []
    for gain in [gain for gain in table.gains if gain.column in _begun(entries)]:
        better, worse = (
            {
                e.seed: e.numbers[gain.figure]
                for e in _of((row, gain.column), entries)
                if gain.figure in e.numbers
            }
            for row in (gain.row, gain.over)
        )
        if len(worse) == 1:  # one model, which all seeds of the other row start from
            values = tuple(value - fmean(worse.values()) for value in better.values())
        else:
            values = tuple(better[seed] - worse[seed] for seed in sorted(better.keys() & worse.keys()))
        name = f"{gain.row} − {gain.over}, {gain.column}: {gain.figure}"
        found.append((name, Figure(gain.figure, "", values, gain.published)))
    return found


class Found(NamedTuple):
    """What the latest search of a row under a column found."""

    place: Place
    settings: str
    score: str
    effort: str


def found(table: Table, searches: Sequence[Searched]) -> list[Found]:
    """Column by column, rows as in the table."""
    latest = {(s.row, s.column): s for s in searches if s.scale == "full"}
    order = [place for column in _column_order(table) for place in table.cells if place[1] == column]
    listed = []
    for place in order:
        if place in latest:
            search = latest[place]
            best = max(trial["score"] for trial in search.trials if trial["score"] is not None)
            effort = (
                f"{len(search.trials)} trials of {search.rounds} rounds, judged by the {search.score} score "
                f"on {100 * search.validation:g} % of the training examples"
            )
            settings = " ".join(flags(search.settings)) or "as given"
            listed.append(Found(place, settings, f"{100 * best:.2f}", effort))
    return listed


_SEARCH = ("", "", "settings found", "their score, %", "search")

_ABOUT = """# The papers, reproduced

Every number below was made by `apiece reproduce TABLE` and stands in results/TABLE.jsonl with its seed,
settings, commit, hardware and seconds. Ours: mean ± standard deviation over seeds. No test example took part
in training or in any search. A cell that was not run says so. This page is made by `apiece reproduce page`.
"""


def markdown(
    tables: Mapping[str, Table],
    ledger: Mapping[str, Sequence[Entry]],
    searches: Mapping[str, Sequence[Searched]],
) -> str:
    """The page docs/results.md."""
    parts = [_ABOUT, "| | | | cells run |\n|---|---|---|---|"]
    for table in tables.values():
        told = f"{_briefly(table)} | {table.title} | {_counted(table, ledger[table.id])}"
        parts.append(f"| [{table.id}](#{table.id}) | {told} |")
    for table in tables.values():
        entries = ledger[table.id]
        parts.append(f"\n## {table.id}\n\n{table.title}. {table.source}.\n")
        if not entries:
            parts.append(_none(table))
            continue
        begun, waiting = _parted(table, entries)
        parts.append(_rows(table, entries, begun))
        if differences := gains(table, entries):
            parts.append("\n| gain | ours | paper | difference |\n|---|---|---|---|")
            parts += [f"| {n} | {f.ours} | {f.paper} | {f.difference} |" for n, f in differences]
        if waiting:
            summary = f"<summary>{_waiting(waiting)}</summary>"
            parts.append(f"\n<details>{summary}\n\n{_rows(table, entries, waiting)}\n\n</details>")
        if listed := found(table, searches[table.id]):
            parts.append(f"\n| {' | '.join(_SEARCH)} |\n|{'---|' * len(_SEARCH)}")
            parts += [f"| {f.place[1]} | {f.place[0]} | {' | '.join(f[1:])} |" for f in listed]
        parts.append("\n" + "\n".join(f"- {note}" for note in _notes(table, entries)))
    return "\n".join(parts) + "\n"


def _rows(table: Table, entries: Sequence[Entry], listed: Sequence[Line]) -> str:
    """A table in Markdown."""
    heads = [head for name in _shown(table, entries) for head in _heads(table, name)]
    rows = [f"| | | {' | '.join(heads)} | seeds |", f"|---|---|{'---|' * (len(heads) + 1)}"]
    for line in listed:
        row, column = line.place
        cells = [text for f in line.figures for text in _texts(table, f, entries)]
        rows.append(f"| {column} | {row} | {' | '.join(cells)} | {line.seeds or ''} |")
    return "\n".join(rows)


def html(
    tables: Mapping[str, Table],
    ledger: Mapping[str, Sequence[Entry]],
    searches: Mapping[str, Sequence[Searched]],
) -> str:
    """One page with every table and its curves."""
    body = [
        '<p class="brand">Apiece <span>the papers, reproduced</span></p><h1>Ours beside the papers</h1>'
        '<p class="lead">Mean ± standard deviation over seeds; what was not run says so. '
        "Of each table or figure, how many cells were run:</p>",
        _contents(tables, ledger),
    ]
    body += [_section(table, ledger[table.id], searches[table.id]) for table in tables.values()]
    return document("The papers, reproduced", "".join(body))


def _contents(tables: Mapping[str, Table], ledger: Mapping[str, Sequence[Entry]]) -> str:
    listed = "".join(
        f'<li><a href="#{table.id}">{escape(_briefly(table))}</a>: {escape(table.title)}. '
        f"{_counted(table, ledger[table.id])} cells.</li>"
        for table in tables.values()
    )
    return f"<ul>{listed}</ul>"


def _notes(table: Table, entries: Sequence[Entry]) -> list[str]:
    return [
        *(f"Found: {note}" for note in table.findings),
        *table.settings,
        *(f"Departure: {note}" for note in table.departures),
        *_made(entries),
    ]


def _briefly(table: Table) -> str:
    """Of the source what stands from its method's name on: `FedEC, Table 2`."""
    return table.source.partition("(")[2].replace(")", "") or table.source


def _counted(table: Table, entries: Sequence[Entry]) -> str:
    listed = lines(table, entries)
    return f"{sum(line.seeds > 0 for line in listed)} of {len(listed)}"


def _waiting(listed: Sequence[Line]) -> str:
    columns = dict.fromkeys(line.place[1] for line in listed)
    return f"Not run yet: {', '.join(columns)} ({len(listed)} cells)"


def _none(table: Table) -> str:
    return f"None of its {len(table.cells)} cells has been run yet."


def _shown(table: Table, entries: Sequence[Entry]) -> list[str]:
    """The figures that some run has or the paper gives."""
    known = {
        name for numbers in (*table.published.values(), *(e.numbers for e in entries)) for name in numbers
    }
    return [name for name in table.figures if name in known]


def _heads(table: Table, name: str) -> list[str]:
    published = any(name in numbers for numbers in table.published.values())
    return [name, *(("paper", "difference") if published else ())]


def _texts(table: Table, figure: Figure, entries: Sequence[Entry]) -> list[str]:
    """A figure's cells under its heads, none if it is not shown."""
    if figure.name not in _shown(table, entries):
        return []
    return [figure.ours, figure.paper, figure.difference][: len(_heads(table, figure.name))]


def _section(table: Table, entries: Sequence[Entry], searches: Sequence[Searched]) -> str:
    about = f'<p class="about">{escape(f"{table.title}. {table.source}.")}</p>'
    head = f'<section><h2 id="{table.id}">{escape(table.id)}</h2>{about}'
    if not entries:
        return f"{head}<p>{_none(table)}</p></section>\n"
    begun, waiting = _parted(table, entries)
    differences = "".join(
        f'<tr><th scope="row">{escape(name)}</th><td class="first">{f.ours}</td><td>{f.paper}</td>'
        f"<td>{f.difference}</td></tr>"
        for name, f in gains(table, entries)
    )
    others = ""
    if waiting:
        summary = f"<summary>{escape(_waiting(waiting))}</summary>"
        others = f"<details>{summary}{_scrolled(table, entries, waiting)}</details>"
    listed = "".join(f"<li>{escape(note)}</li>" for note in _notes(table, entries))
    return (
        f"{head}{_scrolled(table, entries, begun, differences)}{others}"
        f"{_charts(table, entries)}{_paths(table, entries)}{_searches(table, searches)}"
        f"<ul>{listed}</ul></section>\n"
    )


def _scrolled(table: Table, entries: Sequence[Entry], listed: Sequence[Line], more: str = "") -> str:
    """A table in HTML, with `more` rows."""
    named = [head for name in _shown(table, entries) for head in _heads(table, name)]
    heads = "".join(f'<th scope="col">{escape(head)}</th>' for head in named)
    rows = []
    for column, group in groupby(listed, key=lambda line: line.place[1]):
        rows.append(f'<tr><th scope="colgroup" colspan="{2 + len(named)}">{escape(column)}</th></tr>')
        for line in group:
            texts = [text for f in line.figures for text in _texts(table, f, entries)]
            cells = "".join(f"<td>{escape(text)}</td>" for text in (*texts, str(line.seeds or "")))
            rows.append(f'<tr><th scope="row">{escape(line.place[0])}</th>{cells}</tr>')
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(table.title)}"><table>'
        f'<thead><tr><th scope="col"></th>{heads}<th scope="col">seeds</th></tr></thead>'
        f"<tbody>{''.join(rows)}{more}</tbody></table></div>"
    )


def _searches(table: Table, searches: Sequence[Searched]) -> str:
    listed = found(table, searches)
    if not listed:
        return ""
    heads = "".join(f'<th scope="col">{escape(head)}</th>' for head in _SEARCH)
    rows = "".join(
        f'<tr><th scope="row">{escape(f.place[1])}</th>'
        + "".join(f"<td>{escape(text)}</td>" for text in (f.place[0], *f[1:]))
        + "</tr>"
        for f in listed
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="Settings of {escape(table.id)}">'
        f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _charts(table: Table, entries: Sequence[Entry]) -> str:
    """For each column and curve, a line for each row."""
    panels = []
    names = list(dict.fromkeys(name for entry in entries for name in entry.curves))
    styles = {row: at for at, row in enumerate(dict.fromkeys(row for row, _ in table.cells))}
    for column in _column_order(table):
        for name in names:
            series = [
                plots.Series(styles[row], row, mean, ())
                for row, other in table.cells
                if other == column and (mean := _mean_curve(name, _of((row, column), entries))).rounds
            ]
            limits = plots.curves_range(series)
            if limits is not None:
                caption = f"{column}: {name}"
                panels.append((escape(caption), plots.curves(series, limits, caption)))
    legend = "".join(f"<li>{plots.swatch(at)}{escape(row)}</li>" for row, at in styles.items())
    return _figure(f'<ul class="legend">{legend}</ul>', panels)


def _paths(table: Table, entries: Sequence[Entry]) -> str:
    """For each cell, the paths of its first run that has some."""
    panels = []
    for place in table.cells:
        for entry in [e for e in _of(place, entries) if e.paths][:1]:
            caption = f"{place[1]}: {place[0]}, seed {entry.seed}"
            panels.append((escape(caption), plots.paths(list(entry.paths.values()), caption)))
    return _figure("", panels)


def _figure(legend: str, panels: Sequence[tuple[str, str]]) -> str:
    drawn = "".join(f'<div class="panel"><h3>{caption}</h3>{svg}</div>' for caption, svg in panels)
    return f'<figure>{legend}<div class="panels two">{drawn}</div></figure>' if drawn else ""


def _mean_curve(name: str, entries: Sequence[Entry]) -> Curve:
    """Over seeds, at the places that all of them have; percent as fractions."""
    tracks: list[dict[float, float]] = [dict(e.curves[name]) for e in entries if name in e.curves]
    places = sorted(set.intersection(*(set(track) for track in tracks))) if tracks else []
    at = [[track[x] / 100 for track in tracks] for x in places]
    stds = tuple(stdev(values) if len(values) > 1 else 0.0 for values in at)
    return Curve(tuple(int(x) for x in places), tuple(fmean(values) for values in at), stds)


def _made(entries: Sequence[Entry]) -> list[str]:
    """Where the numbers come from."""
    kinds = sorted({(e.hardware, e.versions["torch"], e.when, e.commit) for e in entries})
    seconds = sum(e.seconds for e in entries)
    made = [
        f"{hardware}, PyTorch {torch}, {when}, commit {commit}" for hardware, torch, when, commit in kinds
    ]
    return [f"Made on {'; '.join(made)}; {seconds:.0f} s in all."] if made else []


def _of(place: Place, entries: Sequence[Entry]) -> list[Entry]:
    return [e for e in entries if (e.row, e.column) == place and e.scale == "full"]


def _column_order(table: Table) -> list[str]:
    return list(dict.fromkeys(column for _, column in table.cells))
