"""CIFAR-10 and CIFAR-100 (Krizhevsky 2009), in their binary versions.

50,000 training and 10,000 test images, 32 × 32, three colours, 10 or 100 classes. Read are
`cifar-10-batches-bin/{data_batch_1,…,data_batch_5,test_batch}.bin` and
`cifar-100-binary/{train,test}.bin`. The python versions are pickled, which is never read.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from apiece.data.federated import Examples
from apiece.data.place import missing
from apiece.errors import ApieceError

_SHAPE = (3, 32, 32)
_PIXELS = 3 * 32 * 32


class _Version(NamedTuple):
    what: str
    name: str
    inside: str
    files: tuple[str, ...]  # the last one holds the test examples
    label_bytes: int  # before the pixels; the last of them is the label
    label_names: tuple[str, ...]


def _load(folder: Path, version: _Version) -> Examples:
    paths = [folder / version.inside / name for name in version.files]
    if not all(path.exists() for path in paths):
        layout = f"{version.inside}/{{{','.join(version.files)}}}"
        source = (
            f"Fetch it with: apiece download {version.name} "
            f"(the binary version: the python version is pickled and never read)"
        )
        raise missing(version.what, folder, [layout], source)
    width = version.label_bytes + _PIXELS
    sizes = [path.stat().st_size for path in paths]
    for path, size in zip(paths, sizes, strict=True):
        if size % width:
            raise ApieceError(f"{path} is cut short or not binary: {size} bytes are no multiple of {width}")
    counts = [size // width for size in sizes]
    x = np.empty((sum(counts), *_SHAPE), dtype=np.uint8)
    y = np.empty(len(x), dtype=np.int64)
    for path, end, count in zip(paths, np.cumsum(counts), counts, strict=True):
        records = np.fromfile(path, dtype=np.uint8).reshape(count, width)
        x[end - count : end] = records[:, version.label_bytes :].reshape(count, *_SHAPE)
        y[end - count : end] = records[:, version.label_bytes - 1]
    classes = len(version.label_names)
    if len(y) and y.max() >= classes:
        raise ApieceError(
            f"{folder / version.inside}: a label is {y.max()}, the largest there is {classes - 1}"
        )
    return Examples(
        x=x,
        y=y,
        classes=classes,
        label_names=version.label_names,
        test=np.repeat([False, True], [sum(counts[:-1]), counts[-1]]),
    )


# fmt: off
_HUNDRED_NAMES = (
    "apple", "aquarium_fish", "baby", "bear", "beaver", "bed", "bee", "beetle", "bicycle", "bottle", "bowl",
    "boy", "bridge", "bus", "butterfly", "camel", "can", "castle", "caterpillar", "cattle", "chair",
    "chimpanzee", "clock", "cloud", "cockroach", "couch", "crab", "crocodile", "cup", "dinosaur", "dolphin",
    "elephant", "flatfish", "forest", "fox", "girl", "hamster", "house", "kangaroo", "keyboard", "lamp",
    "lawn_mower", "leopard", "lion", "lizard", "lobster", "man", "maple_tree", "motorcycle", "mountain",
    "mouse", "mushroom", "oak_tree", "orange", "orchid", "otter", "palm_tree", "pear", "pickup_truck",
    "pine_tree", "plain", "plate", "poppy", "porcupine", "possum", "rabbit", "raccoon", "ray", "road",
    "rocket", "rose", "sea", "seal", "shark", "shrew", "skunk", "skyscraper", "snail", "snake", "spider",
    "squirrel", "streetcar", "sunflower", "sweet_pepper", "table", "tank", "telephone", "television", "tiger",
    "tractor", "train", "trout", "tulip", "turtle", "wardrobe", "whale", "willow_tree", "wolf", "woman",
    "worm",
)
# fmt: on
_TEN = _Version(
    "CIFAR-10",
    "cifar10",
    "cifar-10-batches-bin",
    (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"),
    1,
    ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
)
_HUNDRED = _Version(
    "CIFAR-100",
    "cifar100",
    "cifar-100-binary",
    ("train.bin", "test.bin"),
    2,  # the coarse label, then the fine one
    _HUNDRED_NAMES,
)

load_10 = partial(_load, version=_TEN)
load_100 = partial(_load, version=_HUNDRED)
