"""Personalized FedAvg, Jiang et al. 2019, Figure 2: personalized accuracy by epochs of personalization."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from p3_table1 import fedavg
from p3_table2 import cell

from apiece import Experiment, adaptation
from apiece.experiment import from_table
from apiece.prepare import prepare
from apiece.report.results import Run
from apiece.reproduce import Cell, Measured, Table

EPOCHS = (0, 1, 2, 5, 10, 20)
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"optimizer": "sgd", "lr": 0.02, "batch_size": 100},
    "Adam": {"optimizer": "adam", "lr": 0.001, "batch_size": 100},
}
ALONE = "FedAvg(10) alone"
CENTRAL, LONGER = "centralized, 10 epochs", "centralized, 50 epochs"


def central(epochs: int) -> Experiment:
    """A round is an epoch over all training clients' examples."""
    settings = {
        "local": {"optimizer": "adam", "lr": 0.001, "batch_size": 100, "epochs": 1},
        "personal": {"epochs": 0},
    }
    return replace(
        fedavg(10, 5),
        method="centralized",
        settings=settings,
        rounds=epochs,
        evaluate_every=epochs,
        checkpoint_every=5,
    )


def measure(optimizer: str) -> Callable[[Run], Measured]:
    """The run's model, personalized by every unseen client for so many epochs."""

    @torch.no_grad()
    def measured(run: Run) -> Measured:
        trained = from_table(run.experiment)
        settings = {**trained.settings, "personal": {**OPTIMIZERS[optimizer], "epochs": 1}}
        session = prepare(replace(trained, settings=settings, start=str(run.folder)), None, None)
        points = adaptation.curves(session, session.server, 0, EPOCHS, ())
        accuracy = [(float(point.amount), 100 * point.mean) for point in points]
        numbers = {f"{epochs:.0f} epochs": value for epochs, value in accuracy}
        return Measured(
            {"best": max(numbers.values()), **numbers}, {"accuracy by epochs of personalization": accuracy}
        )

    return measured


def cells(column: str) -> dict[tuple[str, str], Cell]:
    made = {row: cell(row) for row in (ALONE, "Reptile(1) Adam", "Reptile(10) Adam")}
    made[CENTRAL] = Cell(central(10), measure(column))
    made[LONGER] = Cell(central(40), measure(column), start=(CENTRAL, column))
    return {
        (row, column): replace(one, measure=measure(column), start=one.start and (one.start[0], column))
        for row, one in made.items()
    }


TABLE = Table(
    id="p3-figure2",
    title="Accuracy of unseen clients after so many epochs of personalization, by SGD and by Adam",
    source="Jiang, Konečný, Rush, Kannan 2019 (Personalized FedAvg), Figure 2",
    cells={place: one for column in OPTIMIZERS for place, one in cells(column).items()},
    published={(ALONE, column): {"0 epochs": 74.41} for column in OPTIMIZERS},
    figures=dict.fromkeys(("best", *(f"{epochs} epochs" for epochs in EPOCHS)), "%"),
    seeds=(0, 1, 2),
    settings=(
        "The paper's: the models of p3-table2 and two trained on pooled data with Adam's usual numbers, for "
        "10 and for 50 epochs; personalization by SGD 0.02 in batches of 100, or by Adam. The figure is a "
        "picture: the text says that SGD is best for federated models and makes the centralized ones "
        "diverge, for which Adam is better and still below Reptile(10).",
        "Ours: pooled batches of 100, Adam begun anew every epoch; personal Adam 0.001 in batches of 100. A "
        "client whose model is not finite is left out of the mean. Nothing was searched.",
    ),
    departures=("As in p3-table1: LEAF's FEMNIST in place of TFF's.",),
    small=lambda experiment: replace(experiment, model="logistic"),
)
