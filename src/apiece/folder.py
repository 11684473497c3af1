"""The run folder: small files written atomically, logs that can be cut back to a checkpoint."""

from __future__ import annotations

import csv
import fcntl
import io
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor

from apiece.checkpoint import sync
from apiece.errors import ApieceError


def _write(path: Path, content: bytes) -> None:
    """Replace a file whole: a reader, or a kill, sees the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".draft")
    draft.write_bytes(content)
    sync(draft)
    draft.replace(path)


def write_text(path: Path, text: str) -> None:
    _write(path, text.encode())


def write_tensors(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, str] | None = None) -> None:
    _write(path, save({name: t.contiguous().cpu() for name, t in tensors.items()}, dict(facts or {})))


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    write_text(path, json_text(value))


def json_text(value: Any) -> str:
    """JSON that any program reads: there is no NaN in it, so what has no value is null."""

    def plain(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: plain(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [plain(item) for item in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(plain(value), indent=2, allow_nan=False) + "\n"


def write_csv(path: Path, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    write_text(path, csv_text([header, *rows]))


def csv_text(rows: Iterable[Sequence[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder; a process that ends, however it ends, holds it no longer."""
    handle = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ApieceError(f"{folder} is being run by another process: wait for it, or stop it") from error
        yield
    finally:
        os.close(handle)


class Log:
    """A CSV file that grows by whole rows and can be cut back to an earlier length."""

    def __init__(self, path: Path, header: Sequence[str]) -> None:
        self._path = path
        self._header = header

    def open(self, length: int) -> None:
        """Start at `length` bytes of what is there; 0: anew, with the header."""
        if not length:
            self._path.write_text(csv_text([self._header]), encoding="utf-8")
            return
        if not self._path.exists() or self._path.stat().st_size < length:
            raise ApieceError(f"{self._path} is missing or shorter than at the last checkpoint: restore it")
        os.truncate(self._path, length)

    def append(self, rows: Iterable[Sequence[Any]]) -> None:
        with self._path.open("a", encoding="utf-8", newline="") as file:
            file.write(csv_text(rows))

    def length(self) -> int:
        """Bytes so far, safely on disk."""
        sync(self._path)
        return self._path.stat().st_size
