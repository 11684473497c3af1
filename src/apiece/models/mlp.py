"""Multi-layer perceptron."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence

from torch import nn

from apiece.errors import ApieceError
from apiece.task import Dropout


def mlp(
    input_shape: tuple[int, ...],
    classes: int,
    hidden: int | Sequence[int] = (128,),
    dropout: float = 0.0,
    norm: bool = False,
) -> nn.Module:
    """ReLU layers of the widths `hidden`, each followed by dropout, then one score per class.

    With `norm`, a GroupNorm of one group stands before each ReLU.
    """
    widths = (hidden,) if isinstance(hidden, int) else tuple(hidden)
    if any(width < 1 for width in widths):
        raise ApieceError(f"mlp needs hidden layers of at least 1 unit, got hidden={hidden}")
    layers: OrderedDict[str, nn.Module] = OrderedDict(flatten=nn.Flatten())
    incoming = math.prod(input_shape)
    for i, width in enumerate(widths, 1):
        layers[f"hidden{i}"] = nn.Linear(incoming, width)
        if norm:
            layers[f"norm{i}"] = nn.GroupNorm(1, width)
        layers[f"relu{i}"] = nn.ReLU()
        layers[f"dropout{i}"] = Dropout(dropout)
        incoming = width
    layers["head"] = nn.Linear(incoming, classes)
    return nn.Sequential(layers)
