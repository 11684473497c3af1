"""What may stand in parentheses behind the name of an image dataset: `cifar10(train,grey)`.

Images are bytes of shape (examples, channels, height, width), 255 standing for 1, until one of
`standardized`, `normalized` and `scaled` makes 32-bit floats of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apiece.data.federated import Examples
from apiece.errors import ApieceError, unknown


def prepared(examples: Examples, words: Sequence[str]) -> Examples:
    """With the steps that the words name, in the order of WORDS."""
    for word in words:
        if word not in WORDS:
            raise unknown("way to prepare images", word, WORDS)
    if len(both := [word for word in words if word in FLOATS]) > 1:
        raise ApieceError(f"images are either {' or '.join(both)}: leave one of the words out")
    for word, step in WORDS.items():
        if word in words:
            examples = step(examples)
    return examples


def _train(examples: Examples) -> Examples:
    """The training examples of the data's own split alone."""
    if examples.test is None:
        raise ApieceError("the data has no test examples of its own to leave out: leave out the word train")
    return replace(examples.only(~examples.test), test=None)


def _grey(examples: Examples) -> Examples:
    """The luma of ITU-R 601, rounded: 0.299 red + 0.587 green + 0.114 blue."""
    if examples.x.shape[1] != 3:
        raise ApieceError("the images are grey already: leave out the word grey")
    grey = np.empty((len(examples.x), 1, *examples.x.shape[2:]), dtype=np.uint8)
    for rows in _blocks(len(grey)):
        red, green, blue = np.moveaxis(examples.x[rows].astype(np.uint32), 1, 0)
        grey[rows, 0] = (299 * red + 587 * green + 114 * blue + 500) // 1000
    return replace(examples, x=grey)


def _moments(examples: Examples) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Of every pixel over the training examples: its mean, and that of its square."""
    train = np.ones(len(examples.y), dtype=bool) if examples.test is None else ~examples.test
    shape = examples.x.shape[1:]
    total, squares = np.zeros(shape), np.zeros(shape)
    for rows in _blocks(len(train)):
        some = examples.x[rows][train[rows]].astype(np.float64)
        total += some.sum(axis=0)
        squares += (some**2).sum(axis=0)
    count = max(int(train.sum()), 1)
    return total / count, squares / count


def _standardized(examples: Examples) -> Examples:
    """Mean 0 and deviation 1 of every pixel over the training examples; 0 where it does not vary."""
    mean, square = _moments(examples)
    deviation = np.sqrt(np.maximum(square - mean**2, 0.0))
    deviation[deviation == 0.0] = 1.0
    return _as_floats(examples, lambda some: (some - mean) / deviation)


def _normalized(examples: Examples) -> Examples:
    """Mean 0 and deviation 1 of all pixels of the training examples together."""
    means, squares = _moments(examples)
    mean = means.mean()
    deviation = np.sqrt(squares.mean() - mean**2) or 1.0
    return _as_floats(examples, lambda some: (some - mean) / deviation)


def _scaled(examples: Examples) -> Examples:
    """Pixels from −1 to 1."""
    return _as_floats(examples, lambda some: some / 127.5 - 1.0)


FLOATS = ("standardized", "normalized", "scaled")
WORDS: dict[str, Callable[[Examples], Examples]] = {
    "train": _train,
    "grey": _grey,
    "standardized": _standardized,
    "normalized": _normalized,
    "scaled": _scaled,
}


def _as_floats(examples: Examples, change: Callable[[Any], NDArray[np.float64]]) -> Examples:
    x = np.empty(examples.x.shape, dtype=np.float32)
    for rows in _blocks(len(x)):
        x[rows] = change(examples.x[rows].astype(np.float64))
    return replace(examples, x=x)


def _blocks(count: int) -> list[slice]:
    """So many rows at a time that their 64-bit copies are small beside the data."""
    return [slice(begin, begin + 5000) for begin in range(0, count, 5000)]
