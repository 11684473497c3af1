"""What the files in experiments/ share: plain means, and values read off curves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from apiece import Recipe
from apiece.check import examine
from apiece.engines.sequential import Sequential
from apiece.importing import import_object
from apiece.ledger import Entry, append
from apiece.method import Method
from apiece.methods.fedavg import FedAvg
from apiece.methods.feddf import FedDF
from apiece.methods.per_fedavg import PerFedAvg
from apiece.methods.reptile import Reptile
from apiece.reproduce import tables
from tests.worlds import CPU, federation, linear_net, ragged, servers

EXPERIMENTS = Path(__file__).parents[1] / "experiments"
Unweighted, ByExamples = (
    import_object(f"{EXPERIMENTS / '_weights.py'}:{name}", "wrapper") for name in ("Unweighted", "ByExamples")
)


@pytest.mark.parametrize(
    "method",
    [Unweighted(FedAvg()), Unweighted(FedDF()), ByExamples(Reptile()), ByExamples(PerFedAvg(support=0.8))],
)
def test_other_weights_keep_every_rule_but_the_one_they_are_about(method: Method) -> None:
    broken = [finding for finding in examine(method) if not finding.ok]
    assert [finding.rule for finding in broken] == ["wrappers keep the inner reply"]
    assert "weight" in broken[0].detail


def test_unweighted_takes_the_plain_mean() -> None:
    """One step of 0.5 on all a client has: w − 0.5 · mean of its gradient, of one without examples w."""
    sizes = (0, 2, 6)
    method = Unweighted(FedAvg(local=Recipe(lr=0.5, batch_size=0, steps=1)))
    training, server = federation(method, Sequential(CPU), sizes, 3, linear_net)
    (after,) = servers(training, server, 1)
    data, w = ragged(sizes), {name: t.clone().requires_grad_() for name, t in server.params.items()}
    steps = {name: torch.zeros_like(t) for name, t in w.items()}
    for client in (1, 2):
        rows = torch.from_numpy(data.train[client])
        loss = F.cross_entropy(F.linear(data.x[rows], w["weight"], w["bias"]), data.y[rows])
        for name, g in zip(w, torch.autograd.grad(loss, list(w.values())), strict=True):
            steps[name] += g / 3
    for name, t in server.params.items():
        assert torch.allclose(after.params[name], t - 0.5 * steps[name], atol=1e-6)


def test_by_examples_a_plain_mean_becomes_fedavgs() -> None:
    """Reptile of one step on all a client has, weighted by n_k, is FedAvg."""
    sizes, local = (3, 2, 6), Recipe(lr=0.5, batch_size=0, steps=1)
    ends = []
    for method in (ByExamples(Reptile(local=local)), FedAvg(local=local)):
        training, server = federation(method, Sequential(CPU), sizes, 3, linear_net)
        ends.append(list(servers(training, server, 2))[-1].params)
    for name, t in ends[0].items():
        assert torch.allclose(t, ends[1][name], atol=1e-6)


def test_values_are_read_off_curves() -> None:
    upto = import_object(f"{EXPERIMENTS / '_curves.py'}:upto", "function")
    curve = [(0, 10.0), (5, 20.0), (10, 30.0)]
    assert (upto(curve, 5), upto(curve, 9), upto(curve, 100)) == (20.0, 20.0, 30.0)


SHARED = [
    ("p3-figure1", "p3-table1", {("E=10", "EMNIST-62"): ("E=10", "5 clients")}),
    ("p3-figure3", "p3-table2", {("Reptile(1) Adam", "EMNIST-62"): ("Reptile(1) Adam", "EMNIST-62")}),
    ("p3-figure2", "p3-table2", {("Reptile(10) Adam", "SGD"): ("Reptile(10) Adam", "EMNIST-62")}),
    ("p4-figure4", "p4-figure2", {("ρ=0.35", "Fashion-MNIST"): ("ADMM-FedMeta", "Fashion-MNIST")}),
    ("p5-table2", "p5-figure1", {("λ=1", "MNIST, E=5"): ("APFL-EWC", "MNIST")}),
    ("p5-figure3", "p5-figure1", {("FedProx, E=5", "CIFAR-10"): ("FedProx", "CIFAR-10")}),
]


@pytest.mark.parametrize(("table", "other", "places"), SHARED, ids=[one[0] for one in SHARED])
def test_what_is_the_same_is_run_once(
    table: str, other: str, places: dict[tuple[str, str], tuple[str, str]]
) -> None:
    """A figure that shows a table's runs describes them in the very same words, so that they are found."""
    known = tables(EXPERIMENTS)
    for mine, theirs in places.items():
        assert known[table].cells[mine].experiment.id == known[other].cells[theirs].experiment.id


def test_fine_tuning_starts_from_the_model_nearest_to_the_papers(tmp_path: Path) -> None:
    nearest = import_object(f"{EXPERIMENTS / 'p3_table2.py'}:nearest", "function")
    ledger = tmp_path / "p3-table1.jsonl"
    assert nearest(ledger) == 0
    initial = {3: 76.0, 4: 74.0, 5: 74.9}
    described = {"table": "p3-table1", "row": "E=10", "column": "5 clients", "scale": "full", "curves": {}}
    made = {"seconds": 1.0, "experiment": {}, "commit": "", "when": "", "hardware": "", "versions": {}}
    others = [Entry(**{**described, "row": "E=2"}, seed=6, numbers={"initial": 74.41}, **made)]
    mine = [Entry(**described, seed=seed, numbers={"initial": x}, **made) for seed, x in initial.items()]
    append(ledger, [*others, *mine])
    assert nearest(ledger) == 4
