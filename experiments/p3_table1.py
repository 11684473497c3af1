"""Personalized FedAvg, Jiang et al. 2019, Table 1: FedAvg(E) on EMNIST-62, initial and personalized."""

from apiece import Experiment
from apiece.report.results import Run
from apiece.reproduce import Cell, Measured, Table, curve, score

CLIENT = {"optimizer": "sgd", "lr": 0.02, "batch_size": 20}
PERSONAL_EPOCHS = 10


def fedavg(epochs: int, cohort: int) -> Experiment:
    return Experiment(
        method="fedavg",
        settings={
            "local": {**CLIENT, "epochs": epochs},
            "personal": {"epochs": PERSONAL_EPOCHS},
            "outer": {"optimizer": "sgd", "lr": 1.0, "momentum": 0.9},
        },
        data="femnist",
        model="tff_cnn",
        partition="natural:3400",
        test=0.1,
        unseen=900,
        unseen_pick="last",
        rounds=500,
        cohort=cohort,
        evaluate_group="unseen",
        evaluate_clients=60,
        evaluate_at_end=0,
        evaluate_every=25,
        checkpoint_every=100,
        target=0.8,
    )


def measure(run: Run) -> Measured:
    """Both scores of all unseen clients at the end; the rounds to 80 % of sixty of them."""
    assert run.summary is not None
    reached = run.summary["rounds_to_target"]
    numbers = {name: score("unseen", name)(run) for name in ("initial", "personalized")}
    rounds = {f"rounds, {name}": reached[f"unseen_{name}"] for name in numbers}
    known = {name: float(value) for name, value in rounds.items() if value is not None}
    return Measured({**numbers, **known}, {name: curve(run, f"unseen_{name}_mean") for name in numbers})


PUBLISHED = {
    "E=2": ((74.73, 82.92, 310.0, 63.6), (84.03, 89.57, 82.5, 50.0)),
    "E=5": ((80.28, 87.12, 111.1, 33.9), (84.71, 90.57, 65.6, 31.25)),
    "E=10": ((78.79, 88.20, 137.5, 30.0), (84.80, 90.32, 68.7, 25.0)),
    "E=20": ((74.30, 87.82, 152.5, 32.2), (83.91, 89.53, 82.1, 46.4)),
}
COLUMNS = ("5 clients", "20 clients")
FIGURES = {"initial": "%", "personalized": "%", "rounds, initial": "", "rounds, personalized": ""}

TABLE = Table(
    id="p3-table1",
    title="FedAvg(E) after 500 rounds: accuracy of unseen clients, and rounds to 80 %",
    source="Jiang, Konečný, Rush, Kannan 2019 (Personalized FedAvg), Table 1",
    cells={
        (row, column): Cell(fedavg(int(row[2:]), int(column.split()[0])), measure)
        for row in PUBLISHED
        for column in COLUMNS
    },
    published={
        (row, column): dict(zip(FIGURES, values, strict=True))
        for row, both in PUBLISHED.items()
        for column, values in zip(COLUMNS, both, strict=True)
    },
    figures=FIGURES,
    seeds=tuple(range(9)),
    settings=(
        "The paper's: client SGD 0.02 in batches of 20, server SGD 1.0 with momentum 0.9, 500 rounds, 2,500 "
        "training clients, the TFF CNN with dropout, nine replicas, uniform mean over the unseen clients. "
        "Nothing was searched.",
        f"Ours: {PERSONAL_EPOCHS} epochs of personalization with the clients' optimizer (not given). Rounds "
        "to 80 % are read off every 25 rounds on sixty unseen clients, means over the seeds that "
        "reached it.",
    ),
    departures=(
        "LEAF's FEMNIST (3,400 of its 3,597 writers, the last 900 by their ids unseen, a tenth of each one's "
        "images held out) stands for TFF's "
        "EMNIST-62 (3,400 writers, 671,585 + 77,483): the same source, another crop and split. The unseen "
        "writers are not like the others: 71 % of their training images are digits, of the others' 44 %, "
        "and they have 153 each, the others 224.",
    ),
)
