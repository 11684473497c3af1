"""APFL (decomposition and EWC), Ni, Shen, Zhang 2022, Figure 1: mean and highest accuracy over all rounds."""

from dataclasses import replace
from statistics import fmean
from typing import Any

from apiece import Experiment
from apiece.report.results import Run
from apiece.reproduce import Cell, Gain, Measured, Table, curve

# Rounds, learning rate and thresholds are the paper's, §4.1.3. Its thresholds for Vehicle, (700, 400), are
# those of a sum over a client's examples, 1,519 on average; ours is a mean. Last, FedMeta's `hessian`.
COLUMNS: dict[str, tuple[Experiment, float, tuple[float, float], str]] = {
    "Vehicle": (
        Experiment(data="vehicle", model="svm", partition="natural", test=0.2, rounds=20),
        0.03,
        (700 / 1519, 400 / 1519),
        "hf",
    ),
    "MNIST": (
        Experiment(
            data="mnist(standardized)",
            model="logistic",
            clients=1000,
            partition="power:2:2:5",
            test=0.1,
            rounds=150,
        ),
        0.03,
        (1.0, 0.5),
        "hf",
    ),
    "FEMNIST": (
        Experiment(
            data="femnist[36-45 from 0]",
            model="logistic",
            clients=200,
            partition="lognormal:4:1:3:5",
            test=0.1,
            rounds=200,
        ),
        0.003,
        (1.0, 0.5),
        "hf",
    ),
    "CIFAR-10": (
        Experiment(
            data="cifar10(train,grey)",
            model="lenet(channels=(20, 50), kernel=5, padding=0, dense=(800,))",
            clients=100,
            partition="power:1.3:5:10",
            test=0.2,
            rounds=100,
        ),
        0.01,
        (1.0, 0.2),
        "fo",
    ),
}
SGD = {"batch_size": 10, "epochs": 5}
STAY: dict[str, Any] = {
    "personal": {"epochs": 0, "steps": 0}
}  # what is scored is the model as it was received


def rows(lr: float, thresholds: tuple[float, float], hessian: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """Each row's method and settings; `hessian` is FedMeta's."""
    local = {"local": {"lr": lr, **SGD}}
    ewc = {
        "mu": 1.0,
        "lam": 1.0,
        "z": 2,
        "delta_mu": thresholds[0],
        "delta_sigma": thresholds[1],
        **local,
        **STAY,
    }
    return {
        "FedAvg": ("fedavg", {**local, **STAY}),
        "FedProx": ("fedprox", {"mu": 1.0, **local, **STAY}),
        # The paper's penalties have a factor 1/2, that of `fedcurv` has none.
        "FedCurv": ("fedcurv", {"lam": 0.5, **local, **STAY}),
        "FedMeta": (
            "_weights:ByExamples(per_fedavg)",
            {
                "inner": {
                    "alpha": lr,
                    "hessian": hessian,
                    "support": 0.8,
                    "local": {"lr": 0.01, **SGD},
                    "personal": {"lr": lr, "steps": 1, "batch_size": 0},
                }
            },
        ),
        "APFL-EWC": ("apfl_ewc", ewc),
        "APFL-EWC, preserving": ("apfl_ewc", {**ewc, "preserving": True}),
        "IID, mini-batch SGD": ("centralized", {"local": {"lr": lr, "batch_size": 10, "epochs": 1}, **STAY}),
    }


def measured(score: str) -> Any:
    """Pooled accuracy of the clients' models, from before the first round to after the last."""

    def measure(run: Run) -> Measured:
        accuracy = curve(run, f"seen_{score}_weighted")
        values = [y for _, y in accuracy]
        return Measured({"mean": fmean(values), "highest": max(values)}, {"accuracy": accuracy})

    return measure


CELLS = {
    (row, column): Cell(
        replace(
            base,
            method=method,
            settings=settings,
            cohort=10,
            unseen=0.0,
            # Convolutions of many clients at once are slow on a CPU: which engine suits, the machine tells.
            engine="auto" if base.model.startswith("lenet") else "vectorized",
            threads=1,
            evaluate_every=1,
            checkpoint_every=50,
        ),
        measured("personalized" if row == "FedMeta" else "initial"),
    )
    for column, (base, lr, thresholds, hessian) in COLUMNS.items()
    for row, (method, settings) in rows(lr, thresholds, hessian).items()
}

TABLE = Table(
    id="p5-figure1",
    title="Mean and highest test accuracy over all rounds",
    source="Ni, Shen, Zhang 2022 (APFL), Figure 1",
    cells=CELLS,
    published={
        ("APFL-EWC", "Vehicle"): {"mean": 88.59},
        ("APFL-EWC", "MNIST"): {"mean": 85.08},
        ("FedAvg", "Vehicle"): {"mean": 88.59 - 5.41},
        ("FedAvg", "MNIST"): {"mean": 85.08 - 6.01},
    },
    figures={"mean": "%", "highest": "%"},
    seeds=(0, 1, 2, 3, 4),
    settings=(
        "The paper's: batch 10, E = 5, 10 clients a round, learning rates, thresholds, μ = 1, λ = 1, z = 2. "
        "Nothing was searched for.",
        "The figure is a picture: its numbers are the gains in the text, and APFL's means on Vehicle and "
        "MNIST in Table 2 (λ = 1, E = 5), from which FedAvg's follow.",
        "FedMeta: MAML on 80 % support and 20 % query, meta learning rate 0.01, means weighted by n_k, as in "
        "the paper. Ours, for it says no more: E = 5 epochs of local steps with Hessian-free second "
        "derivatives, one step of adaptation; on CIFAR-10 without second derivatives, with which updates "
        "became not finite in an earlier try. FedCurv's importance is the last round's alone.",
    ),
    departures=(
        "Splits are drawn anew by FedProx's rules (the paper takes its files, or makes such): MNIST and "
        "FEMNIST with a tenth held out, CIFAR-10 of the training images with a fifth.",
        "FedProx's FEMNIST script gives the same images to many clients, so that one client's test images "
        "are others' training images; here no image is dealt twice.",
        "Vehicle is a part of 1,860 examples, not the 43,695 of the paper.",
        "APFL-EWC, preserving: decomposition starts with the function unchanged; not in the paper.",
    ),
    findings=(
        "As in the paper, APFL-EWC has the highest mean of the federated methods on Vehicle, MNIST and "
        "FEMNIST, where all were run, and FedCurv is about level with FedAvg. Before, with sums over every "
        "client ever met, FedCurv stood at 21.8 on FEMNIST, and FedMeta, unweighted and on undivided shards, "
        "at 90.4 on MNIST, above APFL-EWC.",
        "On MNIST the gain over FedAvg, 5.8 ± 0.4 points, is the paper's 6.0 within its own spread: both "
        "methods are 2.7 to 2.9 points above print, on a split drawn anew.",
        "On Vehicle the gain is a quarter of the paper's: FedAvg is above print, APFL-EWC below. The part at "
        "hand has 81 examples a sensor where the paper has 1,899; whether that is the reason is not known.",
        "Mini-batch SGD on data dealt out anew stands where the paper has it on three datasets: below APFL- "
        "EWC on Vehicle, by 0.8 ± 0.7 points, and above it on MNIST and FEMNIST, by 2.3 and 6.4. On "
        "CIFAR-10 it is above it, by 2.9 ± 0.9, where the paper has it below. It trains on all clients' "
        "data in every round, APFL-EWC on a tenth, and the mean is over all rounds from the first on: at "
        "their best APFL-EWC is 2.1 points above it.",
    ),
    gains=tuple(
        Gain("APFL-EWC", "FedAvg", column, "mean", gain)
        for column, gain in (("Vehicle", 5.41), ("MNIST", 6.01), ("FEMNIST", 30.42), ("CIFAR-10", 10.26))
    ),
)
