"""APFL (decomposition and EWC), Ni, Shen, Zhang 2022, Figure 2: accuracy over the rounds."""

from collections.abc import Callable
from dataclasses import replace

from _curves import upto
from p5_figure1 import CELLS
from p5_figure1 import TABLE as COMPARED

from apiece.report.results import Run
from apiece.reproduce import Measured, Place, Table

EARLY = 10
PRESET = 3  # updates of F that need no plateau


def measure(place: Place) -> Callable[[Run], Measured]:
    row, _ = place

    def measured(run: Run) -> Measured:
        curves = CELLS[place].measure(run).curves
        accuracy = curves["accuracy"]
        shown = {f"round {EARLY}": upto(accuracy, EARLY), "last round": accuracy[-1][1]}
        if row.startswith("APFL-EWC"):
            # Gradients go up in the rounds after which F is updated, and only then.
            sent = [bytes_up for bytes_up in (r["bytes_up"] for r in run.rounds) if bytes_up]
            shown["updates of F"] = float(sum(b > min(sent) for b in sent) - PRESET)
        return Measured(shown, curves)

    return measured


TABLE = Table(
    id="p5-figure2",
    title="Test accuracy over the rounds, and how often a plateau of the loss made APFL update F",
    source="Ni, Shen, Zhang 2022 (APFL), Figure 2",
    cells={place: replace(cell, measure=measure(place)) for place, cell in CELLS.items()},
    published={place: {"updates of F": 1.0} for place in CELLS if place[0] == "APFL-EWC"},
    figures={f"round {EARLY}": "%", "last round": "%", "updates of F": ""},
    seeds=COMPARED.seeds,
    settings=(
        "The runs of p5-figure1. The paper marks in its picture where F was updated besides the first three "
        "rounds: once on every dataset.",
    ),
    departures=(
        "As in p5-figure1. Its curves of the training loss are left out: of methods other than APFL it is "
        "not logged.",
    ),
)
