"""Personalized FedAvg, Jiang et al. 2019, Figure 3: both accuracies over replicas, with Reptile or not."""

from dataclasses import replace

from p3_table2 import COLUMN, SCORES, cell, measure

from apiece.report.results import Run
from apiece.reproduce import Gain, Measured, Table

ALONE = "FedAvg(10) alone"
PUBLISHED = {ALONE: (78.79, 88.20), "Reptile(10) Adam": (81.16, 88.58), "Reptile(1) Adam": (83.20, 87.64)}


def measured(run: Run) -> Measured:
    numbers = measure(run).numbers
    return Measured({name: numbers[name] for name in SCORES})


TABLE = Table(
    id="p3-figure3",
    title="FedAvg(10), and one of its models fine-tuned: accuracy of unseen clients over nine replicas",
    source="Jiang, Konečný, Rush, Kannan 2019 (Personalized FedAvg), Figure 3",
    cells={(row, COLUMN): replace(cell(row), measure=measured, seeds=()) for row in PUBLISHED},
    published={(row, COLUMN): dict(zip(SCORES, values, strict=True)) for row, values in PUBLISHED.items()},
    figures=dict.fromkeys(SCORES, "%"),
    seeds=tuple(range(9)),
    settings=(
        "The runs of p3-table1 (E=10, 5 clients) and p3-table2, beside whose published numbers ours stand. "
        "What to see is the spread over replicas: in the paper, of FedAvg(10) alone, 12 points before and 1 "
        "after personalization, and the best Reptile(1) below the worst Reptile(10) after it.",
    ),
    departures=("As in p3-table1 and p3-table2.",),
    gains=(Gain("Reptile(10) Adam", "Reptile(1) Adam", COLUMN, "personalized", 88.58 - 87.64),),
)
