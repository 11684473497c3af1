"""Continual learning: one task after another, and what is left of the earlier ones.

The first task is trained once per seed; from its model each method goes on to the next task, with that model
as its start and as its prior. Every run is scored on the clients of all tasks, the others' as newcomers: they
adapt on their own task's data and are tested on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from apiece.experiment import Experiment


class Step(NamedTuple):
    """One run of the sequence."""

    folder: Path
    experiment: Experiment
    label: str  # the method, or what the first task's model is called
    last: bool


def plan(
    methods: Sequence[Experiment],
    first: Experiment,
    tasks: Sequence[str],
    folder: Path,
    name: Callable[[str], str],
) -> list[Step]:
    """The runs of one seed, in order: the first task by `first`, then for each method the other tasks.

    `methods` and `first` describe all but the data, the start, the prior and what is scored besides.
    """

    def on(experiment: Experiment, task: int) -> Experiment:
        others = tuple(other for other in tasks if other != tasks[task])
        return replace(experiment, data=tasks[task], also=others)

    root = folder / f"first-s{first.seed}"
    steps = [Step(root, on(first, 0), f"after {tasks[0]} ({first.method})", True)]
    for method in methods:
        before = root
        for task in range(1, len(tasks)):
            place = folder / f"{name(method.method)}-s{method.seed}-task{task + 1}"
            experiment = replace(on(method, task), start=str(before), prior=str(before))
            steps.append(Step(place, experiment, method.method, task == len(tasks) - 1))
            before = place
    return steps
