"""Synthetic(α, β): Li et al. 2020, "Federated Optimization in Heterogeneous Networks" (FedProx), section 5.1.

Client k has a linear model W_k, b_k ~ N(u_k, 1) with u_k ~ N(0, α), and inputs x ~ N(v_k, Σ) with
v_k ~ N(B_k, 1) per dimension, B_k ~ N(0, β) and Σ diagonal, Σ_jj = j^-1.2; a label is argmax(W_k x + b_k).
β says how much the clients' inputs differ. u_k adds the same number to every output of client k, so α, though
part of the recipe, moves no label: the models differ between clients at α = 0 as well.

Departures:
- The paper writes N(0, α), the authors' generate_synthetic.py draws with STANDARD DEVIATION α (and β); this
  follows the code. At 0 and 1 the two readings agree, at 0.5 they do not.
- Sizes are int(lognormal(4, 2)) + 50 as in the authors' code, but no larger than `most`: 8 % of the clients
  would have more than 1000 examples, the largest of 30 often many thousands.
- The softmax is left out of the labels: it does not move the argmax.
- The authors' script sets no seed, so the numbers are not theirs.

`Population` is the same family without end, each client made by itself: its size is drawn first, from a hash.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from apiece import random
from apiece.data.federated import Examples, Ints, generator
from apiece.data.lazy import Source
from apiece.errors import ApieceError

_CLASSES = 10
_DIMENSION = 60
_FEWEST = 50
_MEAN, _DEVIATION = 4.0, 2.0  # of the logarithm of the examples beyond those
_LABEL_NAMES = tuple(str(label) for label in range(_CLASSES))


def load(alpha: float = 1.0, beta: float = 1.0, clients: int = 30, *, key: int, most: int = 1000) -> Examples:
    """`clients` natural clients; client k is the same whatever their number."""
    _check(alpha, beta, most)
    if clients < 1:
        raise ApieceError(f"clients of the synthetic data must be a whole number >= 1, got {clients}")

    def client(k: int) -> _Share:
        draw = generator(random.fold(key, "synthetic", k))
        size = min(int(draw.lognormal(_MEAN, _DEVIATION)) + _FEWEST, int(most))
        return _share(alpha, beta, draw, size)

    return _together([client(k) for k in range(clients)])


@dataclass(frozen=True)
class Population(Source):
    """Client k is a function of k, the key and the three numbers alone."""

    key: int
    alpha: float = 1.0
    beta: float = 1.0
    most: int = 1000
    classes = _CLASSES
    label_names = _LABEL_NAMES

    def __post_init__(self) -> None:
        _check(self.alpha, self.beta, self.most)

    def sizes(self, ids: Ints) -> Ints:
        hashes = random.fold(random.fold(self.key, "population", "size"), torch.from_numpy(ids)).numpy()
        uniform = (hashes.view(np.uint64) >> np.uint64(11)) * 2.0**-53
        extra = np.searchsorted(self._shares, uniform, side="right")
        return np.minimum(extra + _FEWEST, int(self.most))

    @cached_property
    def _shares(self) -> NDArray[np.float64]:
        """Of all clients, the share that have 0, at most 1, at most 2, … examples beyond the fewest."""
        logs = [(math.log(extra + 1) - _MEAN) / _DEVIATION for extra in range(int(self.most) - _FEWEST)]
        return np.array([0.5 * math.erfc(-value / math.sqrt(2.0)) for value in logs])

    def make(self, client: int) -> _Share:
        draw = generator(random.fold(self.key, "population", client))
        return _share(self.alpha, self.beta, draw, int(self.sizes(np.array([client]))[0]))

    def examples(self, clients: int) -> Examples:
        """The first `clients` of them in memory."""
        return _together([self.make(client) for client in range(clients)])


_Share = tuple[NDArray[np.float32], Ints]


def _check(alpha: float, beta: float, most: float) -> None:
    for name, value in (("alpha", alpha), ("beta", beta)):
        if not (math.isfinite(value) and value >= 0):
            raise ApieceError(f"{name} of the synthetic data must be a number >= 0, got {value}")
    if not (math.isfinite(most) and most >= 1 and most == int(most)):
        raise ApieceError(f"most of the synthetic data must be a whole number >= 1, got {most}")


def _together(shares: list[_Share]) -> Examples:
    return Examples(
        x=np.concatenate([x for x, _ in shares]),
        y=np.concatenate([y for _, y in shares]),
        classes=_CLASSES,
        label_names=_LABEL_NAMES,
        client=np.repeat(np.arange(len(shares)), [len(y) for _, y in shares]),
    )


def _share(alpha: float, beta: float, draw: np.random.Generator, size: int) -> _Share:
    u, B = draw.normal(0.0, alpha), draw.normal(0.0, beta)
    W, b = draw.normal(u, 1.0, (_CLASSES, _DIMENSION)), draw.normal(u, 1.0, _CLASSES)
    v = draw.normal(B, 1.0, _DIMENSION)
    deviation = np.sqrt(np.arange(1, _DIMENSION + 1) ** -1.2)
    x = v + deviation * draw.standard_normal((size, _DIMENSION))
    return x.astype(np.float32), np.argmax(x @ W.T + b, axis=1)
