from __future__ import annotations

import numpy as np
import pytest

from apiece.data import synthetic
from apiece.errors import ApieceError


@pytest.fixture(scope="module")
def data():
    return synthetic.load(1.0, 1.0, 100, key=0)


def test_shapes_and_clients(data):
    assert data.x.shape == (len(data.y), 60)
    assert data.x.dtype == np.float32
    assert data.y.dtype == np.int64
    assert data.classes == 10
    assert len(data.label_names) == 10
    assert 0 <= data.y.min() <= data.y.max() < 10
    sizes = np.bincount(data.client)
    assert len(sizes) == 100
    assert sizes.min() >= 50
    assert sizes.max() == 1000


def test_sizes_are_fifty_and_a_lognormal():
    """log(size - 50) ~ N(4, 2), rounded down: median e^4 = 54.6; between the quartiles 4 ± 0.6745 * 2."""
    extra = np.bincount(synthetic.load(clients=400, key=1, most=10**6).client) - 50
    assert np.log(np.median(extra)) == pytest.approx(4.0, abs=0.4)
    lower, upper = np.exp(4 - 1.349), np.exp(4 + 1.349)
    assert np.mean((lower < extra) & (extra < upper)) == pytest.approx(0.5, abs=0.08)


def test_a_client_depends_on_neither_the_others_nor_the_cap(data):
    few = synthetic.load(1.0, 1.0, 3, key=0, most=60)
    for client in range(3):
        mine, theirs = (
            few.client == client,
            np.flatnonzero(data.client == client)[: sum(few.client == client)],
        )
        assert np.array_equal(few.x[mine], data.x[theirs])
        assert np.array_equal(few.y[mine], data.y[theirs])
    assert np.bincount(few.client).max() <= 60
    assert not np.array_equal(
        synthetic.load(clients=3, key=1, most=50).x, synthetic.load(clients=3, key=0, most=50).x
    )


def test_inputs_vary_within_a_client_as_the_paper_says(data):
    """Σ_jj = j^-1.2: pooled over the clients, each around its own mean."""
    means = np.stack([data.x[data.client == k].mean(axis=0) for k in range(100)])
    squares = ((data.x - means[data.client]) ** 2).sum(axis=0)
    variance = squares / (len(data.y) - 100)
    np.testing.assert_allclose(variance, np.arange(1, 61) ** -1.2, rtol=0.1)


def test_beta_is_a_standard_deviation():
    """One example of each of 1000 clients; the mean over its dimensions is B_k plus noise.

    Its variance is β² + 1/60 + Σ_j j^-1.2 / 60²; were β = 0.5 a variance, the first term would be 0.5.
    """
    x = synthetic.load(1.0, 0.5, 1000, key=0, most=1).x
    expected = 0.25 + 1 / 60 + (np.arange(1, 61) ** -1.2).sum() / 3600
    assert x.mean(axis=1).var() == pytest.approx(expected, rel=0.2)


def test_alpha_moves_no_label():
    """u_k adds u_k (Σ_j x_j + 1) to every output of client k alike."""
    none, much = (synthetic.load(alpha, 1.0, 10, key=0, most=100) for alpha in (0.0, 3.0))
    assert np.array_equal(none.y, much.y)
    assert np.array_equal(none.x, much.x)


def test_labels_are_linear_in_the_inputs_of_a_client(data):
    """Least squares on 1000 examples finds most labels; of shuffled ones little more than the commonest."""

    def score(x, y):
        x = np.column_stack([x, np.ones(len(x))])
        solution = np.linalg.lstsq(x, np.eye(10)[y])[0]
        return np.mean((x @ solution).argmax(axis=1) == y)

    mixed = []
    for client in np.flatnonzero(np.bincount(data.client) == 1000):
        x, y = data.x[data.client == client], data.y[data.client == client]
        mixed.append((np.bincount(y).max() / 1000, x, y))
    commonest, x, y = min(mixed, key=lambda entry: entry[0])
    assert score(x, np.random.default_rng(0).permutation(y)) < commonest + 0.15
    assert score(x, y) > commonest + 0.5 * (1 - commonest)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"alpha": -1.0}, "alpha .* must be a number >= 0, got -1"),
        ({"beta": float("nan")}, "beta .* must be a number >= 0, got nan"),
        ({"clients": 0}, "clients .* must be a whole number >= 1, got 0"),
        ({"most": 0}, "most .* must be a whole number >= 1, got 0"),
        ({"most": 2.5}, "most .* must be a whole number >= 1, got 2.5"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(ApieceError, match=message):
        synthetic.load(**settings, key=0)
