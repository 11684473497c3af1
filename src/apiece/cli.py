"""The `apiece` command."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from apiece.errors import ApieceError

app = typer.Typer(
    name="apiece",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Personalized federated learning: many clients, each with its own small data, end up with a good "
    "model **apiece**.\n\nStart with `apiece run`, then `apiece report`.",
)

out = Console()
err = Console(stderr=True)

# What fits 80 columns; the report shows the rest.
_TERMINAL_COLUMNS = {
    ("seen", "initial"),
    ("seen", "personalized"),
    ("seen", "harmed"),
    ("unseen", "initial"),
    ("unseen", "personalized"),
    ("cost", "time"),
}

WHAT, HOW, WHERE = "What to train", "How to run", "Output"

MethodFlag = Annotated[
    str | None,
    typer.Option("--method", "-m", help="A method (see `apiece methods`), `wrapper(method)`, or `file.py:Class`.",
                 rich_help_panel=WHAT),
]
SetFlag = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", metavar="KEY=VALUE", rich_help_panel=WHAT,
                 help="A setting of the method: `lr=0.1` (short for `local.lr`), `personal.epochs=3`, `inner.lr=0.1`."),
]
DataFlag = Annotated[
    str | None,
    typer.Option(help="A dataset (see `apiece datasets`), or your own .npz, .csv, .parquet file or folder.",
                 rich_help_panel=WHAT),
]
ClientColumnFlag = Annotated[
    str | None, typer.Option(help="Your data's column of clients.", rich_help_panel=WHAT)
]
LabelColumnFlag = Annotated[str | None, typer.Option(help="Your data's column of labels.", rich_help_panel=WHAT)]
ModelFlag = Annotated[
    str | None,
    typer.Option(help="A model (see `apiece models`), as `mlp` or `mlp(hidden=(64,32))`, or `module:factory`.",
                 rich_help_panel=WHAT),
]
ClientsFlag = Annotated[int | None, typer.Option(help="Clients to deal the data to.", rich_help_panel=WHAT)]
PartitionFlag = Annotated[
    str | None,
    typer.Option(help="How: `iid`, `dirichlet:ALPHA[:MIN]`, `classes:K`, `power:SIGMA`, `natural`; "
                 "`auto` keeps the data's own clients, else `classes:4`.", rich_help_panel=WHAT),
]
PartitionSeedFlag = Annotated[int | None, typer.Option(help="Seed of the deal.", rich_help_panel=WHAT)]
TestFlag = Annotated[float | None, typer.Option(help="Share of each client's examples held out.", rich_help_panel=WHAT)]
UnseenFlag = Annotated[float | None, typer.Option(help="Share of clients that never train.", rich_help_panel=WHAT)]
RoundsFlag = Annotated[int | None, typer.Option("--rounds", "-r", help="Rounds.", rich_help_panel=WHAT)]
CohortFlag = Annotated[int | None, typer.Option(help="Clients per round.", rich_help_panel=WHAT)]
SeedFlag = Annotated[
    int | None, typer.Option(help="Seed of all training: same seed, same cohorts and orders.", rich_help_panel=WHAT)
]
EngineFlag = Annotated[
    str | None, typer.Option(help="`auto`, `sequential` or `vectorized`.", rich_help_panel=HOW)
]
DeviceFlag = Annotated[str | None, typer.Option(help="`auto`, `cpu`, `cuda` or `cuda:N`.", rich_help_panel=HOW)]
ChunkFlag = Annotated[int | None, typer.Option(help="Clients computed at once, at the most.", rich_help_panel=HOW)]
ThreadsFlag = Annotated[int | None, typer.Option(help="CPU threads; 0 measures.", rich_help_panel=HOW)]
StoreFlag = Annotated[
    str | None, typer.Option(help="Clients' states: `auto`, `memory` or `mapped` (on disk).", rich_help_panel=HOW)
]
EvaluateFlag = Annotated[int | None, typer.Option(help="Rounds between evaluations.", rich_help_panel=HOW)]
CheckpointFlag = Annotated[int | None, typer.Option(help="Rounds between checkpoints.", rich_help_panel=HOW)]
TargetFlag = Annotated[float | None, typer.Option(help="Score for the rounds-to-target figure.", rich_help_panel=HOW)]
NanFlag = Annotated[
    str | None,
    typer.Option(help="A NaN update: `stop` the run, or `skip` that client and count it.", rich_help_panel=HOW),
]
OutFlag = Annotated[
    Path | None, typer.Option("--out", "-o", help="Folder for the run's files.", rich_help_panel=WHERE)
]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON for a program to read.", rich_help_panel=WHERE)]
ExperimentFile = Annotated[
    Path | None, typer.Argument(metavar="[EXPERIMENT.toml]", help="An experiment; flags override what it says.")
]
RunFolder = Annotated[Path, typer.Argument(metavar="DIR", help="A run's folder.")]


@app.command()
def run(
    experiment: ExperimentFile = None,
    method: MethodFlag = None,
    set: SetFlag = None,
    data: DataFlag = None,
    client_column: ClientColumnFlag = None,
    label_column: LabelColumnFlag = None,
    model: ModelFlag = None,
    clients: ClientsFlag = None,
    partition: PartitionFlag = None,
    partition_seed: PartitionSeedFlag = None,
    test: TestFlag = None,
    unseen: UnseenFlag = None,
    rounds: RoundsFlag = None,
    cohort: CohortFlag = None,
    seed: SeedFlag = None,
    engine: EngineFlag = None,
    device: DeviceFlag = None,
    chunk: ChunkFlag = None,
    threads: ThreadsFlag = None,
    store: StoreFlag = None,
    evaluate_every: EvaluateFlag = None,
    checkpoint_every: CheckpointFlag = None,
    target: TargetFlag = None,
    on_nan: NanFlag = None,
    out: OutFlag = None,
    json: JsonFlag = False,
) -> None:
    """Run one experiment. Without anything else: FedAvg on digits, 30 clients.

    Examples:

    - `apiece run --method reptile --partition classes:2 --rounds 100`

    - `apiece run --data patients.csv --client-column hospital --label-column outcome`

    - `apiece run --method "elastic(fedavg)" --set alpha=0.5 --set inner.lr=0.1`
    """
    flags = dict(locals())
    described = _experiment(flags)
    folder = out or _free_folder(described.method, described.data, described.seed)
    from apiece.session import run as run_experiment

    with _bar(described.method, described.rounds, quiet=json) as tick:
        result = run_experiment(described, folder, tick)
    _show([folder], json, result.summary)


@app.command()
def compare(
    experiment: ExperimentFile = None,
    methods: Annotated[
        str, typer.Option(help="Methods, separated by commas.", rich_help_panel=WHAT)
    ] = "local,fedavg,reptile",
    seeds: Annotated[str, typer.Option(help="Seeds: `0-4` or `0,3,7`.", rich_help_panel=WHAT)] = "0",
    set: SetFlag = None,
    data: DataFlag = None,
    client_column: ClientColumnFlag = None,
    label_column: LabelColumnFlag = None,
    model: ModelFlag = None,
    clients: ClientsFlag = None,
    partition: PartitionFlag = None,
    partition_seed: PartitionSeedFlag = None,
    test: TestFlag = None,
    unseen: UnseenFlag = None,
    rounds: RoundsFlag = None,
    cohort: CohortFlag = None,
    engine: EngineFlag = None,
    device: DeviceFlag = None,
    chunk: ChunkFlag = None,
    threads: ThreadsFlag = None,
    store: StoreFlag = None,
    evaluate_every: EvaluateFlag = None,
    checkpoint_every: CheckpointFlag = None,
    target: TargetFlag = None,
    on_nan: NanFlag = None,
    out: OutFlag = None,
    json: JsonFlag = False,
) -> None:
    """Run several methods with the same seeds, cohorts and batch orders, and print one table.

    What is finished in the output folder is not run again; what was interrupted goes on.
    `--set fedavg.lr=0.1` sets one method, `--set lr=0.1` all of them.

    Example: `apiece compare --methods local,fedavg,reptile --seeds 0-4 --partition classes:2`
    """
    flags = dict(locals())
    from apiece import session

    names = _split_methods(methods)
    base = {key: flags[key] for key in flags if key not in ("methods", "seeds", "set")}
    folder = out or _free_folder("compare", data or "digits", None)
    folders = []
    for name in names:
        for seed in _seeds(seeds):
            described = _experiment({**base, "method": name, "seed": seed, "set": _for_method(set or [], name, names)})
            place = folder / f"{_file_name(name)}-s{seed}"
            with _bar(f"{name} seed {seed}", described.rounds, quiet=json) as tick:
                session.run_or_resume(described, place, tick)
            folders.append(place)
    _show(folders, json, None)


@app.command()
def resume(folder: RunFolder, json: JsonFlag = False) -> None:
    """Go on with an interrupted run, from its last checkpoint, to the same files bit for bit."""
    from apiece import experiment
    from apiece.session import resume as resume_run

    described = experiment.read(folder / "experiment.toml") if (folder / "experiment.toml").exists() else None
    name, rounds = (described.method, described.rounds) if described else ("", 0)
    with _bar(name, rounds, quiet=json) as tick:
        result = resume_run(folder, tick)
    _show([folder], json, result.summary)


@app.command()
def report(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Runs, or folders of runs.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The HTML file.")] = Path("report.html"),
) -> None:
    """Write one self-contained HTML page: table, learning curves, every client, the partition."""
    from apiece import report as reports

    runs = [run for folder in folders for run in _runs_in(folder)]
    out.print(f"report: {reports.write(runs, output)}")


@app.command()
def methods(
    name: Annotated[str | None, typer.Argument(help="One method: show its settings.")] = None,
    json: JsonFlag = False,
) -> None:
    """The methods and wrappers, or the settings of one."""
    from apiece import catalog
    from apiece.methods import METHODS
    from apiece.wrappers import WRAPPERS

    if name is not None:
        _one_method(name, json)
        return
    rows = []
    for entry in sorted(METHODS) + sorted(WRAPPERS):
        cls = catalog.lookup(entry)
        shown = f"{entry}(…)" if entry in WRAPPERS else entry
        rows.append({"name": shown, "kind": cls.kind, "paper": cls.paper, "what": _first_line(cls)})
    _print_rows(rows, json)


@app.command()
def datasets(json: JsonFlag = False) -> None:
    """The built-in datasets; your own are given to `--data` as a path."""
    from apiece.data import DATASETS

    rows = [{"name": name, "what": what} for name, what in DATASETS.items()]
    rows.append({"name": "PATH", "what": "your own .npz, .csv or .parquet file, or a folder with a file per client"})
    _print_rows(rows, json)


@app.command()
def models(json: JsonFlag = False) -> None:
    """The built-in models; your own are given to `--model` as `module:factory`."""
    from apiece.models import MODELS

    rows = [{"name": name, "what": entry.description} for name, entry in MODELS.items()]
    rows.append({"name": "module:factory", "what": "your own: a function that returns a torch.nn.Module"})
    _print_rows(rows, json)


@app.command()
def check(
    method: Annotated[str, typer.Argument(help="A method, `wrapper(method)` or `file.py:Class`.")],
    set: SetFlag = None,
    device: Annotated[str, typer.Option(help="`cpu` or `cuda`.")] = "cpu",
    json: JsonFlag = False,
) -> None:
    """Examine a method: the conformance suite that every method here passes."""
    from apiece import catalog, settings
    from apiece.check import examine

    findings = examine(catalog.build(method, settings.nested(set or [])), device)
    if json:
        _print_json([finding._asdict() for finding in findings])
    else:
        for finding in findings:
            out.print(f"[{'green]✓' if finding.ok else 'red]✗'}[/] {finding.rule}", finding.detail, sep="  ")
    if not all(finding.ok for finding in findings):
        raise typer.Exit(1)


@app.command()
def export(
    folder: RunFolder,
    client: Annotated[str, typer.Option(help="The client, by id or by name.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The .safetensors file.")],
    json: JsonFlag = False,
) -> None:
    """Write the personalized model of one client of a run: its model apiece."""
    from apiece import deploy

    _show_deployed(deploy.export(folder, client, output), output, json)


@app.command()
def personalize(
    folder: RunFolder,
    data: Annotated[Path, typer.Option(help="The newcomer's own .npz, .csv or .parquet file.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The .safetensors file.")],
    json: JsonFlag = False,
) -> None:
    """Write a personalized model for a client that was not part of the run."""
    from apiece import deploy

    _show_deployed(deploy.personalize(folder, data, output), output, json)


def _experiment(flags: dict[str, Any]) -> Any:
    """The experiment that a file and flags describe."""
    from apiece import experiment, settings

    base = experiment.read(flags["experiment"]) if flags["experiment"] else experiment.Experiment()
    given = {key: flags[key] for key in experiment.KEYS if flags.get(key) is not None}
    # Settings belong to a method: those of the file's method do not fit another one.
    same = given.get("method", base.method) == base.method
    given["settings"] = settings.nested(flags["set"] or [], base.settings if same else {})
    return experiment.from_table(given, base)


def _split_methods(text: str) -> list[str]:
    """Names between commas outside parentheses."""
    names, depth = [""], 0
    for letter in text:
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if letter == "," and depth == 0:
            names.append("")
        else:
            names[-1] += letter
    return [name.strip() for name in names if name.strip()]


def _seeds(text: str) -> list[int]:
    try:
        if "-" in text:
            first, last = map(int, text.split("-"))
            return list(range(first, last + 1))
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ApieceError(f"--seeds takes 0-4 or 0,3,7, got {text!r}") from error


def _for_method(flags: list[str], name: str, names: list[str]) -> list[str]:
    """The flags for all methods, and those that begin with this one's name."""
    chosen = []
    for flag in flags:
        owner, dot, rest = flag.partition(".")
        if dot and owner in names:
            chosen += [rest] if owner == name else []
        else:
            chosen.append(flag)
    return chosen


def _file_name(text: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "-_" else "-" for letter in text).strip("-")


def _free_folder(method: str, data: str, seed: int | None) -> Path:
    name = "-".join([_file_name(method), _file_name(Path(data).stem)] + ([f"s{seed}"] if seed is not None else []))
    folder, number = Path("runs") / name, 1
    while folder.exists():
        number += 1
        folder = Path("runs") / f"{name}-{number}"
    return folder


def _runs_in(folder: Path) -> list[Path]:
    """The folder itself if it is a run, else the runs in it."""
    if (folder / "experiment.toml").exists() or not folder.is_dir():
        return [folder]
    inside = sorted(path.parent for path in folder.glob("*/experiment.toml"))
    if not inside:
        raise ApieceError(f"{folder} holds no run")
    return inside


@contextmanager
def _bar(title: str, rounds: int, quiet: bool) -> Iterator[Callable[..., None]]:
    """A progress bar with time left and the latest scores."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=16),
        MofNCompleteColumn(),
        TimeRemainingColumn(compact=True, elapsed_when_finished=True),
        TextColumn("{task.fields[scores]}"),
    )
    bar = Progress(*columns, console=err, disable=quiet)
    job = bar.add_task(title, total=rounds or None, scores="")

    def tick(done: int, groups: Any) -> None:
        bar.start()
        bar.update(job, completed=done, **({"scores": _scores(groups)} if groups else {}))

    try:
        yield tick
    finally:
        bar.stop()


def _scores(groups: Any) -> str:
    parts = [
        f"{name} {100 * group.initial:.1f}→{100 * group.personalized:.1f}" for name, group in groups.items() if group
    ]
    return "  ".join(parts)


def _show(folders: list[Path], as_json: bool, summary: dict[str, Any] | None) -> None:
    """The table of finished runs."""
    from apiece.report import results

    runs = [results.load(folder) for folder in folders]
    if as_json:
        _print_json(summary if summary is not None else [run.summary for run in runs])
        return
    rows = results.table(runs)
    several = len(runs) > len(rows)
    title = f"{results.metric(runs)} in %" + (", mean ± std over seeds" if several else "")
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    columns = [c for c in results.columns(rows) if (c.group.split()[0], c.name) in _TERMINAL_COLUMNS]
    table.add_column("\nmethod", overflow="fold")
    for column in columns:
        table.add_column(f"{column.group.split()[0]}\n{column.name}", justify="right", no_wrap=True)
    for index, row in enumerate(rows):
        table.add_row(row.label, *(_cell(column, index) for column in columns))
    out.print(table)
    place = folders[0] if len(folders) == 1 else folders[0].parent
    out.print(f"files: {place}\nreport: apiece report {place} -o report.html")


def _cell(column: Any, index: int) -> str:
    """A cell of the terminal's table, bold where it is the best; side figures without their spread."""
    text = column.cells[index]
    if column.name not in ("initial", "personalized"):
        text = text.split(" ±")[0] + (" s" if column.name == "time" and "±" in text else "")
    return f"[bold]{text}[/]" if index in column.best else text


def _one_method(name: str, as_json: bool) -> None:
    from apiece import catalog, settings
    from apiece.wrappers import WRAPPERS

    method = catalog.build(f"{name}(fedavg)" if name in WRAPPERS else name, {})
    table = catalog.settings_of(method)
    if as_json:
        _print_json({"name": name, "paper": method.paper, "kind": method.kind, "settings": table})
        return
    out.print(f"[bold]{name}[/]  {method.paper}  ({method.kind})")
    out.print(_first_line(type(method)), markup=False)
    out.print("\nSettings and their defaults:", settings.to_toml({"settings": table}), sep="\n", markup=False)


def _first_line(cls: type) -> str:
    return (cls.__doc__ or "").strip().splitlines()[0]


def _show_deployed(deployed: Any, output: Path, as_json: bool) -> None:
    if as_json:
        _print_json({**deployed._asdict(), "output": str(output)})
        return
    out.print(
        f"client {deployed.client}, after {deployed.round} rounds: loss on its own {deployed.examples} examples "
        f"{deployed.loss_before:.4f} → {deployed.loss_after:.4f}\nmodel: {output}"
    )


def _print_rows(rows: list[dict[str, str]], as_json: bool) -> None:
    if as_json:
        _print_json(rows)
        return
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*row.values())
    out.print(table)


def _print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def main() -> None:
    logging.basicConfig(
        level=logging.WARNING, format="%(message)s", handlers=[RichHandler(console=err, show_path=False, show_time=False)]
    )
    try:
        app()
    except ApieceError as error:
        err.print(f"[red]error:[/] {error}", markup=True, highlight=False, soft_wrap=True)
        sys.exit(2)
    except KeyboardInterrupt:
        err.print("interrupted; a run with an output folder goes on with: apiece resume DIR")
        sys.exit(130)
