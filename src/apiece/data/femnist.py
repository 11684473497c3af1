"""FEMNIST (Caldas et al. 2018, LEAF): handwritten characters of NIST, each writer a client.

62 classes: 0–9, A–Z (10–35), a–z (36–61); 28 × 28, grey, 255 paper and 0 ink. Three layouts are read:

- `compact`: `femnist/index.npz`, of `labels`, `writer_offsets` (writer k has the rows
  offsets[k]:offsets[k + 1]) and `writer_ids`, and `femnist/images_{0,1,…}.npy.xz`, the images of all rows in
  order, as bytes. 3,597 writers, 817,851 images.
- `leaf`: the files that LEAF's preprocess.sh makes, `femnist/train/*.json` with `femnist/test/*.json`, else
  `femnist/all_data/*.json`.
- `tff`: `femnist/fed_emnist_train.h5` and `femnist/fed_emnist_test.h5` of TensorFlow Federated: 3,400
  writers, 671,585 and 77,483 images, cropped and split otherwise than LEAF's.

Images are kept in the data folder as arrays, so that all but the first time they are read in a moment.
"""

from __future__ import annotations

import json
import lzma
import string
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from apiece.data.federated import Examples
from apiece.data.place import Arrays, cached, missing
from apiece.errors import ApieceError

LABEL_NAMES = tuple(string.digits + string.ascii_uppercase + string.ascii_lowercase)

_SIDE = 28
_SOURCE = (
    "Fetch TensorFlow Federated's with: apiece download femnist. "
    "LEAF's json files are made by its preprocess.sh (github.com/TalwalkarLab/leaf, data/femnist)."
)

Bytes = NDArray[np.uint8]


def load(folder: Path, layout: str = "") -> Examples:
    """In the layout asked for, or in the one that is there."""
    found = {name: sources for name, one in _LAYOUTS.items() if (sources := one.sources(folder / "femnist"))}
    wanted = [name for name in found if layout in ("", name)]
    if not wanted:
        looked_for = [one.form for name, one in _LAYOUTS.items() if layout in ("", name)]
        raise missing("FEMNIST", folder, looked_for, _SOURCE)
    if len(wanted) > 1:
        forms = " or ".join(f"femnist({name})" for name in wanted)
        raise ApieceError(f"{folder / 'femnist'} holds FEMNIST in more than one layout: say {forms}")
    name, sources = wanted[0], found[wanted[0]]
    held = cached(folder, f"femnist-{name}", sources, lambda: _LAYOUTS[name].read(sources))
    return Examples(
        x=held["x"],
        y=held["y"].astype(np.int64),
        classes=len(LABEL_NAMES),
        label_names=LABEL_NAMES,
        client=held["client"],
        test=held.get("test"),
    )


class _Layout(NamedTuple):
    form: str
    sources: Callable[[Path], list[Path]]  # none: it is not there
    read: Callable[[list[Path]], Arrays]


def _compact_sources(folder: Path) -> list[Path]:
    parts = sorted(folder.glob("images_*.npy.xz"), key=lambda path: (len(path.name), path.name))
    index = folder / "index.npz"
    return [index, *parts] if index.exists() and parts else []


def _read_compact(sources: list[Path]) -> Arrays:
    index, *parts = sources
    try:
        with np.load(index, allow_pickle=False) as file:
            labels, offsets, ids = (file[name] for name in ("labels", "writer_offsets", "writer_ids"))
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise ApieceError(f"{index} cannot be read: {error}") from None
    x, end = np.empty((len(labels), 1, _SIDE, _SIDE), dtype=np.uint8), 0
    for path in parts:
        try:
            with lzma.open(path) as file:
                images = np.lib.format.read_array(file, allow_pickle=False)
        except (OSError, ValueError, EOFError, lzma.LZMAError) as error:
            raise ApieceError(f"{path} cannot be read: {error}") from None
        begin, end = end, end + len(images)
        if images.shape[1:] != (_SIDE, _SIDE) or images.dtype != np.uint8 or end > len(x):
            raise ApieceError(f"{path} does not fit {index}: {images.dtype} images of shape {images.shape}")
        x[begin:end, 0] = images
    if end != len(x) or len(offsets) != len(ids) + 1 or offsets[-1] != len(x):
        raise ApieceError(f"{index} tells of {len(x)} images and {len(ids)} writers, the parts hold {end}")
    return {"x": x, "y": _labels(labels, index), "client": np.repeat(ids, np.diff(offsets))}


def _leaf_sources(folder: Path) -> list[Path]:
    train, test = sorted(folder.glob("train/*.json")), sorted(folder.glob("test/*.json"))
    return [*train, *test] if train and test else sorted(folder.glob("all_data/*.json"))


def _read_leaf(sources: list[Path]) -> Arrays:
    def shares() -> Iterator[_Share]:
        for path in sources:
            try:
                held = json.loads(path.read_bytes())["user_data"]
                for writer, data in held.items():
                    yield _Share(writer, _pixels(data["x"], path), _labels(data["y"], path), part(path))
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                raise ApieceError(f"{path} is no file of LEAF's FEMNIST: {error!r}") from None

    def part(path: Path) -> bool | None:
        return None if path.parent.name == "all_data" else path.parent.name == "test"

    return _together(shares())


def _tff_sources(folder: Path) -> list[Path]:
    paths = [folder / f"fed_emnist_{part}.h5" for part in ("train", "test")]
    return paths if all(path.exists() for path in paths) else []


def _read_tff(sources: list[Path]) -> Arrays:
    try:
        import h5py
    except ImportError:
        raise ApieceError("FEMNIST of TensorFlow Federated needs h5py: pip install apiece[tff]") from None

    def shares() -> Iterator[_Share]:
        for is_test, path in enumerate(sources):
            try:
                with h5py.File(path, "r") as file:
                    for writer, data in file["examples"].items():
                        pixels, labels = data["pixels"][()], data["label"][()]
                        yield _Share(writer, _pixels(pixels, path), _labels(labels, path), bool(is_test))
            except (OSError, KeyError, AttributeError) as error:
                raise ApieceError(f"{path} is no file of TensorFlow Federated's EMNIST: {error}") from None

    return _together(shares())


_LAYOUTS = {
    "compact": _Layout("femnist/{index.npz,images_*.npy.xz}", _compact_sources, _read_compact),
    "leaf": _Layout("femnist/{train,test}/*.json or femnist/all_data/*.json", _leaf_sources, _read_leaf),
    "tff": _Layout("femnist/fed_emnist_{train,test}.h5", _tff_sources, _read_tff),
}
LAYOUTS = tuple(_LAYOUTS)


class _Share(NamedTuple):
    """Some of a writer's examples."""

    writer: str
    x: Bytes
    y: Bytes
    test: bool | None


def _together(shares: Iterable[_Share]) -> Arrays:
    held = list(shares)
    sizes = [len(share.y) for share in held]
    arrays: dict[str, NDArray[Any]] = {
        "x": np.concatenate([share.x for share in held]),
        "y": np.concatenate([share.y for share in held]),
        "client": np.repeat([share.writer for share in held], sizes),
    }
    if held[0].test is not None:
        arrays["test"] = np.repeat([share.test is True for share in held], sizes)
    return arrays


def _pixels(values: Any, path: Path) -> Bytes:
    """From shares of 1 to bytes, exact where the shares were made of bytes."""
    shares = np.asarray(values, dtype=np.float64).reshape(-1, 1, _SIDE, _SIDE)
    if not ((shares >= 0.0) & (shares <= 1.0)).all():
        raise ApieceError(f"{path}: a pixel does not lie between 0 and 1")
    return np.rint(shares * 255.0).astype(np.uint8)


def _labels(values: Sequence[int] | NDArray[Any], path: Path) -> Bytes:
    labels = np.asarray(values)
    if len(labels) and not (labels.min() >= 0 and labels.max() < len(LABEL_NAMES)):
        raise ApieceError(f"{path}: a label does not lie between 0 and {len(LABEL_NAMES) - 1}")
    return labels.astype(np.uint8)
