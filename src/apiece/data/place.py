"""The data folder: where the files of datasets lie, and what was made of them once.

It is `data_dir` of the experiment, else what the environment variable APIECE_DATA says, else ~/.cache/apiece.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apiece.errors import ApieceError

log = logging.getLogger("apiece")

VARIABLE = "APIECE_DATA"
DEFAULT = Path("~/.cache/apiece")
CACHE = ".apiece"

Arrays = Mapping[str, NDArray[Any]]


def data_folder(data_dir: str = "") -> Path:
    return Path(data_dir or os.environ.get(VARIABLE) or DEFAULT).expanduser()


def missing(what: str, folder: Path, layouts: Sequence[str], source: str) -> ApieceError:
    """The error for a dataset whose files are not in the data folder."""
    return ApieceError(
        f"{what} is not in the data folder {folder}: looked for {', or '.join(layouts)}. {source} "
        f"(--data-dir or {VARIABLE} names another data folder.)"
    )


def cached(folder: Path, name: str, sources: Sequence[Path], make: Callable[[], Arrays]) -> Arrays:
    """What `make` gives, kept in the data folder as .npy files and mapped into memory from then on.

    It is made again when the size or the time of one of the `sources` changes.
    """
    facts = [(path.name, (held := path.stat()).st_size, held.st_mtime_ns) for path in sources]
    digest = hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
    place = folder / CACHE / f"{name}-{digest}"
    if not place.exists():
        arrays = make()
        try:
            _write(place, arrays)
        except OSError as error:
            log.warning(
                "%s is not kept for the next time: %s: %s", name, error.filename or place, error.strerror
            )
            return arrays
    # Copy on write: PyTorch takes no arrays that it could not write to.
    return {path.stem: np.load(path, mmap_mode="c", allow_pickle=False) for path in place.glob("*.npy")}


def _write(place: Path, arrays: Arrays) -> None:
    """The whole folder or nothing: whoever is second finds it there."""
    place.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix="draft-", dir=place.parent))
    try:
        for name, array in arrays.items():
            np.save(draft / f"{name}.npy", array, allow_pickle=False)
        draft.chmod(0o755)  # a data folder may be shared
        try:
            draft.rename(place)
        except OSError:
            if not place.exists():
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
