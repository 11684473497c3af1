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
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from apiece import random
from apiece.data.federated import Examples, Ints, generator
from apiece.errors import ApieceError

_CLASSES = 10
_DIMENSION = 60
_FEWEST = 50


def load(alpha: float = 1.0, beta: float = 1.0, clients: int = 30, *, key: int, most: int = 1000) -> Examples:
    """`clients` natural clients; client k is the same whatever their number."""
    for name, value in (("alpha", alpha), ("beta", beta)):
        if not (math.isfinite(value) and value >= 0):
            raise ApieceError(f"{name} of the synthetic data must be a number >= 0, got {value}")
    for name, count in (("clients", clients), ("most", most)):
        if count < 1 or count != int(count):
            raise ApieceError(f"{name} of the synthetic data must be a whole number >= 1, got {count}")
    shares = [_client(alpha, beta, random.fold(key, "synthetic", k), most) for k in range(clients)]
    return Examples(
        x=np.concatenate([x for x, _ in shares]),
        y=np.concatenate([y for _, y in shares]),
        classes=_CLASSES,
        label_names=tuple(str(label) for label in range(_CLASSES)),
        client=np.repeat(np.arange(clients), [len(y) for _, y in shares]),
    )


def _client(alpha: float, beta: float, key: int, most: int) -> tuple[NDArray[np.float32], Ints]:
    draw = generator(key)
    size = min(int(draw.lognormal(4.0, 2.0)) + _FEWEST, int(most))
    u, B = draw.normal(0.0, alpha), draw.normal(0.0, beta)
    W, b = draw.normal(u, 1.0, (_CLASSES, _DIMENSION)), draw.normal(u, 1.0, _CLASSES)
    v = draw.normal(B, 1.0, _DIMENSION)
    deviation = np.sqrt(np.arange(1, _DIMENSION + 1) ** -1.2)
    x = v + deviation * draw.standard_normal((size, _DIMENSION))
    return x.astype(np.float32), np.argmax(x @ W.T + b, axis=1)
