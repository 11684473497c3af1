"""ADMM-FedMeta, Yue et al. 2021, Figure 3: how fast target clients' accuracy grows with the rounds."""

from dataclasses import replace

from _curves import upto
from p4_figure2 import TABLE as COMPARED

from apiece.report.results import Run
from apiece.reproduce import Measured, Table, curve

ROUNDS = (10, 30, 100)


def measured(run: Run) -> Measured:
    accuracy = curve(run, "unseen_personalized_weighted")
    return Measured({f"round {round}": upto(accuracy, round) for round in ROUNDS}, {"accuracy": accuracy})


TABLE = Table(
    id="p4-figure3",
    title="Accuracy on target clients after one gradient step, by rounds of training",
    source="Yue, Ren, Xin, Lin, Zhang 2021 (ADMM-FedMeta), Figure 3",
    cells={place: replace(cell, measure=measured) for place, cell in COMPARED.cells.items()},
    published={},
    figures={f"round {round}": "%" for round in ROUNDS},
    seeds=COMPARED.seeds,
    settings=("The runs of p4-figure2, scored every 5 rounds. The figure is a picture without numbers.",),
    departures=COMPARED.departures,
    small=COMPARED.small,
)
