import math

import numpy as np
import pytest

from apiece.evaluate import Pair, summarize

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


def test_the_worst_tenth_is_rounded_up() -> None:
    """Of 21 clients the worst 3: 0, 0.01, 0.02."""
    scores = np.arange(21) / 100
    group = summarize(Pair(scores, scores), np.ones(21, dtype=bool), np.ones(21, dtype=np.int64))
    assert group is not None
    assert group.initial_worst10 == pytest.approx(0.01)
    assert group.harmed == 0.0


def test_nobody_chosen_and_nobody_scored() -> None:
    pair = Pair(np.array([NAN]), np.array([NAN]))
    assert summarize(pair, np.array([False]), np.array([0])) is None
    group = summarize(pair, np.array([True]), np.array([0]))
    assert group is not None
    assert (group.clients, group.scored) == (1, 0)
    assert math.isnan(group.initial)
