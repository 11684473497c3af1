"""ADMM-FedMeta, Yue et al. 2021, Figure 5: what is left of a prior task after a new one."""

from dataclasses import replace
from typing import Any

from p4_figure2 import COLUMNS, rows

from apiece import Experiment
from apiece.report.results import Run
from apiece.reproduce import Cell, Measured, Table, score

# λ and ρ of the forgetting experiment.
NUMBERS = {"Fashion-MNIST": (0.5, 0.35), "CIFAR-10": (1.0, 0.7)}
HALVES = ("[0-4]", "[5-9]")


def task(column: str, half: int) -> Experiment:
    """The clients of one half of the classes, those of the other scored besides."""
    base = COLUMNS[column][0]
    return replace(
        base, data=base.data + HALVES[half], also=(base.data + HALVES[1 - half],), evaluate_every=100
    )


def methods(column: str) -> dict[str, tuple[str, dict[str, Any]]]:
    lam, rho = NUMBERS[column]
    known = rows(0.5, rho, COLUMNS[column][3])
    name, settings = known["ADMM-FedMeta"]
    return {
        "FedAvg": known["FedAvg, 10"],
        "Per-FedAvg": known["Per-FedAvg, 10"],
        "ADMM-FedMeta": (name, {**settings, "lam": lam}),
    }


def measure(new: bool) -> Any:
    """Target clients of either task: the run's own is the new one, or the prior one."""

    def both(run: Run) -> Measured:
        assert run.summary is not None
        (other,) = run.summary["also"].values()
        own, besides = score("unseen", "personalized")(run), 100 * other["unseen"]["personalized"]
        return Measured({"prior": besides, "new": own} if new else {"prior": own, "new": besides})

    return both


def cells(column: str) -> dict[tuple[str, str], Cell]:
    name, settings = rows(0.5, NUMBERS[column][1], 0.0)["ADMM-FedMeta"]
    prior = Cell(replace(task(column, 0), method=name, settings=settings), measure(new=False), redeal=True)
    later = {
        (row, column): Cell(
            replace(task(column, 1), method=method, settings=chosen),
            measure(new=True),
            start=("prior model", column),
            redeal=True,
        )
        for row, (method, chosen) in methods(column).items()
    }
    return {("prior model", column): prior, **later}


TABLE = Table(
    id="p4-figure5",
    title="Accuracy on the prior and on the new task, after the new one",
    source="Yue, Ren, Xin, Lin, Zhang 2021 (ADMM-FedMeta), Figure 5",
    cells={place: cell for column in NUMBERS for place, cell in cells(column).items()},
    published={
        ("prior model", "Fashion-MNIST"): {"prior": 95.63, "new": 49.21},
        ("FedAvg", "Fashion-MNIST"): {"prior": 41.27, "new": 94.05},
        ("Per-FedAvg", "Fashion-MNIST"): {"prior": 49.60, "new": 94.84},
        ("ADMM-FedMeta", "Fashion-MNIST"): {"prior": 92.86, "new": 94.04},
        ("prior model", "CIFAR-10"): {"prior": 75.74, "new": 17.33},
        ("FedAvg", "CIFAR-10"): {"prior": 41.08, "new": 55.45},
        ("Per-FedAvg", "CIFAR-10"): {"prior": 42.08, "new": 47.03},
        ("ADMM-FedMeta", "CIFAR-10"): {"prior": 62.38, "new": 71.29},
    },
    figures={"prior": "%", "new": "%"},
    seeds=tuple(range(10)),
    settings=(
        "The paper's: the prior task is the first half of the classes, the new one the last; the prior "
        "model is where training starts and θ_p; λ/ρ = 0.5/0.35 and 1/0.7. Everything else as in Figure 2.",
        "Ours: the prior model is ADMM-FedMeta's with λ = 0 (the paper says 'satisfactory performance'); "
        "FedAvg and Per-FedAvg take 10 local updates. Clients of both tasks adapt by one step on their own "
        "task's data.",
    ),
    departures=(),
)
