"""Claims about accuracy, over seeds, with the margins they were seen with."""

import pytest

from apiece import Experiment, run

SEEDS = range(5)


def means(method: str, partition: str) -> dict[str, float]:
    """Mean over seeds of the scores of all thirty clients, seen and unseen together."""
    totals = {"initial": 0.0, "personalized": 0.0}
    for seed in SEEDS:
        experiment = Experiment(
            method=method, partition=partition, seed=seed, engine="vectorized", threads=1, evaluate_every=50
        )
        pair = run(experiment).pairs["accuracy"]
        totals["initial"] += float(pair.initial.mean()) / len(SEEDS)
        totals["personalized"] += float(pair.personalized.mean()) / len(SEEDS)
    return totals


@pytest.mark.slow
def test_personalized_fedavg_beats_both_alternatives_on_four_classes_each() -> None:
    """Digits, 30 clients, 4 classes each: by a point over its own initial model, and over training alone."""
    fedavg, local = means("fedavg", "classes:4"), means("local", "classes:4")
    assert fedavg["personalized"] >= fedavg["initial"] + 0.01
    assert fedavg["personalized"] >= local["personalized"] + 0.01
