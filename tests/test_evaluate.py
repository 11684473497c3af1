import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from apiece.data.lazy import lazily
from apiece.data.synthetic import Population
from apiece.evaluate import Pair, chosen, summarize

NAN = math.nan


def test_figures_by_hand() -> None:
    """Five clients, one unscored, one not chosen."""
    pair = Pair(np.array([0.5, 0.9, NAN, 0.7, 0.0]), np.array([0.6, 0.8, NAN, 0.7, 1.0]))
    chosen = np.array([True, True, True, True, False])
    group = summarize(pair, chosen, np.array([10, 20, 0, 70, 5]))
    assert group is not None
    assert (group.clients, group.scored) == (4, 3)
    assert group.initial == pytest.approx(0.7)
    assert group.personalized == pytest.approx(0.7)
    assert group.initial_weighted == pytest.approx((5 + 18 + 49) / 100)
    assert group.personalized_weighted == pytest.approx((6 + 16 + 49) / 100)
    assert group.initial_std == pytest.approx(math.sqrt((0.04 + 0.04 + 0) / 3))
    assert group.initial_worst10 == 0.5
    assert group.personalized_worst10 == 0.6
    assert group.harmed == pytest.approx(1 / 3)


def test_who_diverges_is_harmed_and_keeps_the_initial_score() -> None:
    """Of four clients one has no test examples and one a personalized model that is not finite."""
    pair = Pair(np.array([0.5, 0.9, NAN, 0.1]), np.array([0.6, NAN, NAN, 0.4]))
    group = summarize(pair, np.ones(4, dtype=bool), np.array([10, 20, 0, 30]))
    assert group is not None
    assert (group.clients, group.scored, group.diverged) == (4, 3, 1)
    assert group.initial == pytest.approx(0.5)
    assert group.initial_weighted == pytest.approx((5 + 18 + 3) / 60)
    assert group.personalized == pytest.approx(0.5)
    assert group.personalized_weighted == pytest.approx((6 + 12) / 40)
    assert (group.initial_worst10, group.personalized_worst10) == (0.1, 0.4)
    assert group.harmed == pytest.approx(1 / 3)


def test_all_may_diverge() -> None:
    group = summarize(
        Pair(np.array([0.5, 0.7]), np.array([NAN, NAN])), np.ones(2, dtype=bool), np.array([3, 4])
    )
    assert group is not None
    assert (group.scored, group.diverged, group.harmed) == (2, 2, 1.0)
    assert group.initial == pytest.approx(0.6)
    assert math.isnan(group.personalized)
    assert math.isnan(group.personalized_worst10)


def test_the_worst_tenth_is_rounded_up() -> None:
    """Of 21 clients the worst 3: 0, 0.01, 0.02."""
    scores = np.arange(21) / 100
    group = summarize(Pair(scores, scores), np.ones(21, dtype=bool), np.ones(21, dtype=np.int64))
    assert group is not None
    assert group.initial_worst10 == pytest.approx(0.01)
    assert group.harmed == 0.0


def test_where_lower_scores_are_better() -> None:
    """Losses: the worst tenth of ten is the highest; who ends higher is harmed."""
    initial, personalized = np.arange(10.0), np.arange(10.0) - np.array([1.0] * 9 + [-2.0])
    group = summarize(Pair(initial, personalized), np.ones(10, dtype=bool), np.ones(10, dtype=np.int64), True)
    assert group is not None
    assert (group.initial_worst10, group.personalized_worst10, group.harmed) == (9.0, 11.0, 0.1)


def test_nobody_chosen_and_nobody_scored() -> None:
    pair = Pair(np.array([NAN]), np.array([NAN]))
    assert summarize(pair, np.array([False]), np.array([0])) is None
    group = summarize(pair, np.array([True]), np.array([0]))
    assert group is not None
    assert (group.clients, group.scored) == (1, 0)
    assert math.isnan(group.initial)


@given(st.integers(1, 40), st.sampled_from([0.0, 0.03, 0.2, 0.5, 0.9]), st.integers(0, 50), st.integers(0, 9))
def test_some_clients_are_chosen_to_be_scored(clients: int, unseen: float, count: int, key: int) -> None:
    """In proportion: within one of it, and at least one of either kind where two are chosen."""
    if round(unseen * clients) == clients:
        return
    data = lazily(Population(key=0, most=1), clients, key, unseen=unseen)
    ids = chosen(data, count, key)
    if not 0 < count < clients:
        assert ids.tolist() == list(range(clients))
        return
    assert len(ids) == count
    assert sorted(set(ids.tolist())) == ids.tolist()
    assert ids.tolist() == chosen(data, count, key).tolist()
    newcomers = int((~data.seen[ids]).sum())
    assert abs(newcomers - count * (~data.seen).mean()) <= 1
    if count > 1:
        assert data.seen[ids].any()
        assert newcomers > 0 or data.seen.all()


def test_the_key_says_who_is_chosen() -> None:
    data = lazily(Population(key=0, most=1), 1000, 0)
    assert chosen(data, 20, 1).tolist() != chosen(data, 20, 2).tolist()
