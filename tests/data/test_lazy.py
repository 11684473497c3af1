"""Clients made one by one against the same clients in memory."""

from __future__ import annotations

import tracemalloc
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from apiece import Recipe, Task, tree
from apiece import data as datasets
from apiece.data.federated import Clients, Federated, federate, resident
from apiece.data.lazy import Lazy, Numbers, Source, lazily
from apiece.data.partition import deal
from apiece.data.synthetic import Population
from apiece.engines.base import Engine
from apiece.engines.sequential import Sequential
from apiece.engines.vectorized import Vectorized
from apiece.errors import ApieceError
from apiece.evaluate import evaluate
from apiece.methods.fedec import FedEC
from apiece.sample import SAMPLERS, uniform
from apiece.store import Store
from apiece.train import Training, assemble, describe
from tests.worlds import CPU, ROOT

CLIENTS = 60
SOURCE = Population(key=7, most=90)
METHOD = FedEC(local=Recipe(lr=0.1, batch_size=20, epochs=1))


@dataclass(frozen=True)
class Odd(Source):
    """Clients of 0, 1, 2, … examples whose inputs are two arrays; it remembers whom it was asked for."""

    classes = 3
    label_names = ("a", "b", "c")
    made: list[int] = field(default_factory=list)

    def sizes(self, ids: np.ndarray) -> np.ndarray:
        return ids % 7

    def make(self, client: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
        self.made.append(client)
        n = client % 7
        x = {"u": np.full((n, 2), client, np.float32), "v": np.arange(n, dtype=np.float32)}
        return x, np.arange(n, dtype=np.int64) % 3


def in_memory(key: int, test: float = 0.25, unseen: float = 0.2, testers: str = "all") -> Federated:
    examples = SOURCE.examples(CLIENTS)
    dealt = deal("natural", examples, CLIENTS, key)
    return federate(examples, *dealt, key, test, unseen, testers=testers)


def of(data: Federated, position: int) -> list[torch.Tensor]:
    """One client's training and test examples."""
    rows = (data.train[position], data.test[position])
    return [leaf[torch.from_numpy(part)] for part in rows for leaf in (*tree.leaves(data.x), data.y)]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# --- What a client holds --------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 10**6 - 1), min_size=1, max_size=12), st.integers(0, 5))
def test_a_client_is_the_same_whoever_else_is_asked_for(ids: list[int], key: int) -> None:
    data = Lazy(Population(key, most=60), *rest_of(lazily(SOURCE, 3, key)))
    together = data.take(ids)
    for at, client in enumerate(ids):
        assert same(of(together, at), of(data.take([client]), 0))
    train, test = data.sizes(ids)
    assert train.tolist() == together.train.sizes.tolist()
    assert test.tolist() == together.test.sizes.tolist()
    assert data.sizes(ids[::-1])[0].tolist() == train.tolist()[::-1]


def rest_of(data: Lazy) -> tuple:
    """The fields behind the source, for a million clients that are all seen."""
    everyone = np.ones(10**6, dtype=bool)
    head = (data.x, data.y, data.classes, data.label_names, Numbers(10**6))
    return (*head, everyone, everyone, data.test, data.key)


@pytest.mark.parametrize("testers", ["all", "unseen"])
@pytest.mark.parametrize("test", [0.0, 0.25, 0.5])
def test_it_is_what_the_same_clients_in_memory_are(test: float, testers: str) -> None:
    lazy, whole = lazily(SOURCE, CLIENTS, 5, test, testers=testers), in_memory(5, test, testers=testers)
    assert lazy.seen.tolist() == whole.seen.tolist()
    assert (lazy.population, lazy.examples) == (whole.population, whole.examples)
    assert lazy.examples == whole.train.sizes[whole.seen].sum()
    assert tuple(lazy.names) == whole.names
    assert (lazy.input_shape, lazy.classes, lazy.label_names) == (
        whole.input_shape,
        whole.classes,
        whole.label_names,
    )
    for mine, theirs in zip(lazy.sizes(range(CLIENTS)), whole.sizes(range(CLIENTS)), strict=True):
        assert mine.tolist() == theirs.tolist()
    ids = list(range(CLIENTS))
    together = lazy.take(ids)
    assert all(same(of(together, i), of(whole, i)) for i in ids)
    assert datasets.partition_table(lazy) == datasets.partition_table(whole)
    assert datasets.partition_table(lazy, np.array([3, 41])) == [
        row for row in datasets.partition_table(whole) if row[0] in (3, 41)
    ]


def test_taken_from_memory_clients_are_re_numbered_and_share_the_arrays() -> None:
    whole = in_memory(5)
    some = whole.take([41, 3])
    assert some.x is whole.x
    assert some.names == ("41", "3")
    assert some.seen.tolist() == whole.seen[[41, 3]].tolist()
    assert same(of(some, 0), of(whole, 41))
    assert same(of(some, 1), of(whole, 3))
    assert some.labels is whole.labels


def test_clients_without_examples_and_inputs_of_several_arrays() -> None:
    data = lazily(Odd(), 20, 0, test=0.5, unseen=0.0)
    held = data.take([7, 3, 14])
    assert held.train.sizes.tolist() == [0, 1, 0]
    assert held.test.sizes.tolist() == [0, 2, 0]
    assert held.x["u"].tolist() == [[3, 3]] * 3 + [[0, 0]]
    assert held.x["v"].tolist() == [0, 1, 2, 0]
    nobody = data.take([0, 7])
    assert nobody.y.tolist() == [0]
    assert nobody.x["u"].tolist() == [[0, 0]]
    assert nobody.padding == 0


def test_names_are_numbers() -> None:
    names = Numbers(10**6)
    assert names[999_999] == "999999"
    assert names[:3] == ["0", "1", "2"]
    assert "999999" in names
    assert names.index("12") == 12
    assert "x" not in Numbers(9)
    with pytest.raises(IndexError):
        names[10**6]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"test": 1.0}, "the test share must lie in"),
        ({"unseen": -0.1}, "unseen must be a share in"),
        ({"clients": 2, "unseen": 0.9}, "leaves none of 2 clients"),
    ],
)
def test_bad_shares_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(ApieceError, match=message):
        lazily(SOURCE, **{"clients": 5, "key": 0, **settings})


# --- The generated population ---------------------------------------------------------------------------


def test_sizes_are_those_of_synthetic() -> None:
    """50 + int(lognormal(4, 2)), 1000 at the most: P(size = 50) = Φ(−2), the median is 50 + 54, and the share
    of the largest Φ((4 − ln 950) / 2) = 0.0767."""
    sizes = Population(key=1).sizes(np.arange(200_000))
    assert sizes.min() == 50
    assert sizes.max() == 1000
    assert np.mean(sizes == 50) == pytest.approx(0.02275, abs=0.0015)
    assert np.median(sizes) == pytest.approx(104, abs=1)
    assert np.mean(sizes == 1000) == pytest.approx(0.0767, abs=0.003)


def test_the_bound_shortens_and_changes_nothing_else() -> None:
    long, short = Population(key=1), Population(key=1, most=60)
    for client in (0, 3, 10**6, 10**9):
        (x, y), (few, labels) = long.make(client), short.make(client)
        assert len(few) == min(len(x), 60)
        assert np.array_equal(few, x[:60])
        assert np.array_equal(labels, y[:60])
    assert not np.array_equal(long.make(0)[0][:50], Population(key=2).make(0)[0][:50])


def test_it_is_a_dataset_by_name() -> None:
    data = datasets.prepare("population(1,0.5,70)", clients=9, key=3)
    assert isinstance(data, Lazy)
    assert data.source == Population(3, 1.0, 0.5, 70)
    assert data.partition == "natural"
    examples = datasets.load("population(1,0.5,70)", clients=9, key=3)
    assert isinstance(datasets.prepare("population(1,0.5,70)", "iid", clients=9, key=3), Federated)
    assert len(examples.y) == data.source.sizes(np.arange(9)).sum()
    assert set(datasets.load("population[0-4]", clients=3, key=0).y) <= set(range(5))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("population(1,1)", r"write population\(alpha,beta,most\)"),
        ("population(1,-1,9)", "beta .* must be a number >= 0"),
        ("population(1,1,0)", "most .* must be a whole number >= 1"),
        ("population(1,1,inf)", "most .* must be a whole number >= 1"),
        ("population(1,1,2.5)", "most .* must be a whole number >= 1"),
    ],
)
def test_bad_populations_are_refused(name: str, message: str) -> None:
    with pytest.raises(ApieceError, match=message):
        datasets.prepare(name, clients=9, key=0)


def test_what_needs_all_examples_says_so() -> None:
    data = lazily(SOURCE, CLIENTS, 0)
    with pytest.raises(ApieceError, match="pooling needs every client's examples in memory"):
        resident(data, "pooling")
    for name in ("client_drift", "no_drift"):
        with pytest.raises(ApieceError, match=f"--sampler {name} needs"):
            SAMPLERS[name](data, training(data, Sequential(CPU)).round(0))
    with pytest.raises(ApieceError, match="a proxy set needs"):
        datasets.prepare("population", clients=9, key=0, proxy=0.1)


# --- In rounds ------------------------------------------------------------------------------------------


def training(data: Clients, engine: Engine, cohort: int = 7, folder: Path | None = None) -> Training:
    task = Task(lambda: nn.Linear(60, 10))

    def store(state: tree.Tree) -> Store:
        made = Store(state, data.population, CPU, folder, mapped=folder is not None)
        made.open(0)
        return made

    return assemble(engine, METHOD, task, task.init(1), data, cohort, ROOT, uniform, store)[0]


@pytest.mark.parametrize("engine", [Sequential(CPU), Vectorized(CPU, 4)], ids=lambda e: e.name)
def test_rounds_and_scores_have_the_bits_of_the_same_clients_in_memory(
    engine: Engine, tmp_path: Path
) -> None:
    """Ragged clients, with states; of the lazy ones in the mapped store, and some met again."""
    ends = []
    for data, folder in ((in_memory(5), None), (lazily(SOURCE, CLIENTS, 5), tmp_path)):
        play = training(data, engine, 20, folder)
        server = METHOD.init(play.federation.task, play.federation.start, 0)
        with torch.no_grad():
            closed = list(play.rounds(server, 0, 4))
            broadcast = play.broadcast(closed[-1].server, 4)
            pairs = evaluate(engine, play.federation, broadcast, [50, 3, 17, *closed[0].ids], 4)
        ends.append((closed, pairs))
    (whole, scores), (lazy, others) = ends
    for a, b in zip(whole, lazy, strict=True):
        assert a.ids == b.ids
        assert a.round._replace(replies=0) == b.round._replace(replies=0)
        assert a.labels.tolist() == b.labels.tolist()
        assert all(torch.equal(a.server.params[name], b.server.params[name]) for name in a.server.params)
    for name in scores:
        for mine, theirs in zip(scores[name], others[name], strict=True):
            np.testing.assert_array_equal(mine, theirs)


def test_scores_come_in_the_order_in_which_clients_are_asked_for() -> None:
    """Chunks of eight are cut by size; each client's own score is that of it alone."""
    engine = Vectorized(CPU, 8)
    play = training(lazily(SOURCE, CLIENTS, 5), engine)
    broadcast = play.broadcast(METHOD.init(play.federation.task, play.federation.start, 0), 0)
    ids = list(range(20, 0, -1))
    with torch.no_grad():
        pairs = evaluate(engine, play.federation, broadcast, ids, 0)
        alone = [evaluate(engine, play.federation, broadcast, [client], 0) for client in ids]
    for which in ("initial", "personalized"):
        expected = [float(getattr(one["loss"], which)[0]) for one in alone]
        np.testing.assert_allclose(getattr(pairs["loss"], which), expected, rtol=1e-5)


def test_only_the_cohort_is_made() -> None:
    """Of 300 clients, each asked for once a round; the first one told what examples look like."""
    source = Odd()
    data = lazily(source, 300, 0)
    assert source.made == [0]
    for index in range(3):
        source.made.clear()
        cohort = uniform(data, describe(index, data, 6, root=1))
        assert source.made == list(cohort.ids)
        assert cohort.train.sizes.tolist() == data.sizes(cohort.ids)[0].tolist()


def test_a_round_allocates_nothing_of_the_size_of_the_population(tmp_path: Path) -> None:
    """Three million clients, 5 of 50 examples in a round: a flag for each client would be 3 MB."""
    data = lazily(Population(key=1, most=50), 3_000_000, 0, unseen=0.0)
    play = training(data, Sequential(CPU), 5, tmp_path)
    server = METHOD.init(play.federation.task, play.federation.start, 0)
    with torch.no_grad():
        rounds = play.rounds(server, 0, 3)
        first = next(rounds)
        tracemalloc.start()
        try:
            last = list(rounds)[-1]
            play.federation.store.commit(3)
            evaluate(play.engine, play.federation, play.broadcast(last.server, 3), list(first.ids), 3)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert peak < 2_000_000
