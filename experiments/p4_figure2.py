"""ADMM-FedMeta, Yue et al. 2021, Figure 2: accuracy of target clients after one gradient step."""

from dataclasses import replace
from typing import Any

from apiece import Experiment
from apiece.report.results import Run
from apiece.reproduce import Cell, Measured, Table, curve, score

TARGETS = score("unseen", "personalized")


def clients(data: str, model: str, count: int, support: float) -> Experiment:
    """Two classes each, 10 to 20 examples of either; four fifths are sources and train on all they have."""
    return Experiment(
        data=data,
        model=model,
        clients=count,
        partition="uniform:2:10:20",
        unseen=0.2,
        testers="unseen",
        test=1 - support,
        rounds=100,
        cohort=round(0.8 * count),
        evaluate_group="unseen",
        evaluate_every=5,
        checkpoint_every=100,
    )


# The support's share and ρ of each dataset, and β of Per-FedAvg.
COLUMNS: dict[str, tuple[Experiment, float, float, float]] = {
    "Fashion-MNIST": (
        clients("fashion_mnist(standardized)", "cnn(channels=(32, 64), dense=0, activation='elu')", 50, 0.5),
        0.5,
        0.35,
        0.005,
    ),
    "CIFAR-10": (
        clients(
            "cifar10(standardized)", "cnn(channels=(32, 64, 128), dense=0, activation='leaky_relu')", 50, 0.5
        ),
        0.5,
        0.7,
        0.005,
    ),
    "CIFAR-100": (
        clients(
            "cifar100(standardized)", "cnn(channels=(32, 64, 128, 256), dense=0, activation='elu')", 100, 0.5
        ),
        0.5,
        1.5,
        0.001,
    ),
}
ALPHA = 0.01
ONE_STEP: dict[str, Any] = {"lr": ALPHA, "batch_size": 0, "steps": 1}  # how a target adapts


def rows(support: float, rho: float, beta: float) -> dict[str, tuple[str, dict[str, Any]]]:
    fedavg = {
        f"FedAvg, {steps}": (
            "fedavg",
            {"local": {"lr": ALPHA, "batch_size": 10, "steps": steps}, "personal": ONE_STEP},
        )
        for steps in (1, 5, 10)
    }
    per_fedavg = {
        f"Per-FedAvg, {steps}": (
            "per_fedavg",
            {
                "alpha": ALPHA,
                "hessian": "hf",
                "local": {"lr": beta, "batch_size": 10, "steps": steps},
                "personal": ONE_STEP,
            },
        )
        for steps in (1, 5, 10)
    }
    admm = {"rho": rho, "support": support, "local": {"lr": ALPHA}}
    return {**fedavg, **per_fedavg, "ADMM-FedMeta": ("admm_fedmeta", admm)}


def measure(run: Run) -> Measured:
    return Measured({"accuracy": TARGETS(run)}, {"accuracy": curve(run, "unseen_personalized_mean")})


PUBLISHED = {
    "Fashion-MNIST": (83.99, 88.86, 85.29, 87.55, 89.65, 90.95, 95.69),
    "CIFAR-10": (41.97, 56.58, 56.58, 60.53, 65.93, 67.43, 74.61),
    "CIFAR-100": (42.35, 50.00, 49.97, 48.19, 49.56, 48.73, 63.56),
}

TABLE = Table(
    id="p4-figure2",
    title="Accuracy on target clients after one gradient step",
    source="Yue, Ren, Xin, Lin, Zhang 2021 (ADMM-FedMeta), Figure 2",
    cells={
        (row, column): Cell(replace(base, method=method, settings=settings), measure, redeal=True)
        for column, (base, *numbers) in COLUMNS.items()
        for row, (method, settings) in rows(*numbers).items()
    },
    published={
        (row, column): {"accuracy": value}
        for column, values in PUBLISHED.items()
        for row, value in zip(rows(0.5, 1.0, 1.0), values, strict=True)
    },
    figures={"accuracy": "%"},
    seeds=tuple(range(10)),
    settings=(
        "The paper's: 100 rounds, all sources take part, α = 0.01, ρ = 0.35 / 0.7, δ = 1/(t + 100), λ = 0, "
        "β = 0.005, 2 classes a client, 80 % sources, 50 % support. From the authors' code: 10 to 20 "
        "examples of each class, inputs standardised per pixel, the networks' widths.",
        "Ours: FedAvg's learning rate 0.01, which nothing gives; Per-FedAvg with Hessian-free second "
        "derivatives and batches of 10. The number behind a row's name is that of local updates.",
        "Ten seeds, each with clients dealt out anew; mean over the 10 target clients.",
    ),
    departures=(),
)
