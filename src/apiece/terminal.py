"""What the terminal shows: the progress bar, tables, and JSON for programs."""

from __future__ import annotations

import math
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean, stdev
from typing import Annotated, Any

import typer
from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from apiece import ledger, results_page, session
from apiece import reproduce as reproducing
from apiece import tune as tuning
from apiece.data import anchored
from apiece.folder import json_text
from apiece.record import Groups

OUTPUT = "Output"  # the panel of a command's help
JsonFlag = Annotated[
    bool, typer.Option("--json", help="Print JSON for a program to read.", rich_help_panel=OUTPUT)
]

WIDE = 160  # characters in a line where no terminal says how many there are
out = Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else WIDE)
err = Console(stderr=True)

APART = 10.0  # seconds between lines that tell how far a run is
TELLING = 36  # characters in a line of what a table tells of each name, at the least

# What the terminal shows of the report's table; where it is narrow, columns of the least number go first.
COLUMNS = {
    ("seen", "initial"): 4,
    ("seen", "personalized"): 6,
    ("unseen", "initial"): 5,
    ("unseen", "personalized"): 7,
    ("seen", "harmed"): 3,
    ("unseen", "harmed"): 2,
    ("cost", "time"): 1,
}


def without_folders(method: str) -> str:
    """Of a method in a file of one's own the file's name is enough."""
    return re.sub(r"[^\s()]*/", "", method) if ".py:" in method else method


@contextmanager
def bar(
    title: str, rounds: int, quiet: bool, folder: Path, again: str, sign: str = "experiment.toml"
) -> Iterator[session.Progress]:
    """A progress bar with time left and the latest scores; Ctrl-C says how to go on, once `sign` is there.

    Where nobody sees a bar move, in a file of a batch system say, a line now and then.
    """
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=16),
        MofNCompleteColumn(),
        TimeRemainingColumn(compact=True, elapsed_when_finished=True),
        TextColumn("{task.fields[scores]}"),
    )
    name = without_folders(title)
    bar = Progress(*columns, console=err, disable=quiet or not err.is_terminal)
    job = bar.add_task(name, total=rounds, scores="")
    scores, measured, told = "", 0, -math.inf

    def tick(done: int, groups: Groups | None) -> None:
        nonlocal scores, measured, told
        if groups:
            scores, measured = _scores(groups), done
        shown = f"{scores} (round {measured})" if scores and measured != done else scores
        if bar.disable:
            if not quiet and (time.monotonic() - told > APART or done == rounds):
                told = time.monotonic()
                err.print(f"{name} {done}/{rounds}  {shown}".rstrip(), highlight=False, markup=False)
            return
        bar.start()
        bar.update(job, completed=done, scores=shown)

    interrupted = False
    try:
        yield tick
    except KeyboardInterrupt:
        interrupted = True
    finally:
        if bar.live.is_started:
            bar.stop()
    if interrupted:
        begun = (folder / sign).exists()
        typer.echo("interrupted" + (f"; go on with: {again}" if begun else " before round 0"), err=True)
        raise typer.Exit(130)


@contextmanager
def download_bar(quiet: bool) -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar for each file that is fetched."""
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=16),
        DownloadColumn(),
        TimeRemainingColumn(compact=True, elapsed_when_finished=True),
    )
    with Progress(*columns, console=err, disable=quiet) as bar:
        jobs: dict[str, TaskID] = {}

        def tick(what: str, done: int, total: int) -> None:
            if what not in jobs:
                jobs[what] = bar.add_task(what, total=None)
            bar.update(jobs[what], completed=done, total=total or None)

        yield tick


def _scores(groups: Groups) -> str:
    parts = [
        f"{name} {100 * group.initial:.1f}→{100 * group.personalized:.1f}"
        for name, group in groups.items()
        if group and group.scored
    ]
    return "  ".join(parts)


def show_runs(folders: list[Path], place: Path, as_json: bool) -> None:
    """The table of finished runs."""
    from apiece.report import results

    runs = [results.load(folder) for folder in folders]
    if as_json:
        found = [{**(run.summary or {}), "folder": str(run.folder)} for run in runs]
        typer.echo(json_text(found[0] if folders == [place] else found), nl=False)
        return
    rows = results.table(runs)
    several = len(runs) > len(rows)
    title = f"{results.metric(runs)} in %" + (", mean ± std over seeds" if several else "")
    labels = [without_folders(row.label) for row in rows]
    columns = {(c.group.split()[0], c.name): c for c in results.columns(rows)}
    shown = [name for name in COLUMNS if name in columns]
    left_out: list[str] = []
    while _measured(table := _table(title, labels, [columns[name] for name in shown])).minimum > out.width:
        if len(shown) == 1:
            break
        shown.remove(least := min(shown, key=lambda name: COLUMNS[name]))
        left_out.append(" ".join(least))
    out.print(table)
    if left_out:
        _tell_left_out(left_out)
    skipped = sum((run.summary or {}).get("skipped", 0) for run in runs)
    if skipped:
        typer.echo(f"skipped: {skipped} updates that were not finite")
    typer.echo(f"files: {place}\nreport: apiece report {place} -o report.html")


def _table(title: str, labels: list[str], columns: list[Any]) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("\nmethod", overflow="fold", min_width=min(TELLING, max(map(cell_len, labels))))
    for column in columns:
        widest = max(cell_len(text) for text in (column.name, *_figures(column)))
        table.add_column(f"{column.group.split()[0]}\n{column.name}", justify="right", min_width=widest)
    for index, label in enumerate(labels):
        table.add_row(escape(label), *(_cell(column, index) for column in columns))
    return table


def _cell(column: Any, index: int) -> str:
    """A cell of the terminal's table, bold where it is the best."""
    text = _figures(column)[index]
    return f"[bold]{text}[/]" if index in column.best else text


def _figures(column: Any) -> Sequence[str]:
    """Side figures without their spread."""
    figures: Sequence[str] = column.cells if column.name in ("initial", "personalized") else column.means
    return figures


def show_forgetting(runs: list[tuple[str, Path]], tasks: list[str], as_json: bool) -> None:
    """Personalized scores on every task's unseen clients (or seen, if all are), mean ± std over seeds."""
    from apiece.report import results

    rows: dict[str, dict[str, list[float]]] = {}
    metric = results.METRIC
    for label, folder in runs:
        run = results.load(folder)
        metric = run.metric
        assert run.summary is not None
        scored = {run.experiment["data"]: run.summary, **run.summary["also"]}
        for task in tasks:
            found = scored[anchored(task)]
            figures = found["unseen"] or found["seen"]
            rows.setdefault(label, {}).setdefault(task, []).append(figures["personalized"])
    if as_json:
        typer.echo(json_text(rows), nl=False)
        return
    table = Table(
        title=f"{metric} in % of the unseen clients of each task, after adapting to it", box=box.SIMPLE_HEAD
    )
    table.add_column("method")
    for task in tasks:
        table.add_column(task, justify="right")
    for label, scores in rows.items():
        cells = [fmean(scores[task]) for task in tasks]
        spread = [f" ± {100 * stdev(scores[task]):.1f}" if len(scores[task]) > 1 else "" for task in tasks]
        table.add_row(label, *(f"{100 * mean:.1f}{std}" for mean, std in zip(cells, spread, strict=True)))
    out.print(table)


def show_tuned(found: dict[str, tuning.Found], files: dict[str, Path], score: str, as_json: bool) -> None:
    """Each method's trials, best first, and the settings of the best; no file where every trial diverged."""
    ranked = {
        name: sorted(one.trials, key=lambda trial: (trial.diverged, -trial.score, trial.number))
        for name, one in found.items()
    }
    if as_json:
        tables = [
            {
                "method": name,
                "settings": one.settings,
                "score": one.score,
                "file": str(files[name]) if name in files else None,
                "trials": [{**trial._asdict(), "diverged": trial.diverged} for trial in ranked[name]],
            }
            for name, one in found.items()
        ]
        typer.echo(json_text(tables), nl=False)
        return
    title = f"{score} score in % on validation examples"
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("method", "settings"):
        table.add_column(heading, overflow="fold")
    for heading in ("score", "time", "trial"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, trials in ranked.items():
        for at, trial in enumerate(trials):
            shown = "diverged" if trial.diverged else f"{100 * trial.score:.1f}"
            cells = (
                escape("" if at else re.sub(r"[^\s()]*/", "", name)),
                escape(" ".join(tuning.flags(trial.settings)) or "defaults"),
                f"[bold]{shown}[/]" if at == 0 and not trial.diverged else shown,
                f"{trial.seconds:.1f} s",
                str(trial.number),
            )
            table.add_row(*cells, end_section=trial is trials[-1])
    out.print(table)
    for name, one in found.items():
        best = " ".join(f"--set {shlex.quote(flag)}" for flag in tuning.flags(one.settings)) or "the defaults"
        typer.echo(f"{name}: {best}" if name in files else f"{name}: every trial diverged")
        if name in files:
            typer.echo(f"  apiece run {shlex.quote(str(files[name]))}")


def show_deployed(deployed: Any, output: Path, as_json: bool) -> None:
    if as_json:
        typer.echo(json_text({**deployed._asdict(), "output": str(output)}), nl=False)
        return
    d = deployed
    losses = f"loss on its own {d.examples} examples {d.loss_initial:.4f} → {d.loss_personalized:.4f}"
    typer.echo(f"client {d.client}, after {d.round} rounds: {losses if d.examples else 'it has no examples'}")
    typer.echo(f"model: {output}")


def show_rows(rows: list[dict[str, str]], as_json: bool) -> None:
    if as_json:
        typer.echo(json_text(rows), nl=False)
        return
    names = list(rows[0])
    while _measured(table := _rows(rows, names)).minimum > out.width and len(names) > 2:
        del names[-2]  # the first is the name, the last tells most
    out.print(table)
    if left_out := [name for name in rows[0] if name not in names]:
        _tell_left_out(left_out)


def _tell_left_out(columns: list[str]) -> None:
    out.print(f"Left out, for the terminal is narrow: {', '.join(columns)}.")


def _measured(table: Table) -> Measurement:
    """How wide a table would be if the terminal were not there."""
    return Measurement.get(out, out.options.update(max_width=500), table)


def _rows(rows: list[dict[str, str]], names: list[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in names:
        # A name that is cut cannot be typed; only what is told at the end may take several lines.
        widest = max(cell_len(text) for text in (name, *(row[name] for row in rows)))
        last = name == names[-1]
        table.add_column(name, no_wrap=not last, min_width=min(widest, TELLING) if last else widest)
    for row in rows:
        table.add_row(*(escape(row[name]) for name in names))
    return table


def show_tables(tables: Mapping[str, reproducing.Table], results: Path, as_json: bool) -> None:
    """Every table that can be reproduced, and how much of it the ledger has."""
    rows = []
    for table in tables.values():
        done = {(e.row, e.column) for e in ledger.read(results / f"{table.id}.jsonl") if e.scale == "full"}
        rows.append(
            {
                "table": table.id,
                "run": f"{len(done)} of {len(table.cells)} cells",
                "paper": table.source,
                "what": table.title,
            }
        )
    show_rows(rows, as_json)


def show_reproduced(
    table: reproducing.Table, scale: str, place: Path, only: Sequence[str], as_json: bool
) -> None:
    """Ours beside the paper's, of the chosen cells; at smoke scale only that all cells ran."""
    chosen = set(table.chosen(only))
    entries = [
        entry
        for entry in ledger.read(place)
        if entry.scale == scale and (scale == "smoke" or (entry.row, entry.column) in chosen)
    ]
    if as_json:
        typer.echo(json_text([entry._asdict() for entry in entries]), nl=False)
        return
    if scale == "smoke":
        done = {(entry.row, entry.column) for entry in entries}
        typer.echo(
            f"{len(done)} of {len(table.cells)} cells of {table.id} ran on toy data; no number of it counts"
        )
        return
    grid = Table(title=f"{table.title}: ours (paper)", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for head in ("", "", *table.figures):
        grid.add_column(head, overflow="fold", justify="left" if not head else "right")
    for line in results_page.lines(table, entries):
        if line.place not in chosen:
            continue
        cells = [f"{f.ours} ({f.paper})" if f.paper else f.ours for f in line.figures]
        grid.add_row(escape(line.place[1]), escape(line.place[0]), *cells)
    out.print(grid)
    for name, figure in results_page.gains(table, entries) if not only else ():
        typer.echo(f"{name}: {figure.ours} (paper {figure.paper})")
    typer.echo(f"ledger: {place}")


def show_searched(work: reproducing.Reproduction, as_json: bool) -> None:
    """The settings found so far, and what remains to be searched."""
    searches = [s for s in ledger.read_searches(work.searches) if s.scale == work.scale]
    if as_json:
        typer.echo(json_text([search._asdict() for search in searches]), nl=False)
        return
    if work.scale == "smoke":
        typer.echo(f"{len(searches)} searches of {work.table.id} ran on toy data; nothing they found counts")
        return
    listed = results_page.found(work.table, searches)
    if listed:
        show_rows(
            [
                {"column": f.place[1], "row": f.place[0], "settings": f.settings, "score in %": f.score}
                for f in listed
            ],
            as_json,
        )
    typer.echo(f"not searched: {len(work.unsearched([]))}\nledger of searches: {work.searches}")


def write_results(tables: Mapping[str, reproducing.Table], results: Path, docs: Path) -> list[Path]:
    """The pages about all ledgers."""
    ledgers = {id: results / f"{id}.jsonl" for id in tables}
    found = {id: ledger.read(place) for id, place in ledgers.items()}
    searches = {id: ledger.read_searches(reproducing.searches_beside(place)) for id, place in ledgers.items()}
    pages = {docs / "results.md": results_page.markdown, docs / "results.html": results_page.html}
    for place, made in pages.items():
        place.write_text(made(tables, found, searches), encoding="utf-8")
    return list(pages)
