"""APFL (decomposition and EWC), Ni, Shen, Zhang 2022, Figure 3: epochs E and learning rate η."""

from dataclasses import replace
from typing import Any

from p5_figure1 import CELLS, measured

from apiece import Experiment
from apiece.reproduce import Cell, Table

METHODS = ("APFL-EWC", "FedAvg", "FedProx")
EPOCHS, RATES = (1, 5, 10, 20), (1e-4, 1e-3, 1e-2, 1e-1)


def changed(method: str, data: str, **local: Any) -> Experiment:
    """That of Figure 1, its clients training otherwise."""
    base = CELLS[method, data].experiment
    return replace(base, settings={**base.settings, "local": {**base.settings["local"], **local}})


BY_EPOCHS = {
    (f"{method}, E={epochs}", data): changed(method, data, epochs=epochs)
    for data in ("FEMNIST", "CIFAR-10")
    for method in METHODS
    for epochs in EPOCHS
}
BY_RATE = {
    (f"{method}, η={rate:g}", data): changed(method, data, lr=rate)
    for data in ("FEMNIST", "MNIST")
    for method in METHODS
    for rate in RATES
}

TABLE = Table(
    id="p5-figure3",
    title="Mean and highest test accuracy over all rounds, by E and by the learning rate η",
    source="Ni, Shen, Zhang 2022 (APFL), Figure 3",
    cells={place: Cell(e, measured("initial")) for place, e in {**BY_EPOCHS, **BY_RATE}.items()},
    published={},
    figures={"mean": "%", "highest": "%"},
    seeds=(0, 1, 2),
    settings=(
        "As in p5-figure1, but for E, with the learning rates of Figure 1, or for η, with E = 5. Nothing was "
        "searched. The figure is a picture: the text says of it that APFL is the highest everywhere.",
    ),
    departures=("As in p5-figure1.",),
)
