"""Vehicle (Duarte and Hu 2004): 23 acoustic and seismic sensors tell two kinds of vehicles apart.

100 features, one client per sensor. Read are, under `vehicle/`:

- `vehicle.mat`, the whole set of 43,695 examples as Smith et al. 2017 hand it out: cells X and Y, one per
  sensor. Each sensor's features are standardised here, as Li et al. 2020 (q-FFL) do.
- else `vehicle_1860.npz`, a part of 1,860 examples, standardised already: `x`, `y` (−1 or 1), `offsets`
  (the rows of sensor k are offsets[k]:offsets[k + 1]) and `users`, the sensors' names.
"""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from apiece.data.federated import Examples
from apiece.data.place import missing
from apiece.errors import ApieceError

Floats = NDArray[np.float64]


def load(folder: Path) -> Examples:
    """The sensors of the data folder `folder`, of `vehicle.mat` if it is there."""
    whole, part = folder / "vehicle" / "vehicle.mat", folder / "vehicle" / "vehicle_1860.npz"
    if whole.exists():
        return _from_mat(whole)
    if part.exists():
        return _from_npz(part)
    raise missing(
        "Vehicle",
        folder,
        ("vehicle/vehicle.mat", "vehicle/vehicle_1860.npz"),
        "The q-FFL code (litian96/fair_flearn, data/vehicle) says where vehicle.mat is.",
    )


def _from_mat(path: Path) -> Examples:
    from scipy.io import loadmat  # type: ignore[import-untyped]
    from scipy.io.matlab import MatReadError  # type: ignore[import-untyped]

    try:
        cells = loadmat(path, variable_names=("X", "Y"))
        x = [np.asarray(cell, dtype=np.float64) for cell in cells["X"].ravel()]
        y = [np.asarray(cell, dtype=np.int64).ravel() for cell in cells["Y"].ravel()]
    except (OSError, ValueError, TypeError, KeyError, NotImplementedError, MatReadError) as error:
        raise ApieceError(f"{path} does not hold cells X and Y as vehicle.mat does: {error}") from None
    if [len(part) for part in x] != [len(part) for part in y]:
        raise ApieceError(f"{path}: X and Y have unequal numbers of examples")
    # As the q-FFL code calls the sensors, and the part of 1,860 examples too.
    names = [f"f_{sensor:05d}" for sensor in range(len(x))]
    return _examples(path, [_standardised(part) for part in x], np.concatenate(y), names)


def _from_npz(path: Path) -> Examples:
    try:
        with np.load(path, allow_pickle=False) as file:
            x, y, offsets, names = (file[name] for name in ("x", "y", "offsets", "users"))
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise ApieceError(f"{path} cannot be read: {error}") from None
    return _examples(path, np.split(x, offsets[1:-1]), y, [str(name) for name in names])


def _examples(path: Path, parts: list[Floats], y: NDArray[np.integer], names: list[str]) -> Examples:
    if not np.isin(y, (-1, 1)).all():
        raise ApieceError(f"{path}: the labels must be −1 and 1")
    x, client = np.concatenate(parts), np.repeat(names, [len(part) for part in parts])
    return Examples(x.astype(np.float32), (y > 0).astype(np.int64), 2, ("-1", "1"), client)


def _standardised(x: Floats) -> Floats:
    """Mean 0 and deviation 1 in every feature; 0 where it does not vary."""
    deviation = x.std(axis=0)
    scaled: Floats = (x - x.mean(axis=0)) / np.where(deviation > 0, deviation, 1.0)
    return scaled
