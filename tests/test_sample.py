import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apiece.data import Examples, federate
from apiece.data.federated import Federated
from apiece.sample import SAMPLERS, Cohort
from apiece.train import describe

CLASSES = 4


def skewed(clients: int = 12, size: int = 60, seed: int = 0) -> Federated:
    """Each client has 90 % of one class; classes are equally frequent overall."""
    draw = np.random.default_rng(seed)
    y = np.concatenate(
        [
            np.where(draw.random(size) < 0.9, client % CLASSES, draw.integers(0, CLASSES, size))
            for client in range(clients)
        ]
    )
    parts = np.split(np.arange(clients * size), clients)
    x = np.zeros((len(y), 1), dtype=np.float32)
    labels = tuple(str(i) for i in range(CLASSES))
    names = [str(i) for i in range(clients)]
    return federate(Examples(x, y, CLASSES, labels), parts, names, key=0, test=0.0, unseen=0.25)


def cohorts(name: str, data: Federated, rounds: int = 40, cohort: int = 4) -> list[Cohort]:
    return [SAMPLERS[name](data, describe(index, data, cohort, root=5)) for index in range(rounds)]


def mix(data: Federated, rows: np.ndarray) -> np.ndarray:
    return np.bincount(data.labels[rows], minlength=CLASSES) / len(rows)


def drifts(name: str, data: Federated) -> tuple[float, float]:
    """Mean total variation (between a client and its cohort, between a cohort and the population)."""
    everyone = mix(data, np.concatenate([data.train[i] for i in data.seen_ids]))
    inside, between = [], []
    for cohort in cohorts(name, data):
        whole = mix(data, cohort.train.rows)
        between.append(np.abs(whole - everyone).sum() / 2)
        inside += [np.abs(mix(data, cohort.train[i]) - whole).sum() / 2 for i in range(len(cohort.ids))]
    return float(np.mean(inside)), float(np.mean(between))


def test_each_sampler_leaves_the_drift_it_is_named_after() -> None:
    """Clients of 60 dealt out at random differ from their cohort by about 0.1 by chance alone."""
    data = skewed()
    found = {name: drifts(name, data) for name in SAMPLERS}
    assert found["uniform"][0] > 0.4
    assert found["uniform"][1] > 0.15
    assert found["client_drift"][0] > 0.4
    assert found["client_drift"][1] < 0.01
    assert found["period_drift"][0] < 0.12
    assert found["period_drift"][1] == pytest.approx(found["uniform"][1])
    assert found["no_drift"][0] < 0.12
    assert found["no_drift"][1] < 0.01


@settings(deadline=None, max_examples=30)
@given(st.sampled_from(sorted(SAMPLERS)), st.integers(0, 50), st.integers(1, 9))
def test_cohorts_are_the_same_clients_whatever_the_sampler(name: str, index: int, size: int) -> None:
    data = skewed()
    round = describe(index, data, size, root=1)
    plain, other = SAMPLERS["uniform"](data, round), SAMPLERS[name](data, round)
    assert other.ids == plain.ids
    assert set(other.ids) <= set(data.seen_ids.tolist())
    assert len(other.train.rows) == len(plain.train.rows)
    again = SAMPLERS[name](data, round)
    assert again.train.rows.tolist() == other.train.rows.tolist()
    if name in ("uniform", "period_drift"):
        assert sorted(other.train.rows) == sorted(plain.train.rows)


def test_no_row_of_an_unseen_client_is_dealt() -> None:
    data = skewed()
    unseen = {row for i in np.flatnonzero(~data.seen) for row in data.train[i].tolist()}
    for name in SAMPLERS:
        assert all(unseen.isdisjoint(cohort.train.rows.tolist()) for cohort in cohorts(name, data))
