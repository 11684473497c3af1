"""The `apiece` command."""

from __future__ import annotations

import inspect
import logging
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.logging import RichHandler
from rich.markup import escape

from apiece import catalog, session, settings, terminal
from apiece import experiment as experiments
from apiece.check import examine
from apiece.choice import pick_device
from apiece.data import DATASETS
from apiece.data.place import data_folder
from apiece.errors import ApieceError
from apiece.experiment import Experiment
from apiece.federation.commands import app as federate
from apiece.folder import json_text
from apiece.importing import own_lines
from apiece.models import MODELS
from apiece.prepare import loading_once
from apiece.reproduce_command import reproduce
from apiece.settings import parse_seeds
from apiece.terminal import OUTPUT, JsonFlag
from apiece.traffic import traffic
from apiece.wrappers import WRAPPERS

app = typer.Typer(
    name="apiece",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Personalized federated learning: many clients, each with its own small data, end up with a good "
    "model **apiece**.\n\nStart with `apiece run`, then `apiece report`.",
)


app.add_typer(federate)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"apiece {version('apiece')}")
        raise typer.Exit


@app.callback()
def about(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Say which version this is.")
    ] = False,
) -> None:
    """Holds what is asked of the command itself."""


WHAT, HOW = "What to train", "How to run"


class Flag(NamedTuple):
    """How a key of the experiment is given on the command line."""

    key: str
    panel: str
    help: str
    short: tuple[str, ...] = ()

    def parameter(self) -> inspect.Parameter:
        default = getattr(Experiment(), self.key)
        names = (f"--{self.key.replace('_', '-')}", *self.short)
        shown = f" Default: {default}." if default not in ("", ()) else ""
        option = typer.Option(*names, help=self.help + shown, rich_help_panel=self.panel)
        kind: Any = list[str] if isinstance(default, tuple) else type(default)
        return _parameter(self.key, Annotated[kind | None, option], None)


FLAGS = (
    Flag("method", WHAT, "A method (`apiece methods`), `wrapper(method)`, or `file.py:Class`.", ("-m",)),
    Flag("data", WHAT, "A dataset (`apiece datasets`), or your own .npz, .csv, .parquet file or folder."),
    Flag(
        "data_dir", WHAT, "The folder of datasets' files. Default: what APIECE_DATA says, or ~/.cache/apiece."
    ),
    Flag("client_column", WHAT, "Your data's column of clients."),
    Flag("label_column", WHAT, "Your data's column of labels."),
    Flag("model", WHAT, "A model (`apiece models`): `mlp`, `mlp(hidden=(64,32))`, or `file.py:factory`."),
    Flag("augment", WHAT, "Of images, in training: `crop_flip`, moved and mirrored at random; or `none`."),
    Flag("clients", WHAT, "Clients to deal the data to, if it has none of its own."),
    Flag(
        "partition",
        WHAT,
        "How to deal: `iid`, `dirichlet:ALPHA[:MIN]`, `classes:K`, `pieces:K`, `power:SIGMA[:K[:FLOOR]]`, "
        "`lognormal:MEAN:SIGMA:K[:MORE]`, `uniform:K:LOW:HIGH`, `cycle:K:LOW:HIGH` or `natural[:MOST]`; "
        "`auto` is `natural` for data with clients of its own, else `classes:4`.",
    ),
    Flag("partition_seed", WHAT, "Seed of the deal."),
    Flag("test", WHAT, "Share of each client's examples held out; 0: the data's own test examples."),
    Flag("testers", WHAT, "Who holds examples out: `all` clients, or the `unseen` ones alone."),
    Flag("unseen", WHAT, "Share of the clients that never train, or from 1 on their number."),
    Flag("unseen_pick", WHAT, "Which clients never train: drawn at `random`, or the `last`."),
    Flag("proxy", WHAT, "Share of the seen clients' training examples that becomes the server's own."),
    Flag("also", WHAT, "Another dataset to score as well, its clients as newcomers; may be repeated."),
    Flag("start", WHAT, "A run's folder or a .safetensors file whose model to start from."),
    Flag("prior", WHAT, "Likewise: the prior model of methods that keep to one."),
    Flag("rounds", WHAT, "Rounds.", ("-r",)),
    Flag("cohort", WHAT, "Clients per round."),
    Flag("sampler", WHAT, "`uniform`; or, re-dealing rows, `client_drift`, `period_drift` or `no_drift`."),
    Flag("seed", WHAT, "Seed of the training: one seed, one sequence of cohorts and batches."),
    Flag(
        "engine",
        HOW,
        "`sequential`, `vectorized`, `processes` or `processes(vectorized)` (on a CPU), or `auto`: the "
        "fastest of them; or `ray`, a cluster.",
    ),
    Flag("device", HOW, "`cpu`, `cuda`, `cuda:N`, or `auto`."),
    Flag("chunk", HOW, "Clients computed at once, at the most."),
    Flag("precision", HOW, "Of products on a GPU: `tf32`, `fp32` or `bf16`; a CPU computes in fp32."),
    Flag("threads", HOW, "CPU threads; 0: as many as are fastest."),
    Flag("processes", HOW, "Of the engine of that name; of `ray`, actors; 0: one for each CPU, or each GPU."),
    Flag("address", HOW, "Of the Ray cluster. Default: RAY_ADDRESS, or one that is begun on this machine."),
    Flag("store", HOW, "Where clients' states are kept: `memory`, `mapped` (on disk), or `auto`."),
    Flag("evaluate_every", HOW, "Rounds between evaluations."),
    Flag("evaluate_last", HOW, "Last rounds that are all evaluated, to average over them."),
    Flag("evaluate_group", HOW, "Clients to score: `all`, `seen` or `unseen`."),
    Flag("evaluate_clients", HOW, "How many of them, always the same ones; 0: all."),
    Flag("evaluate_at_end", HOW, "How many after the last round; -1: as before it."),
    Flag("checkpoint_every", HOW, "Rounds between checkpoints."),
    Flag("target", HOW, "Score for the rounds-to-target figure."),
    Flag("on_nan", HOW, "An update that is not finite: `stop` the run, or `skip` and count it."),
)


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


SetFlag = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        "-s",
        metavar="KEY=VALUE",
        help="A setting of the method (`apiece methods NAME`): `lr=0.1`, short for `local.lr=0.1`; "
        "`personal.epochs=3`; `inner.lr=0.1` for the method in a wrapper. May be repeated.",
        rich_help_panel=WHAT,
    ),
]
OutFlag = Annotated[
    Path | None,
    typer.Option(
        "--out", "-o", help="Folder for the files. Default: a new one in runs/.", rich_help_panel=OUTPUT
    ),
]
ExperimentFile = Annotated[
    Path | None, typer.Argument(metavar="EXPERIMENT.toml", help="An experiment; flags override what it says.")
]
SeedsFlag = Annotated[
    str | None,
    typer.Option(help="Seeds: `0-4` or `0,3,7`. Default: the experiment's.", rich_help_panel=WHAT),
]
RunFolder = Annotated[Path, typer.Argument(metavar="DIR", help="A run's folder.")]


def _with_flags(*left_out: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the flags of an experiment, `--set`, `--out` and `--json`, as its **flags."""
    shared = [
        *(flag.parameter() for flag in FLAGS if flag.key not in left_out),
        _parameter("set", SetFlag, None),
        _parameter("out", OutFlag, None),
        _parameter("json", JsonFlag, False),
    ]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        command.__signature__ = signature.replace(parameters=[*own, *shared])  # type: ignore[attr-defined]
        return command

    return decorate


@app.command()
@_with_flags()
def run(experiment: ExperimentFile = None, **flags: Any) -> None:
    """Run one experiment. Without anything else: FedAvg on digits, 30 clients.

    Examples:

    - `apiece run --method reptile --partition classes:2 --rounds 100`

    - `apiece run --data patients.csv --client-column hospital --label-column outcome`

    - `apiece run --method "elastic(fedavg)" --set alpha=0.5 --set inner.lr=0.1`

    - `apiece run runs/first/experiment.toml --seed 1`
    """
    described = _experiment(experiment, flags)
    folder = flags["out"] or _free_folder(described.method, described.data, f"s{described.seed}")
    with terminal.bar(
        described.method, described.rounds, flags["json"], folder, f"apiece resume {folder}"
    ) as tick:
        session.run(described, folder, tick)
    terminal.show_runs([folder], folder, flags["json"])


@app.command()
@_with_flags("method", "seed")
def compare(
    experiment: ExperimentFile = None,
    methods: Annotated[
        str, typer.Option(help="Methods, separated by commas.", rich_help_panel=WHAT)
    ] = "local,fedavg,reptile",
    seeds: SeedsFlag = None,
    spread: Annotated[
        bool,
        typer.Option(
            "--spread",
            help="Several runs at once, one on each CPU or GPU of the Ray cluster at --address. All its "
            "machines must see the output folder.",
            rich_help_panel=HOW,
        ),
    ] = False,
    **flags: Any,
) -> None:
    """Run several methods with the same seeds, cohorts and batch orders, and print one table.

    What is finished in the output folder is not run again; what was interrupted goes on.
    `--set fedavg.lr=0.1` sets one method, `--set lr=0.1` all of them; the file's settings are for its method.

    Example: `apiece compare --methods local,fedavg,reptile --seeds 0-4 --partition classes:2`
    """
    names = _split_methods(methods)
    base = _experiment(experiment, {**flags, "set": None})
    plan = {
        f"{_file_name(name)}-s{seed}": _one_of(names, name, seed, experiment, flags)
        for name in names
        for seed in _seeds(seeds, base)
    }
    plan = _on_equal_data(plan)
    folder = flags["out"] or _free_folder("compare", base.data)
    runs = [(described, folder / place) for place, described in plan.items()]
    if spread:
        again = f"the same command and --out {folder}"
        with terminal.bar("runs", len(runs), flags["json"], runs[0][1], again) as tick:
            for done in session.run_spread(runs):
                tick(done, None)
    else:
        with loading_once():
            _run_here(names, runs, folder, flags["json"])
    terminal.show_runs([place for _, place in runs], folder, flags["json"])


def _run_here(
    names: Sequence[str], runs: Sequence[tuple[Experiment, Path]], folder: Path, quiet: bool
) -> None:
    """One after another; on a GPU a method's seeds side by side."""
    again = f"the same command and --out {folder}"
    for name in names:
        due = [
            (described, place)
            for described, place in runs
            if described.method == name and not (place / "summary.json").exists()
        ]
        if len(due) > 1 and session.side_by_side(due[0][0]):
            title = f"{name} seeds {', '.join(str(described.seed) for described, _ in due)}"
            with terminal.bar(title, due[0][0].rounds, quiet, folder, again) as tick:
                session.run_or_resume_replicas(due, tick)
    for described, place in runs:
        title = f"{described.method} seed {described.seed}"
        with terminal.bar(title, described.rounds, quiet, place, again) as tick:
            session.run_or_resume(described, place, tick)


@app.command()
@_with_flags("method", "seed", "data", "also", "start", "prior")
def continual(
    experiment: ExperimentFile = None,
    tasks: Annotated[
        str,
        typer.Option(
            help="Datasets in the order of training, separated by semicolons.", rich_help_panel=WHAT
        ),
    ] = "digits[0-4]; digits[5-9]",
    first: Annotated[
        str, typer.Option(help="The method of the first task.", rich_help_panel=WHAT)
    ] = "fedavg",
    methods: Annotated[
        str, typer.Option(help="Methods of the later tasks, separated by commas.", rich_help_panel=WHAT)
    ] = "fedavg,admm_fedmeta",
    seeds: SeedsFlag = None,
    **flags: Any,
) -> None:
    """Train on one task after another and show what each method forgets.

    The first task is trained once, by default settings; each method then starts from its model, which is also
    its prior (θ_p of ADMM-FedMeta, used if its lam is not 0). Every model is scored on the unseen clients of
    all tasks, which adapt by the method's own `personal` recipe.

    Example: `apiece continual --methods fedavg,admm_fedmeta --partition classes:2 --cohort 24 --rounds 100
    --set fedavg.personal.batch_size=0 --set fedavg.personal.steps=1
    --set admm_fedmeta.lr=0.1 --set admm_fedmeta.rho=0.1 --set admm_fedmeta.lam=0.01`
    """
    from apiece import continual as sequence

    named = [task.strip() for task in tasks.split(";") if task.strip()]
    if len(named) < 2:
        raise ApieceError(f"--tasks takes two datasets or more, separated by semicolons, got {tasks!r}")
    names = _split_methods(methods)
    folder = flags["out"] or _free_folder("continual", first)
    steps = []
    base = _experiment(experiment, {**flags, "set": None})
    for seed in _seeds(seeds, base):
        described = [_one_of(names, name, seed, experiment, flags) for name in names]
        begun = _one_of([first], first, seed, experiment, {**flags, "set": None})
        steps += sequence.plan(described, begun, named, folder, _file_name)
    for step in steps:
        title, again = (
            f"{step.experiment.method} {step.experiment.data}",
            f"the same command and --out {folder}",
        )
        with terminal.bar(title, step.experiment.rounds, flags["json"], step.folder, again) as tick:
            session.run_or_resume(step.experiment, step.folder, tick)
    terminal.show_forgetting([(step.label, step.folder) for step in steps if step.last], named, flags["json"])


@app.command()
@_with_flags("method", "seed")
def tune(
    experiment: ExperimentFile = None,
    methods: Annotated[
        str, typer.Option(help="Methods, separated by commas.", rich_help_panel=WHAT)
    ] = "local,fedavg,reptile",
    search: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUES",
            help="What to search: a range, `lr=0.01..0.5`, or values, `epochs=1,2,5`. It replaces, or adds "
            "to, the method's own ranges; `fedavg.lr=…` is for one method. May be repeated.",
            rich_help_panel=WHAT,
        ),
    ] = None,
    trials: Annotated[
        int, typer.Option(help="Trials of each method; the first is its defaults.", rich_help_panel=WHAT)
    ] = 10,
    validation: Annotated[
        float,
        typer.Option(help="Share of each client's training examples to validate on.", rich_help_panel=WHAT),
    ] = 0.25,
    score: Annotated[
        str, typer.Option(help="What to maximise: `personalized` or `initial`.", rich_help_panel=WHAT)
    ] = "personalized",
    seeds: SeedsFlag = None,
    jobs: Annotated[
        int, typer.Option(help="Methods searched at once, each by a process.", rich_help_panel=HOW)
    ] = 1,
    **flags: Any,
) -> None:
    """Search for each method's best settings, all with the same number of trials.

    Trials are scored on a part of the clients' own training examples, never on their test examples. They are
    kept in trials.jsonl in the output folder: a trial that is there is not run again.

    Example: `apiece tune --methods fedavg,reptile --trials 20 --search lr=0.01..1 --out runs/tune`
    """
    from apiece import tune as tuning

    names = _split_methods(methods)
    base = _experiment(experiment, {**flags, "set": None})
    seed, *others = _seeds(seeds, base)
    plan = _on_equal_data({name: _one_of(names, name, seed, experiment, flags) for name in names})
    folder = flags["out"] or _free_folder("tune", base.data)
    searches = {
        name: partial(
            tuning.search,
            described,
            trials,
            [seed, *others],
            tuning.space_of(described, tuning.parse(_for_method(search or [], name, names))),
            folder / tuning.LOG,
            score=score,
            validation=validation,
        )
        for name, described in plan.items()
    }
    again = f"the same command and --out {folder}"
    with (
        tuning.claimed(folder),
        terminal.bar("trials", trials * len(names), flags["json"], folder, again, tuning.LOG) as tick,
    ):
        found = tuning.search_all(searches, jobs, lambda done: tick(done, None))
        files = {
            name: tuning.write(folder / f"{_file_name(name)}.toml", one)
            for name, one in found.items()
            if not math.isnan(one.score)
        }
    terminal.show_tuned(found, files, score, flags["json"])


app.command()(reproduce)


@app.command()
def curves(folder: RunFolder, json: JsonFlag = False) -> None:
    """Adaptation curves of a run: its unseen clients' score by personalization epochs and by local examples.

    They are written to adaptation.csv in its folder, where `apiece report` finds them.

    Example: `apiece curves runs/first`
    """
    from apiece import adaptation, deploy

    opened, server, round = deploy.latest(folder)
    points = adaptation.curves(opened, server, round)
    adaptation.write(folder, points)
    terminal.show_rows(
        [
            {
                "along": p.along,
                "amount": str(p.amount),
                f"{opened.federation.task.headline} in %": f"{100 * p.mean:.1f}",
                "worst 10 %": f"{100 * p.worst10:.1f}",
            }
            for p in points
        ],
        json,
    )


@app.command()
def resume(folder: RunFolder, json: JsonFlag = False) -> None:
    """Go on with an interrupted run, from its last checkpoint, to the same files bit for bit.

    Example: `apiece resume runs/first`
    """
    path = folder / "experiment.toml"
    described = experiments.read(path) if path.exists() else Experiment()
    with terminal.bar(described.method, described.rounds, json, folder, f"apiece resume {folder}") as tick:
        session.resume(folder, tick)
    terminal.show_runs([folder], folder, json)


@app.command()
def report(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR", help="Runs, or folders of runs.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The HTML file.")] = Path("report.html"),
) -> None:
    """Write one self-contained HTML page: table, learning curves, every client, the partition.

    Example: `apiece report runs/first runs/second -o report.html`
    """
    from apiece import report as reports  # with matplotlib: slow to import

    runs = [run for folder in folders for run in _runs_in(folder)]
    typer.echo(f"report: {reports.write(runs, output)}")


@app.command()
def methods(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME", help="One method, or `wrapper(method)`: its settings and their defaults."
        ),
    ] = None,
    json: JsonFlag = False,
) -> None:
    """The methods and wrappers, or the settings of one.

    Example: `apiece methods fedavg`
    """
    if name is not None:
        _one_method(name, json)
        return
    rows = []
    for entry in catalog.names():
        sizes, described = traffic(catalog.build(catalog.example(entry), {})), catalog.describe(entry)
        rows.append(
            {
                "name": entry if json or entry not in WRAPPERS else f"{entry}(…)",
                "kind": described.kind,
                "paper": described.paper,
                "up": f"{sizes.up:.2g}",
                "down": f"{sizes.down:.2g}",
                "keeps": sizes.memory,
                "what": described.what,
            }
        )
    terminal.show_rows(rows, json)


@app.command()
def datasets(json: JsonFlag = False) -> None:
    """The datasets known by name; your own are given to `--data` as a path."""
    rows = [{"name": name, "what": what} for name, what in DATASETS.items()]
    own = {"name": "PATH", "what": "your own .npz, .csv or .parquet file, or a folder with a file per client"}
    terminal.show_rows(rows if json else [*rows, own], json)


@app.command()
def download(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A dataset (`apiece datasets`).")],
    data_dir: Annotated[
        str, typer.Option(help="The data folder. Default: what APIECE_DATA says, or ~/.cache/apiece.")
    ] = "",
    json: JsonFlag = False,
) -> None:
    """Fetch a dataset into the data folder, or say where it is to be had by hand.

    Files are checked against their published checksums. What was interrupted goes on where it broke off.

    Example: `apiece download cifar10 --data-dir data`
    """
    from apiece.data import download as downloads

    if name in downloads.BY_HAND:
        typer.echo(downloads.BY_HAND[name])
        return
    with terminal.download_bar(json) as tick:
        found = downloads.download(name, data_folder(data_dir), tick)
    terminal.show_rows([{"name": name, "file": str(path)} for path in found], json)


@app.command()
def models(json: JsonFlag = False) -> None:
    """The built-in models; your own are given to `--model` as `module:factory` or `file.py:factory`."""
    rows = [{"name": name, "what": entry.description} for name, entry in MODELS.items()]
    own = {"name": "file.py:factory", "what": "your own: a function that returns a torch.nn.Module"}
    terminal.show_rows(rows if json else [*rows, own], json)


@app.command()
def check(
    method: Annotated[
        str, typer.Argument(metavar="METHOD", help="A method, `wrapper(method)` or `file.py:Class`.")
    ],
    set: SetFlag = None,
    device: Annotated[str, typer.Option(help="`cpu` or `cuda`.", rich_help_panel=HOW)] = "cpu",
    json: JsonFlag = False,
) -> None:
    """Examine a method: the conformance suite that every method here passes. Exit code 1: it does not.

    Example: `apiece check my_method.py:MyMethod`
    """
    findings = examine(catalog.build(method, settings.nested(set or [])), str(pick_device(device)))
    if json:
        typer.echo(json_text([finding._asdict() for finding in findings]), nl=False)
    else:
        for finding in findings:
            mark = "[green]✓[/]" if finding.ok else "[red]✗[/]"
            terminal.out.print(
                f"{mark} {escape(finding.rule)}  {escape(finding.detail)}".rstrip(), soft_wrap=True
            )
    if not all(finding.ok for finding in findings):
        raise typer.Exit(1)


@app.command()
def export(
    folder: RunFolder,
    client: Annotated[str, typer.Option(help="The client, by id or by name (see partition.csv).")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The .safetensors file.")],
    json: JsonFlag = False,
) -> None:
    """Write the personalized model of one client of a run: its model apiece.

    Example: `apiece export runs/first --client 7 -o client7.safetensors`

    Load it with `safetensors.torch.load_file`; its metadata name the model, the input shape and the labels.
    """
    from apiece import deploy

    terminal.show_deployed(deploy.export(folder, client, output), output, json)


@app.command()
def personalize(
    folder: RunFolder,
    data: Annotated[
        Path, typer.Option(help="The newcomer's .npz, .csv or .parquet file: the run's features and labels.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The .safetensors file.")],
    json: JsonFlag = False,
) -> None:
    """Write a personalized model for a client that was not part of the run.

    Example: `apiece personalize runs/first --data newcomer.npz -o newcomer.safetensors`
    """
    from apiece import deploy

    terminal.show_deployed(deploy.personalize(folder, data, output), output, json)


def _experiment(path: Path | None, flags: dict[str, Any]) -> Experiment:
    """The experiment that a file and flags describe."""
    base = experiments.read(path) if path else Experiment()
    given = {key: flags[key] for key in experiments.KEYS if flags.get(key) is not None}
    # Settings belong to a method: those of the file's method do not fit another one.
    same = given.get("method", base.method) == base.method
    given["settings"] = settings.nested(flags["set"] or [], base.settings if same else {})
    return experiments.from_table(given, base)


def _one_of(names: list[str], name: str, seed: int, path: Path | None, flags: dict[str, Any]) -> Experiment:
    """The experiment of one of several methods; a mistake in it is told now, before the first run."""
    own = {"method": name, "seed": seed, "set": _for_method(flags["set"] or [], name, names)}
    described = _experiment(path, {**flags, **own})
    described.build_method()
    return described


def _on_equal_data(plan: dict[str, Experiment]) -> dict[str, Experiment]:
    """All methods train on equal data: if one needs a proxy set, it is taken from the clients of all."""
    proxy = max(described.with_proxy().proxy for described in plan.values())
    return {place: replace(described, proxy=proxy) for place, described in plan.items()}


def _split_methods(text: str) -> list[str]:
    names = catalog.expressions(text)
    if not all(names):
        raise ApieceError(f"--methods takes names separated by commas, got {text!r}")
    return list(dict.fromkeys(names))


def _seeds(text: str | None, base: Experiment) -> list[int]:
    return [base.seed] if text is None else parse_seeds(text)


def _for_method(flags: list[str], name: str, names: list[str]) -> list[str]:
    """The flags for all methods, and those that begin with this one's name."""
    chosen = []
    for flag in flags:
        owner = next((other for other in names if flag.startswith(f"{other}.")), None)
        if owner in (None, name):
            chosen.append(flag if owner is None else flag.removeprefix(f"{name}."))
    return chosen


def _file_name(text: str) -> str:
    return re.sub(r"[^\w-]+", "-", text).strip("-")


def _free_folder(*parts: str) -> Path:
    """A folder that is not there yet: runs/fedavg-digits-s0, or with -2, -3, … behind."""
    name = "-".join(_file_name(Path(part).stem) for part in parts)
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


def _one_method(name: str, as_json: bool) -> None:
    method = catalog.build(name if "(" in name else catalog.example(name), {})
    described = catalog.describe(name.partition("(")[0].strip())
    table = catalog.settings_of(method)
    if as_json:
        facts = {"name": name, **described._asdict(), **traffic(method)._asdict(), "settings": table}
        typer.echo(json_text(facts), nl=False)
        return
    typer.echo(f"{name}: {described.what}")
    typer.echo(", ".join(part for part in described[:2] if part))
    sizes = traffic(method)
    typer.echo(f"per round, in model sizes: {sizes.up:.2g} up, {sizes.down:.2g} down; keeps {sizes.memory}")
    slots = [key for key, value in table.items() if isinstance(value, dict) and "local" in value]
    path = ".".join([*slots[:1], "local.lr"])
    typer.echo(f"\nSettings, as in an experiment file (on the command line: --set {path}=0.1):")
    typer.echo(settings.to_toml({"settings": table}))


def main(arguments: list[str] | None = None) -> None:
    logging.basicConfig(
        level=logging.WARNING,
        format="%(message)s",
        handlers=[RichHandler(console=terminal.err, show_path=False, show_time=False)],
    )
    try:
        app(arguments, prog_name="apiece")
    except ApieceError as error:
        _fail(str(error))
    except OSError as error:
        _fail(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except Exception as error:
        lines = own_lines(error)
        if not lines or os.environ.get("APIECE_TRACEBACK"):
            raise
        notes = [*lines, *getattr(error, "__notes__", []), "For the whole traceback: APIECE_TRACEBACK=1"]
        _fail("\n  ".join([f"{type(error).__name__}: {error}", *notes]))


def _fail(message: str) -> None:
    terminal.err.print(f"[red]error:[/] {escape(message)}", highlight=False, soft_wrap=True)
    sys.exit(2)
