"""Commands that train: run, compare, continual, tune, resume."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from apiece import experiment as experiments
from apiece import session, terminal
from apiece.commands.flags import (
    HOW,
    WHAT,
    ExperimentFile,
    RunFolder,
    SeedsFlag,
    experiment_of,
    file_name,
    for_method,
    free_folder,
    furnished,
    on_equal_data,
    one_of,
    seeds_of,
    split_methods,
    with_flags,
)
from apiece.errors import ApieceError
from apiece.experiment import Experiment
from apiece.methods.admm_fedmeta import ADMMFedMeta
from apiece.prepare import loading_once
from apiece.terminal import JsonFlag

log = logging.getLogger("apiece")


@with_flags()
def run(experiment: ExperimentFile = None, **flags: Any) -> None:
    """Run one experiment. Without anything else: FedAvg on digits, 30 clients.

    Examples:

    - `apiece run --method reptile --partition classes:2 --rounds 100`

    - `apiece run --data patients.csv --client-column hospital --label-column outcome`

    - `apiece run --method "elastic(fedavg)" --set alpha=0.5 --set inner.lr=0.1`

    - `apiece run runs/first/experiment.toml --seed 1`
    """
    described = furnished(experiment_of(experiment, flags))
    folder = flags["out"] or free_folder(described.method, described.data, f"s{described.seed}")
    with terminal.bar(
        described.method, described.rounds, flags["json"], folder, f"apiece resume {folder}"
    ) as tick:
        session.run(described, folder, tick)
    terminal.show_runs([folder], folder, flags["json"])


@with_flags("method", "seed")
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
    names = split_methods(methods)
    base = experiment_of(experiment, {**flags, "set": None})
    plan = {
        f"{file_name(name)}-s{seed}": one_of(names, name, seed, experiment, flags)
        for name in names
        for seed in seeds_of(seeds, base)
    }
    plan = on_equal_data(plan)
    folder = flags["out"] or free_folder("compare", base.data)
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


@with_flags("method", "seed", "data", "also", "start", "prior")
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
    names = split_methods(methods)
    folder = flags["out"] or free_folder("continual", first)
    steps = []
    base = experiment_of(experiment, {**flags, "set": None})
    for seed in seeds_of(seeds, base):
        described = [one_of(names, name, seed, experiment, flags) for name in names]
        begun = one_of([first], first, seed, experiment, {**flags, "set": None})
        steps += sequence.plan(described, begun, named, folder, file_name)
    for one in described:
        if isinstance(method := one.build_method(), ADMMFedMeta) and not method.lam:
            log.warning(
                "%s has lam=0 and so makes no use of its prior: see the example of --help", one.method
            )
    for step in steps:
        title, again = (
            f"{step.experiment.method} {step.experiment.data}",
            f"the same command and --out {folder}",
        )
        with terminal.bar(title, step.experiment.rounds, flags["json"], step.folder, again) as tick:
            session.run_or_resume(step.experiment, step.folder, tick)
    terminal.show_forgetting([(step.label, step.folder) for step in steps if step.last], named, flags["json"])


@with_flags("method", "seed")
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

    names = split_methods(methods)
    base = experiment_of(experiment, {**flags, "set": None})
    seed, *others = seeds_of(seeds, base)
    plan = on_equal_data({name: one_of(names, name, seed, experiment, flags) for name in names})
    folder = flags["out"] or free_folder("tune", base.data)
    searches = {
        name: partial(
            tuning.search,
            described,
            trials,
            [seed, *others],
            tuning.space_of(described, tuning.parse(for_method(search or [], name, names))),
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
            name: tuning.write(folder / f"{file_name(name)}.toml", one)
            for name, one in found.items()
            if not math.isnan(one.score)
        }
    terminal.show_tuned(found, files, score, flags["json"])


def resume(folder: RunFolder, json: JsonFlag = False) -> None:
    """Go on with an interrupted run, from its last checkpoint, to the same files bit for bit.

    Example: `apiece resume runs/first`
    """
    path = folder / "experiment.toml"
    described = experiments.read(path) if path.exists() else Experiment()
    with terminal.bar(described.method, described.rounds, json, folder, f"apiece resume {folder}") as tick:
        session.resume(folder, tick)
    terminal.show_runs([folder], folder, json)
