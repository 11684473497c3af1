import csv
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score
from torch import Tensor
from torch.func import vmap

from apiece import Experiment, Recipe, run, tree
from apiece.data import toy
from apiece.data.federated import Examples, federate
from apiece.engines.base import Engine
from apiece.engines.sequential import Sequential
from apiece.engines.vectorized import Vectorized
from apiece.evaluate import Outputs, Total, models, pool, score
from apiece.measures import (
    RANKING,
    RANKING_POOLED,
    auc,
    hit,
    ndcg,
    pooled_auc,
    text_accuracy,
    text_losses,
)
from apiece.methods.fedavg import FedAvg
from apiece.random import as_key
from apiece.sample import uniform
from apiece.shard import Batch
from apiece.store import Store
from apiece.task import Metric, Task
from apiece.train import assemble
from tests.worlds import CPU, ROOT, linear_net


def outputs(scores: list[float]) -> Tensor:
    """Both outputs are moved by the same amount: only their difference counts."""
    shift = torch.arange(len(scores), dtype=torch.float32)
    return torch.stack([shift, shift + torch.tensor(scores)], -1)


def batch(y: list[int], weight: list[float] | None = None) -> Batch:
    weights = torch.ones(len(y)) if weight is None else torch.tensor(weight)
    return Batch((), torch.tensor(y), weights, None, as_key(0))


def test_a_ranking_by_hand() -> None:
    """Chosen 3 with rank 3 of 5 (5 and 4 are above); 2 of 4 pairs are right; 1 / log2(4) = 1/2."""
    found, shard = outputs([5, 3, 1, 4, 2]), batch([0, 1, 0, 0, 0])
    assert auc(found, shard) == 0.5
    assert [hit(found, shard, k).item() for k in (1, 2, 3, 4)] == [0, 0, 1, 1]
    assert [ndcg(found, shard, k).item() for k in (2, 3, 5)] == [0, 0.5, 0.5]


def test_equal_scores_take_the_middle_place() -> None:
    """One above, two equal: place 2, 3 or 4, the middle is 3. Pairs: 1 below, 2 halves of 4 = 1/2."""
    found, shard = outputs([2, 1, 1, 1, 0]), batch([0, 0, 1, 0, 0])
    assert auc(found, shard) == 0.5
    assert [hit(found, shard, k).item() for k in (2, 3)] == [0, 1]
    assert ndcg(found, shard, 3) == 1 / math.log2(4)


def test_a_model_that_scores_all_alike_is_no_better_than_chance() -> None:
    """Of 100 candidates the middle place is 50.5."""
    found, shard = outputs([7.0] * 100), batch([1] + [0] * 99)
    values = Task(torch.nn.Identity, measures=RANKING).metrics(found, shard)
    assert {name: values[name].item() for name in RANKING} == {
        "AUC": 0.5,
        "Hit@5": 0.0,
        "Hit@10": 0.0,
        "NDCG@5": 0.0,
        "NDCG@10": 0.0,
    }


def test_padding_does_not_count() -> None:
    real, padded = outputs([5, 3, 1, 4]), outputs([5, 3, 1, 4, 9, 9])
    for measure in RANKING.values():
        shard = batch([0, 1, 0, 0, 0, 1], [1, 1, 1, 1, 0, 0])
        assert measure(padded, shard) == measure(real, batch([0, 1, 0, 0]))


@pytest.mark.parametrize("y", [[0, 0], [1, 1], []])
def test_without_a_pair_there_is_no_auc(y: list[int]) -> None:
    assert auc(outputs([1.0, 2.0][: len(y)]), batch(y)).isnan()


cases = st.lists(st.tuples(st.integers(0, 6), st.booleans()), min_size=2, max_size=30)


def places(scores: list[int], y: list[int]) -> list[float]:
    """The mean place of each chosen one over all orders of equals, among it and those not chosen."""
    others = [s for s, label in zip(scores, y, strict=True) if label == 0]
    chosen = [s for s, label in zip(scores, y, strict=True) if label == 1]
    return [1 + sum(o > s for o in others) + sum(o == s for o in others) / 2 for s in chosen]


@given(cases, st.integers(1, 10))
def test_measures_are_means_over_places_counted_one_by_one(case: list[tuple[int, bool]], k: int) -> None:
    scores, y = [s for s, _ in case], [int(label) for _, label in case]
    found, shard = outputs([float(s) for s in scores]), batch(y)
    ranks = places(scores, y)
    if not ranks:
        return
    hits = [float(r <= k) for r in ranks]
    gains = [h / math.log2(r + 1) for h, r in zip(hits, ranks, strict=True)]
    np.testing.assert_allclose(hit(found, shard, k), np.mean(hits), rtol=1e-6)
    np.testing.assert_allclose(ndcg(found, shard, k), np.mean(gains), rtol=1e-6)
    if 0 in y:
        np.testing.assert_allclose(auc(found, shard), roc_auc_score(y, scores), rtol=1e-6)
        np.testing.assert_allclose(pooled_auc(found, shard.y), roc_auc_score(y, scores), rtol=1e-6)


@pytest.mark.parametrize("measure", RANKING.values(), ids=list(RANKING))
def test_measures_of_many_clients_at_once(measure: Metric) -> None:
    draw = torch.Generator().manual_seed(0)
    found, y = torch.randn(4, 30, 2, generator=draw), torch.arange(30).expand(4, 30) % 7 == 0
    weight = (torch.arange(30) < torch.tensor([[30], [20], [9], [1]])).float()
    together = vmap(lambda o, y, w: measure(o, Batch((), y.long(), w, None, as_key(0))))(found, y, weight)
    each = zip(found, y.long(), weight, strict=True)
    alone = [measure(one, Batch((), labels, w, None, as_key(0))) for one, labels, w in each]
    torch.testing.assert_close(together, torch.stack(alone), equal_nan=True)


def test_a_pooled_auc_of_many_examples_is_exact() -> None:
    """1.9 billion pairs are more than a 32-bit float can count."""
    draw = np.random.default_rng(0)
    y = (draw.random(200_000) < 0.05).astype(np.int64)
    scores = draw.normal(size=len(y)) + 0.3 * y
    found = torch.stack([torch.zeros(len(y)), torch.from_numpy(scores).float()], -1)
    exact = roc_auc_score(y, found[:, 1].numpy())
    assert abs(RANKING_POOLED["AUC"](found, torch.from_numpy(y)).item() - exact) < 1e-12


# Text


def test_text_by_hand() -> None:
    """Losses: −log p of each character, mean over the sequence. Right: 1 of 2 and 1 of 1; 2 of 3 in all."""
    p = torch.tensor([[[0.5, 0.25, 0.25], [0.2, 0.2, 0.6]], [[0.1, 0.8, 0.1], [0.7, 0.2, 0.1]]])
    y = torch.tensor([[0, 1], [1, -1]])
    expected = [(-math.log(0.5) - math.log(0.2)) / 2, -math.log(0.8)]
    torch.testing.assert_close(text_losses(p.log(), y), torch.tensor(expected))
    shard = Batch((), y, torch.ones(2), None, as_key(0))
    torch.testing.assert_close(text_accuracy(p, shard), torch.tensor(2 / 3))
    first = shard._replace(weight=torch.tensor([1.0, 0.0]))
    torch.testing.assert_close(text_accuracy(p, first), torch.tensor(0.5))


def test_text_without_a_character() -> None:
    """No loss, so that a batch of padding moves nothing; and no accuracy."""
    scores, y = torch.randn(2, 3, 4, requires_grad=True), torch.full((2, 3), -1)
    loss = text_losses(scores, y).sum()
    loss.backward()
    assert loss == 0
    assert (scores.grad == 0).all()  # type: ignore[union-attr]
    assert text_accuracy(scores, Batch((), y, torch.ones(2), None, as_key(0))).isnan()


# In a run


def viewers(folder: Path, **changes: object) -> Experiment:
    """A run on toy viewers, of whom some are unseen."""
    given = {"data": "movielens", "data_dir": str(toy.folder(folder)), "model": "din", "test": 0.0}
    settings = {"local": {"lr": 0.5, "batch_size": 50}}
    sizes = {"rounds": 2, "cohort": 4, "unseen": 0.25, "settings": settings}
    return Experiment(**{**given, **sizes, "engine": "vectorized", "threads": 1, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("engine", ["vectorized", "sequential", "processes"])
def test_a_run_is_scored_by_every_measure_of_its_model(tmp_path: Path, engine: str) -> None:
    """Against the clients' own models, rank by rank; pooled against scikit-learn's AUC."""
    threads = 0 if engine == "processes" else 1
    result = run(viewers(tmp_path / "toy", engine=engine, threads=threads), tmp_path / "run")
    data, task = result.session.federation.data, result.session.federation.task
    said: dict[bool, list[tuple[Tensor, Tensor]]] = {True: [], False: []}
    for client in result.clients:
        rows = torch.from_numpy(data.take([int(client)]).test[0])
        x, y = tree.take((data.x, data.y), rows)
        z = task.predict(result.model(int(client)), x)[:, 1]
        said[bool(data.seen[client])].append((z, y))
        rank = 1 + int((z > z[y == 1]).sum())
        gain = 1 / math.log2(rank + 1)
        expected = {
            "AUC": (100 - rank) / 99,
            "Hit@5": float(rank <= 5),
            "Hit@10": float(rank <= 10),
            "NDCG@5": gain if rank <= 5 else 0.0,
            "NDCG@10": gain if rank <= 10 else 0.0,
        }
        for name, value in expected.items():
            assert result.pairs[name].personalized[client] == pytest.approx(value, abs=1e-6), name

    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["metric"] == "AUC"
    assert list(summary["measures"]) == [*RANKING, "loss"]
    for group, seen in (("seen", True), ("unseen", False)):
        chosen = [client for client in result.clients if bool(data.seen[client]) == seen]
        for name in RANKING:
            mean = np.mean(result.pairs[name].personalized[chosen])
            assert summary["measures"][name][group]["personalized"] == pytest.approx(mean)
        assert summary[group] == summary["measures"]["AUC"][group]
        z, y = (torch.cat(parts) for parts in zip(*said[seen], strict=True))
        exact = roc_auc_score(y, z)
        assert summary["pooled"][group]["AUC"]["personalized"] == pytest.approx(exact, abs=1e-6)
        assert summary["pooled"][group]["AUC"]["initial"] != summary["pooled"][group]["AUC"]["personalized"]
    with (tmp_path / "run" / "clients.csv").open() as file:
        listed = [(row["metric"], int(row["client"])) for row in csv.DictReader(file)]
    assert listed == [(name, client) for name in [*RANKING, "loss"] for client in result.clients]


def test_what_is_measured_on_one_array_of_labels_has_no_pooled_part(tmp_path: Path) -> None:
    result = run(Experiment(model="logistic", rounds=1, cohort=2, engine="sequential", threads=1))
    assert list(result.summary["measures"]) == ["accuracy", "loss"]
    assert result.summary["pooled"] == {}


def test_a_model_that_is_not_finite_is_left_out_of_the_pool() -> None:
    """Scores 1, 3 | 2, 0 with labels 0, 1 | 1, 0: all four pairs right. The third client's are none."""
    task = Task(torch.nn.Identity, pooled=RANKING_POOLED)
    nan = torch.full((2, 2), torch.nan)
    parts = [
        Outputs(outputs([1, 3]), outputs([3, 1]), torch.tensor([0, 1])),
        Outputs(outputs([2, 0]), outputs([2, 0]), torch.tensor([1, 0])),
        Outputs(nan, nan, torch.tensor([0, 1])),
        Outputs(outputs([]), outputs([]), torch.zeros(0, dtype=torch.int64)),
    ]
    assert pool(task, parts, np.array([True, True, True, True])) == {"AUC": Total(1.0, 0.5)}
    assert pool(task, parts, np.array([False, True, False, False])) == {"AUC": Total(1.0, 1.0)}
    assert pool(task, parts, np.array([False, False, True, True])) == {}


@pytest.mark.parametrize(
    "engine",
    [Sequential(CPU), Sequential(CPU, 3), Vectorized(CPU, 3)],
    ids=["sequential", "several one by one", "vectorized"],
)
def test_outputs_are_those_of_each_clients_own_test_examples(engine: Engine) -> None:
    """Clients of unequal sizes, asked for in no order; what pads a chunk is not among them."""
    sizes = (4, 30, 9, 1, 16, 22)
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(sum(sizes), 5)).astype(np.float32), np.arange(sum(sizes)) % 3
    parts = [np.arange(b - n, b) for n, b in zip(sizes, np.cumsum(sizes), strict=True)]
    names = [str(i) for i in range(len(sizes))]
    data = federate(Examples(x, y, 3, ("a", "b", "c")), parts, names, key=0, test=0.5, unseen=0.0)
    task = Task(linear_net, pooled={"mean": lambda outputs, y: outputs.mean()})
    method = FedAvg(local=Recipe(lr=0.1, batch_size=4))
    training, server = assemble(
        engine,
        method,
        task,
        task.init(1),
        data,
        2,
        ROOT,
        uniform,
        lambda state: Store(state, data.population, CPU, None, mapped=False),
    )
    ids, broadcast = [5, 0, 3, 1, 2, 4], training.broadcast(server, 0)
    with torch.no_grad():
        found = score(engine, training.federation, broadcast, ids, 0)
        own = models(engine, training.federation, broadcast, ids, 0)
    assert found.pairs.keys() == {"accuracy", "loss"}
    for client, outputs, pair in zip(ids, found.outputs, own, strict=True):
        rows = data.test[client]
        assert outputs.y.tolist() == y[rows].tolist()
        for said, params in zip(outputs[:2], pair, strict=True):
            torch.testing.assert_close(said, task.predict(params, torch.from_numpy(x[rows])))
