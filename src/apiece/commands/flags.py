"""The flags that commands share, and the experiments that they describe."""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from apiece import catalog, settings
from apiece import experiment as experiments
from apiece.errors import ApieceError
from apiece.experiment import Experiment
from apiece.settings import parse_seeds
from apiece.terminal import OUTPUT, JsonFlag

log = logging.getLogger("apiece")

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


def with_flags(*left_out: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
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


def experiment_of(path: Path | None, flags: dict[str, Any]) -> Experiment:
    """The experiment that a file and flags describe."""
    base = experiments.read(path) if path else Experiment()
    given = {key: flags[key] for key in experiments.KEYS if flags.get(key) is not None}
    # Settings belong to a method: those of the file's method do not fit another one.
    same = given.get("method", base.method) == base.method
    given["settings"] = settings.nested(flags["set"] or [], base.settings if same else {})
    return experiments.from_table(given, base)


def one_of(names: list[str], name: str, seed: int, path: Path | None, flags: dict[str, Any]) -> Experiment:
    """The experiment of one of several methods; a mistake in it is told now, before the first run."""
    own = {"method": name, "seed": seed, "set": for_method(flags["set"] or [], name, names)}
    described = experiment_of(path, {**flags, **own})
    described.build_method()
    return described


def furnished(described: Experiment) -> Experiment:
    """The experiment with the proxy set that its method cannot do without; that nobody asked for is told."""
    found = described.with_proxy()
    if found.proxy != described.proxy:
        log.warning(
            "%s cannot do without a proxy set: %g %% of the seen clients' training examples become the "
            "server's (--proxy)",
            described.method,
            100 * found.proxy,
        )
    return found


def on_equal_data(plan: dict[str, Experiment]) -> dict[str, Experiment]:
    """All methods train on equal data: if one needs a proxy set, it is taken from the clients of all."""
    one_each = {described.method: described for described in plan.values()}
    proxy = max(furnished(described).proxy for described in one_each.values())
    return {place: replace(described, proxy=proxy) for place, described in plan.items()}


def split_methods(text: str) -> list[str]:
    names = catalog.expressions(text)
    if not all(names):
        raise ApieceError(f"--methods takes names separated by commas, got {text!r}")
    return list(dict.fromkeys(names))


def seeds_of(text: str | None, base: Experiment) -> list[int]:
    return [base.seed] if text is None else parse_seeds(text)


def for_method(flags: list[str], name: str, names: list[str]) -> list[str]:
    """The flags for all methods, and those that begin with this one's name."""
    chosen = []
    for flag in flags:
        owner = next((other for other in names if flag.startswith(f"{other}.")), None)
        if owner in (None, name):
            chosen.append(flag if owner is None else flag.removeprefix(f"{name}."))
    return chosen


def file_name(text: str) -> str:
    return re.sub(r"[^\w-]+", "-", text).strip("-")


def free_folder(*parts: str) -> Path:
    """A folder that is not there yet: runs/fedavg-digits-s0, or with -2, -3, … behind."""
    name = "-".join(file_name(Path(part).stem) for part in parts)
    folder, number = Path("runs") / name, 1
    while folder.exists():
        number += 1
        folder = Path("runs") / f"{name}-{number}"
    return folder
