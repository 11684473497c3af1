"""Linear models: one score per class from the flattened input."""

from __future__ import annotations

import math
from collections import OrderedDict

from torch import nn


def logistic(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """Multinomial logistic regression, under cross-entropy."""
    return nn.Sequential(
        OrderedDict(flatten=nn.Flatten(), head=nn.Linear(math.prod(input_shape), classes)),
    )


def svm(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """The same scores, under `apiece.task.hinge`; the margin's regularizer is the recipe's weight_decay."""
    return logistic(input_shape, classes)
