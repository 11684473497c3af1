"""`apiece reproduce`: a paper's table run again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from apiece import reproduce as papers
from apiece import terminal
from apiece.errors import ApieceError, unknown
from apiece.prepare import loading_once
from apiece.settings import parse_seeds
from apiece.terminal import JsonFlag


def reproduce(
    table: Annotated[
        str, typer.Argument(help="A table's id; `list` shows them; `page` writes docs/results.md and .html.")
    ] = "list",
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="ROW/COLUMN", help="Some cells, `*` fits anything. May be repeated."),
    ] = None,
    scale: Annotated[
        str, typer.Option(help="`full`: the paper's setting; `smoke`: toy sizes on toy files.")
    ] = "full",
    seeds: Annotated[str | None, typer.Option(help="Seeds: `0-4` or `0,3,7`. Default: the table's.")] = None,
    search: Annotated[
        bool,
        typer.Option("--search", help="Search for the settings that the paper leaves open, and stop."),
    ] = False,
    jobs: Annotated[int, typer.Option(help="Cells trained, or searched, at once, each by a process.")] = 1,
    spread: Annotated[
        bool, typer.Option("--spread", help="Train the runs on a Ray cluster, one each in one place.")
    ] = False,
    address: Annotated[str, typer.Option(help="The cluster's address, with --spread.")] = "",
    device: Annotated[str, typer.Option(help="`cpu`, `cuda`, or `auto`.")] = "auto",
    experiments: Annotated[Path, typer.Option(help="Folder of the tables' files.")] = Path("experiments"),
    results: Annotated[Path, typer.Option(help="Folder of the ledgers.")] = Path("results"),
    out: Annotated[Path, typer.Option(help="Folder of the runs.")] = Path("runs/reproduce"),
    json: JsonFlag = False,
) -> None:
    """Run a paper's table again, on its data, and show our numbers beside the paper's.

    What is in the ledger (results/TABLE.jsonl) is not run again; what was interrupted goes on. Settings that
    a paper leaves open are searched first, by `--search`: on validation examples of the training clients,
    with as many trials for every row (results/TABLE-search.jsonl).

    Examples:

    - `apiece reproduce list`

    - `apiece reproduce p5-figure1 --only "*/MNIST" --seeds 0-2`

    - `apiece reproduce p1-table2 --search --only "*/FEMNIST*"`

    - `apiece reproduce p3-table1 --scale smoke`
    """
    known = papers.tables(experiments)
    if table == "list":
        terminal.show_tables(known, results, json)
        return
    if table == "page":
        for place in terminal.write_results(known, results, Path("docs")):
            typer.echo(place)
        return
    if table not in known:
        raise unknown("table", table, known)
    if scale not in papers.SCALES:
        raise unknown("scale", scale, papers.SCALES)
    place = results / f"{table}.jsonl" if scale == "full" else out / scale / f"{table}.jsonl"
    work = papers.Reproduction(known[table], scale, out, place, device, experiments)
    if search:
        failed = _searched(work, work.unsearched(only or []), jobs, json)
        terminal.show_searched(work, json)
        _refuse(failed)
        return
    missing = work.missing(only or [], [] if seeds is None else parse_seeds(seeds))
    if not missing:
        typer.echo(f"nothing to run: all of it is in {place}; to run it again: --results DIR", err=True)
    if spread:
        runs = sum(map(len, missing.values()))
        with terminal.bar(table, runs, json, place.parent, "the same command", place.name) as tick:
            for done in papers.train_spread(work, missing, address):
                tick(done, None)
    failed = _reproduced(work, missing, jobs, json)
    terminal.show_reproduced(known[table], scale, place, only or [], json)
    _refuse(failed)


def _reproduced(
    work: papers.Reproduction, missing: dict[papers.Place, list[int]], jobs: int, quiet: bool
) -> dict[papers.Place, BaseException]:
    """Train and measure cells; those that failed."""
    failed: dict[papers.Place, BaseException] = {}
    place, again = work.ledger, "the same command"
    if jobs > 1:
        with terminal.bar(work.table.id, len(missing), quiet, place.parent, again, place.name) as tick:
            for done, (cell, found) in enumerate(papers.run_all(work, missing, jobs), 1):
                if isinstance(found, BaseException):
                    failed[cell] = found
                tick(done, None)
        return failed
    with loading_once():
        for cell, left in missing.items():
            rounds = work.table.at(cell, work.scale).rounds
            try:
                with terminal.bar("/".join(cell), rounds, quiet, place.parent, again, place.name) as tick:
                    work.run(cell, left, tick)
            except ApieceError as error:  # what is wrong with one cell is not wrong with the others
                failed[cell] = error
    return failed


def _searched(
    work: papers.Reproduction, places: list[papers.Place], jobs: int, quiet: bool
) -> dict[papers.Place, BaseException]:
    """Carry out searches; those that failed."""
    failed: dict[papers.Place, BaseException] = {}
    title = f"{work.table.id} searches"
    bar = terminal.bar(
        title, len(places), quiet, work.searches.parent, "the same command", work.searches.name
    )
    with bar as tick, loading_once():
        if jobs == 1:
            for done, place in enumerate(places, 1):
                try:
                    work.search(place, lambda trials: None)
                except ApieceError as error:
                    failed[place] = error
                tick(done, None)
        else:
            for done, (place, found) in enumerate(papers.search_all(work, places, jobs), 1):
                if isinstance(found, BaseException):
                    failed[place] = found
                tick(done, None)
    return failed


def _refuse(failed: dict[papers.Place, BaseException]) -> None:
    if failed:
        first = next(iter(failed.items()))
        raise ApieceError(f"{len(failed)} cells failed; {'/'.join(first[0])}: {first[1]}")
