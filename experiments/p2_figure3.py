"""FedPA, Shen et al. 2023, Figure 3: learning with client drift, period drift, both and none; and FedPA."""

from dataclasses import replace
from statistics import fmean

from p2_table2 import BASE, COLUMNS, ROWS

from apiece.report.results import Run, drift
from apiece.reproduce import Cell, Measured, Table, curve

# A row: the method as in Table 2, and the drift that is left to it.
CURVES = {
    "FedAvg, both drifts": ("FedAvg", "uniform"),
    "FedAvg, client drift": ("FedAvg", "client_drift"),
    "FedAvg, period drift": ("FedAvg", "period_drift"),
    "FedAvg, none": ("FedAvg", "no_drift"),
    "FedPA, both drifts": ("FedPA", "uniform"),
}


def measure(run: Run) -> Measured:
    accuracy = curve(run, "seen_initial_weighted")
    values = [y for _, y in accuracy]
    numbers = {"last": fmean(values[-5:]), "mean": fmean(values[1:]), "label drift": 100 * drift(run.labels)}
    return Measured(numbers, {"accuracy": accuracy})


TABLE = Table(
    id="p2-figure3",
    title="Accuracy with 10 of 3,400 clients a round, by the drift that is left",
    source="Shen, Kuang, Li, Wang, Lv, Yang, Wu, Wu 2023 (FedPA), Figure 3",
    cells={
        (row, column): Cell(
            replace(
                BASE,
                partition=COLUMNS[column],
                method=ROWS[method][0],
                settings=ROWS[method][1],
                sampler=sampler,
                cohort=10,
                evaluate_every=5,
            ),
            measure,
        )
        for column in ("α=1", "α=0.1", "α=0.01")
        for row, (method, sampler) in CURVES.items()
    },
    published={},
    figures={"last": "%", "mean": "%", "label drift": "%"},
    seeds=(0, 1, 2),
    settings=(
        "The paper's: 10 of 3,400 clients a round, Dirichlet(α), and 'iid_each_round', here 'period drift': "
        "the cohort's examples pooled, shuffled and dealt out again. The figure is a picture without "
        "numbers, and the text explains no other of its curves.",
        "Ours: 100 rounds, everything else as in p2-table2; client drift alone: as many examples as the "
        "cohort has, drawn with the label mix of all clients and dealt out as unevenly as its own; none: "
        "those dealt out at random. 'last' is the mean of the last five of the scores taken every 5 rounds, "
        "'mean' that of all; 'label drift' the mean distance of a cohort's label mix from that of all "
        "rounds, half the sum of the differences.",
    ),
    departures=("As in p2-table2: LEAF's FEMNIST in place of TFF's.",),
)
