"""The run folder: small files written atomically, logs that can be cut back to a checkpoint."""

from __future__ import annotations

import csv
import fcntl
import io
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from apiece.checkpoint import sync
from apiece.errors import ApieceError


def write_text(path: Path, text: str) -> None:
    """Replace a file whole: a reader, or a kill, sees the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".draft")
    draft.write_text(text, encoding="utf-8")
    sync(draft)
    draft.replace(path)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, str] | None = None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".draft")
    save_file({name: t.contiguous().cpu() for name, t in tensors.items()}, draft, dict(facts or {}))
    sync(draft)
    draft.replace(path)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    write_text(path, json.dumps(value, indent=2) + "\n")


def write_csv(path: Path, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    write_text(path, csv_text([header, *rows]))


def csv_text(rows: Iterable[Sequence[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def lock(folder: Path) -> int:
    """Hold the folder until this process ends, however it ends."""
    handle = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(handle)
        raise ApieceError(f"{folder} is being run by another process: wait for it, or stop it") from error
    return handle


class Log:
    """A CSV file that grows by whole rows and can be cut back to an earlier length."""

    def __init__(self, path: Path, header: Sequence[str]) -> None:
        self._path = path
        self._header = header

    def open(self, length: int) -> None:
        """Start at `length` bytes of what is there; 0: anew, with the header."""
        self._file = self._path.open("ab")
        self._file.truncate(length)
        if not length:
            self.append([self._header])

    def append(self, rows: Iterable[Sequence[Any]]) -> None:
        self._file.write(csv_text(rows).encode())
        self._file.flush()

    def length(self) -> int:
        """Bytes so far, safely on disk."""
        os.fsync(self._file.fileno())
        return self._file.tell()
