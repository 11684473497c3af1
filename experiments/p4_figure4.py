"""ADMM-FedMeta, Yue et al. 2021, Figure 4: the penalty parameter ρ."""

from dataclasses import replace

from p4_figure2 import TABLE as COMPARED

from apiece import Experiment
from apiece.reproduce import Cell, Table

RHOS = (0.2, 0.35, 0.7, 1.5, 3.0)


def admm(column: str, rho: float) -> Experiment:
    """That of Figure 2 with another ρ."""
    base = COMPARED.cells["ADMM-FedMeta", column].experiment
    return replace(base, settings={**base.settings, "rho": rho})


TABLE = Table(
    id="p4-figure4",
    title="Accuracy on target clients after one gradient step, by ρ",
    source="Yue, Ren, Xin, Lin, Zhang 2021 (ADMM-FedMeta), Figure 4",
    cells={
        (f"ρ={rho:g}", column): Cell(
            admm(column, rho), COMPARED.cells["ADMM-FedMeta", column].measure, redeal=True
        )
        for column in ("Fashion-MNIST", "CIFAR-10")
        for rho in RHOS
    },
    published={
        (row, column): COMPARED.published["ADMM-FedMeta", column]
        for row, column in (("ρ=0.35", "Fashion-MNIST"), ("ρ=0.7", "CIFAR-10"))
    },
    figures=COMPARED.figures,
    seeds=COMPARED.seeds,
    settings=(
        "As in p4-figure2, but for ρ. The figure is a picture: which ρ it compares is not known but for "
        "those of Figure 2, whose numbers stand beside ours; the others are ours.",
    ),
    departures=COMPARED.departures,
    small=COMPARED.small,
)
