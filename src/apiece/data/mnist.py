"""MNIST (LeCun et al. 1998) and Fashion-MNIST (Xiao et al. 2017): files of one format, idx.

60,000 training and 10,000 test images, 28 × 28, grey, 10 classes. Read are
`MNIST/raw/{train,t10k}-{images-idx3,labels-idx1}-ubyte`, as they are or with .gz behind; of Fashion-MNIST the
same names in `FashionMNIST/raw`.
"""

from __future__ import annotations

import gzip
import zlib
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apiece.data.federated import Examples
from apiece.data.place import missing
from apiece.errors import ApieceError

_CLASSES = 10
_FASHION = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)


def _load(folder: Path, *, what: str, name: str, inside: str, label_names: tuple[str, ...]) -> Examples:
    raw = folder / inside / "raw"
    paths = {part: [_find(raw / f"{part}-{kind}") for kind in _KINDS] for part in ("train", "t10k")}
    if any(path is None for part in paths.values() for path in part):
        layouts = [f"{inside}/raw/{{train,t10k}}-{{{','.join(_KINDS)}}}{end}" for end in ("", ".gz")]
        raise missing(what, folder, layouts, f"Fetch it with: apiece download {name}")
    images, labels = [], []
    for part in paths.values():
        pixels, numbers = (_idx(path, dimensions) for path, dimensions in zip(part, (3, 1), strict=True))
        if len(pixels) != len(numbers):
            raise ApieceError(f"{part[0]} has {len(pixels)} images, {part[1]} {len(numbers)} labels")
        if len(numbers) and numbers.max() >= _CLASSES:
            raise ApieceError(f"{part[1]}: a label is {numbers.max()}, the largest there is {_CLASSES - 1}")
        images.append(pixels)
        labels.append(numbers)
    return Examples(
        x=np.concatenate(images)[:, None],
        y=np.concatenate(labels).astype(np.int64),
        classes=_CLASSES,
        label_names=label_names,
        test=np.repeat([False, True], [len(numbers) for numbers in labels]),
    )


_KINDS = ("images-idx3-ubyte", "labels-idx1-ubyte")


def _find(path: Path) -> Path | None:
    return next((p for p in (path, path.with_name(f"{path.name}.gz")) if p.exists()), None)


def _idx(path: Path | None, dimensions: int) -> NDArray[Any]:
    """An array of bytes: two zeros, 8 for bytes, the number of dimensions, their sizes, the values."""
    assert path is not None
    try:
        held = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise ApieceError(f"{path} cannot be read: {error}") from None
    begin = 4 + 4 * dimensions
    if held[:4] != bytes((0, 0, 8, dimensions)) or len(held) < begin:
        raise ApieceError(f"{path} is no idx file of {dimensions}-dimensional bytes")
    shape = tuple(np.frombuffer(held, dtype=">u4", count=dimensions, offset=4).tolist())
    values = np.frombuffer(held, dtype=np.uint8, offset=begin)
    if values.size != np.prod(shape, dtype=np.int64):
        raise ApieceError(f"{path} is cut short or too long: {values.size} values for the shape {shape}")
    return values.reshape(shape)


load = partial(
    _load,
    what="MNIST",
    name="mnist",
    inside="MNIST",
    label_names=tuple(str(digit) for digit in range(_CLASSES)),
)
load_fashion = partial(
    _load, what="Fashion-MNIST", name="fashion_mnist", inside="FashionMNIST", label_names=_FASHION
)
