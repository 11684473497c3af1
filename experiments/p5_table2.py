"""APFL (decomposition and EWC), Ni, Shen, Zhang 2022, Table 2: the forgetting coefficient λ."""

from dataclasses import replace

from p5_figure1 import CELLS, measured
from p5_figure1 import TABLE as COMPARED

from apiece import Experiment
from apiece.reproduce import Cell, Table

PUBLISHED = {
    ("Vehicle", 5): (88.65, 88.69, 88.67, 88.71, 88.59),
    ("Vehicle", 20): (88.29, 88.24, 88.22, 88.31, 88.32),
    ("MNIST", 5): (84.62, 84.66, 84.78, 84.93, 85.08),
    ("MNIST", 20): (84.81, 84.92, 85.16, 85.42, 85.67),
}
LAMBDAS = (0.0, 0.25, 0.5, 0.75, 1.0)


def apfl(data: str, epochs: int, lam: float) -> Experiment:
    """That of Figure 1, with another λ and E."""
    base = CELLS["APFL-EWC", data].experiment
    local = {**base.settings["local"], "epochs": epochs}
    return replace(base, settings={**base.settings, "lam": lam, "local": local})


TABLE = Table(
    id="p5-table2",
    title="Mean test accuracy of APFL-EWC over all rounds, by λ",
    source="Ni, Shen, Zhang 2022 (APFL), Table 2",
    cells={
        (f"λ={lam:g}", f"{data}, E={epochs}"): Cell(apfl(data, epochs, lam), measured("initial"))
        for data, epochs in PUBLISHED
        for lam in LAMBDAS
    },
    published={
        (f"λ={lam:g}", f"{data}, E={epochs}"): {"mean": value}
        for (data, epochs), values in PUBLISHED.items()
        for lam, value in zip(LAMBDAS, values, strict=True)
    },
    figures={"mean": "%", "highest": "%"},
    seeds=COMPARED.seeds,
    settings=("As in p5-figure1, but for λ and E. Nothing was searched.",),
    departures=("As in p5-figure1.",),
)
