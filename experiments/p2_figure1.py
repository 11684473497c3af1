"""FedPA, Shen et al. 2023, Figure 1: how the label mix of the cohort changes from round to round."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from statistics import fmean

from apiece import Experiment
from apiece.report.results import Run, mixes
from apiece.reproduce import Cell, Measured, Table

ALPHAS = (1, 0.1, 0.01)
ROUNDS = 5


def sampled(alpha: float) -> Experiment:
    """Only who takes part matters: a client takes one step."""
    return Experiment(
        method="fedavg",
        settings={"local": {"lr": 0.1, "batch_size": 10, "steps": 1}, "personal": {"epochs": 0, "steps": 0}},
        data="mnist",
        model="logistic",
        clients=100,
        partition=f"dirichlet:{alpha}:0",
        test=0.2,
        unseen=0.0,
        rounds=ROUNDS,
        cohort=10,
        evaluate_every=ROUNDS,
    )


def distance(mix: dict[int, float], whole: dict[int, float]) -> float:
    """Half the sum of the differences of shares, in percent."""
    return 50 * sum(abs(mix.get(label, 0.0) - whole.get(label, 0.0)) for label in {*mix, *whole})


def shares(counts: Counter[int]) -> dict[int, float]:
    return {label: count / counts.total() for label, count in counts.items()}


def measure(round: int) -> Callable[[Run], Measured]:
    def measured(run: Run) -> Measured:
        whole: Counter[int] = Counter()
        own: dict[int, Counter[int]] = {}
        for held in run.partition:
            if held.split == "train":
                whole[held.label] += held.examples
                own.setdefault(held.client, Counter())[held.label] += held.examples
        everyone, cohort = shares(whole), mixes(run.labels)[round]
        numbers = {
            "round's cohort": distance(cohort, everyone),
            "one client": fmean(distance(shares(counts), everyone) for counts in own.values()),
        }
        drawn = [(float(label), 100 * cohort.get(label, 0.0)) for label in sorted(everyone)]
        return Measured(numbers, {"share of each class, seed 0": drawn} if run.seed == 0 else {})

    return measured


TABLE = Table(
    id="p2-figure1",
    title="Distance of a label mix from that of all clients: of a round's cohort (period drift), of a client",
    source="Shen, Kuang, Li, Wang, Lv, Yang, Wu, Wu 2023 (FedPA), Figure 1",
    cells={
        (f"round {round}", f"α={alpha}"): Cell(sampled(alpha), measure(round), redeal=True)
        for alpha in ALPHAS
        for round in range(1, ROUNDS + 1)
    },
    published={},
    figures={"round's cohort": "%", "one client": "%"},
    seeds=(0, 1, 2, 3, 4),
    settings=(
        "The paper's: ten classes, Dirichlet(α) over 100 clients, 10 of them a round, five rounds. It does "
        "not name the data: here MNIST. The figure is a picture: its bars are the curves, classes across.",
        "Distances: half the sum of the differences of shares, 0 % for equal mixes, 100 % for disjoint ones. "
        "'One client' is the mean over all clients, the same for every round.",
    ),
    departures=(),
    small=lambda experiment: replace(experiment, rounds=ROUNDS),
)
