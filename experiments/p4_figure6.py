"""ADMM-FedMeta, Yue et al. 2021, Figure 6: a prior model that knows classes which the sources do not have."""

from dataclasses import replace
from typing import Any

from p4_figure2 import COLUMNS, rows

from apiece import Experiment
from apiece.report.results import Run
from apiece.reproduce import Cell, Measured, Table, curve

COLUMN, PRIOR = "CIFAR-10", "prior model alone"
BASE, RHO, _ = COLUMNS[COLUMN]
PRIOR_CLASSES, SOURCE_CLASSES = "[2-9]", "[0-7]"
LAMBDAS = (0, 1, 3, 5, 10, 20, 50)
METHOD, SETTINGS = rows(RHO, 0.0)["ADMM-FedMeta"]


def trained(classes: str, **settings: Any) -> Experiment:
    """40 sources with some classes, 50 targets with all: the unseen clients of the whole data."""
    return replace(
        BASE,
        method=METHOD,
        settings={**SETTINGS, **settings},
        data=BASE.data + classes,
        also=(BASE.data,),
        clients=90,
        unseen=50.0,
        testers="all",
        test=0.0,
        evaluate_every=10,
    )


def measure(run: Run) -> Measured:
    """The targets' accuracy after one step, and how it grew."""
    assert run.summary is not None
    accuracy = 100 * float(run.summary["also"][BASE.data]["unseen"]["personalized_weighted"])
    return Measured({"accuracy": accuracy}, {"accuracy": curve(run, f"{BASE.data} unseen_personalized_mean")})


TABLE = Table(
    id="p4-figure6",
    title="Accuracy on target clients of all ten classes, of which the sources have eight",
    source="Yue, Ren, Xin, Lin, Zhang 2021 (ADMM-FedMeta), Figure 6",
    cells={
        (PRIOR, COLUMN): Cell(trained(PRIOR_CLASSES), measure, redeal=True),
        ("no prior model", COLUMN): Cell(trained(SOURCE_CLASSES), measure, redeal=True),
        **{
            (f"λ={lam}", COLUMN): Cell(
                trained(SOURCE_CLASSES, lam=float(lam), exact=True),
                measure,
                start=(PRIOR, COLUMN),
                redeal=True,
            )
            for lam in LAMBDAS
        },
    },
    published={},
    figures={"accuracy": "%"},
    seeds=tuple(range(10)),
    settings=(
        "The paper's: the prior model is trained on classes 3-10 of CIFAR-10, the sources have classes 1-8, "
        "the targets all; λ = 1 to 50. The figure is a picture without numbers.",
        "Ours: the prior model is ADMM-FedMeta's with λ = 0, and training starts from it (λ = 0: it does no "
        "more than that), but for the row without one. The server's step is exact, as in the authors' code: "
        "the linearised one diverges where λ exceeds the sum of all ρ, here 28. "
        "Everything else as in p4-figure2.",
    ),
    departures=(
        "Targets adapt on 20 to 40 training images and are tested on images of CIFAR-10's own test part, so "
        "that none of them is a source's or was the prior model's; those are few, hence 50 targets, not 10.",
    ),
)
