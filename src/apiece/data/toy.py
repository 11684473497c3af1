"""Toy files: every dataset of the papers in its real layout, a few hundred made-up examples each.

They let all experiments run in seconds where the real files are not; no number made on them means anything.
"""

from __future__ import annotations

import lzma
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from apiece.data.federated import generator

Bytes = NDArray[np.uint8]

_WRITERS = 40
_RATED = 25  # items per viewer
_VIEWERS, _ITEMS = 24, 130


def folder(place: Path) -> Path:
    """The folder of toy files, made if it is not there."""
    if not place.exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(dir=place.parent))
        for write in (_idx, _cifar, _femnist, _vehicle, _movielens, _shakespeare):
            write(draft)
        try:
            os.rename(draft, place)
        except OSError:  # another process was faster
            shutil.rmtree(draft)
    return place


def _images(labels: NDArray[np.int64], channels: int, side: int, seed: int) -> Bytes:
    """Noise over a coarse pattern of each class."""
    draw = generator(seed)
    coarse = draw.integers(0, 256, (int(labels.max()) + 1, channels, 4, 4))
    patterns = coarse.repeat(side // 4, 2).repeat(side // 4, 3)
    noise = draw.integers(-60, 61, (len(labels), channels, side, side))
    return (patterns[labels] + noise).clip(0, 255).astype(np.uint8)


def _labels(count: int, classes: int) -> NDArray[np.int64]:
    return np.arange(count) % classes


def _idx(place: Path) -> None:
    for seed, name in enumerate(("MNIST", "FashionMNIST")):
        raw = place / name / "raw"
        raw.mkdir(parents=True)
        for part, count in (("train", 1200), ("t10k", 200)):
            labels = _labels(count, 10)
            images = _images(labels, 1, 28, seed)
            header = np.array([0x803, count, 28, 28], dtype=">u4").tobytes()
            (raw / f"{part}-images-idx3-ubyte").write_bytes(header + images.tobytes())
            header = np.array([0x801, count], dtype=">u4").tobytes()
            (raw / f"{part}-labels-idx1-ubyte").write_bytes(header + labels.astype(np.uint8).tobytes())


def _cifar(place: Path) -> None:
    def rows(labels: NDArray[np.int64], *before: Bytes) -> bytes:
        images = _images(labels, 3, 32, 2).reshape(len(labels), -1)
        return np.column_stack([*before, labels.astype(np.uint8), images]).tobytes()

    ten = place / "cifar-10-batches-bin"
    ten.mkdir()
    for batch in range(1, 6):
        (ten / f"data_batch_{batch}.bin").write_bytes(rows(_labels(240, 10)))
    (ten / "test_batch.bin").write_bytes(rows(_labels(240, 10)))
    hundred = place / "cifar-100-binary"
    hundred.mkdir()
    for part in ("train", "test"):
        labels = _labels(1200, 100)
        (hundred / f"{part}.bin").write_bytes(rows(labels, (labels // 5).astype(np.uint8)))


def _femnist(place: Path) -> None:
    """Every writer wrote every character once, the last ones some characters twice."""
    labels = np.concatenate([_labels(62 + writer // 2, 62) for writer in range(_WRITERS)])
    offsets = np.cumsum([0, *(62 + writer // 2 for writer in range(_WRITERS))])
    images = 255 - _images(labels, 1, 28, 3)[:, 0]
    cuts = np.array([0, 10, 20, 30, _WRITERS])
    (place / "femnist").mkdir()
    np.savez(
        place / "femnist" / "index.npz",
        labels=labels.astype(np.uint8),
        writer_offsets=offsets,
        writer_ids=np.array([f"f{writer:04d}_00" for writer in range(_WRITERS)]),
        part_writers=cuts,
    )
    for part, (begin, end) in enumerate(zip(offsets[cuts[:-1]], offsets[cuts[1:]], strict=True)):
        with lzma.open(place / "femnist" / f"images_{part}.npy.xz", "wb", preset=0) as file:
            np.save(file, images[begin:end])


def _vehicle(place: Path) -> None:
    draw, sensors = generator(4), 23
    x = draw.standard_normal((20 * sensors, 100))
    (place / "vehicle").mkdir()
    np.savez(
        place / "vehicle" / "vehicle_1860.npz",
        x=x,
        y=np.where(x[:, 0] > 0, 1, -1).astype(np.int8),
        offsets=np.arange(0, 20 * sensors + 1, 20),
        users=np.array([f"f_{sensor:05d}" for sensor in range(sensors)]),
    )


def _movielens(place: Path) -> None:
    draw = generator(5)
    rated = [draw.permutation(_ITEMS)[:_RATED] + 1 for _ in range(_VIEWERS)]
    rest = [np.setdiff1d(np.arange(1, _ITEMS + 1), items) for items in rated]
    (place / "movielens1m").mkdir()
    np.savez(
        place / "movielens1m" / "ratings.npz",
        user=np.repeat(np.arange(1, _VIEWERS + 1), _RATED).astype(np.uint16),
        item=np.concatenate(rated).astype(np.uint16),
        rating=draw.integers(1, 6, _VIEWERS * _RATED).astype(np.uint8),
    )
    np.savez(
        place / "movielens1m" / "leave_latest_out.npz",
        latest_item=np.array([items[-1] for items in rated], dtype=np.int32),
        timestamp=np.arange(_VIEWERS, dtype=np.int64),
        negatives=np.array([items[:99] for items in rest], dtype=np.int32),
    )
    users = [
        f"{n + 1}::{'FM'[n % 2]}::{(1, 18, 25, 35)[n % 4]}::{n % 21}::{10000 + n}" for n in range(_VIEWERS)
    ]
    (place / "movielens1m" / "users.dat").write_text("\n".join(users) + "\n", encoding="latin-1")
    movies = [f"{n + 1}::Film {n + 1} (1999)::Drama" for n in range(_ITEMS)]
    (place / "movielens1m" / "movies.dat").write_text("\n".join(movies) + "\n", encoding="latin-1")


def _shakespeare(place: Path) -> None:
    """Two plays in the layout of Project Gutenberg's complete works."""
    roles = ("KING", "QUEEN", "FOOL", "LORD")
    plays = []
    for year, title in ((1601, "THE FIRST PLAY"), (1602, "THE SECOND PLAY")):
        speeches = [
            f"  {roles[turn % 4]}. What says the {roles[(turn + 1) % 4].lower()} of this, my lord, and of\n"
            f"    the matter that we spoke of in the morning, number {turn}?"
            for turn in range(40)
        ]
        plays.append(
            f"{year}\n\n{title}\n\nby William Shakespeare\n\n\n" + "\n".join(speeches) + "\n\nTHE END\n"
        )
    (place / "shakespeare").mkdir()
    with lzma.open(place / "shakespeare" / "raw_data.txt.xz", "wt", encoding="utf-8", preset=0) as file:
        file.write("\n\n\n".join(plays))
