"""Store: the clients' states, each row committed by round.

On disk every client has two slots with round tags, so the rows of the last two checkpoints both stand:
a commit writes the touched clients' newer slot and leaves the other. Whatever a kill leaves behind, opening
at a checkpoint's round drops the slots with later tags. Between commits new rows live in memory: all rows
(`mapped=False`), or only those touched since the last commit.

The files are sparse: clients never met take no room. They are read and written at the places asked for and
not mapped into memory: pages of a mapping would count as the process's memory for as long as it lives, a
full disk would end it with a signal, and on tmpfs a hole that is looked at takes room.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from apiece import tree
from apiece.data.arena import placed
from apiece.errors import ApieceError
from apiece.tree import Tree

SLOTS = 2
BLOCK = 1 << 16  # clients whose tags are read at once
ROWS = 256  # clients whose rows are copied at once

Bytes = NDArray[np.uint8]
Ints = NDArray[np.int64]


class Store:
    """Rows of a `population` of clients, all shaped like `template` (meta tensors)."""

    def __init__(
        self, template: Tree, population: int, device: torch.device, folder: Path | None, mapped: bool
    ) -> None:
        if mapped and folder is None:
            raise ValueError("a mapped store needs a folder")
        self.template = template
        self.device = device
        self.mapped = mapped
        self._shapes = [(t.shape, t.dtype, t.numel() * t.element_size()) for t in tree.leaves(template)]
        self._width = sum(size for _, _, size in self._shapes)
        self._known = np.zeros(population, dtype=bool)
        self._resident: Tree = None  # all rows, once there is one
        self._touched: dict[int, Bytes | None] = {}  # since the last commit; if mapped, their rows
        self._folder = folder
        self._opened: int | None = None  # the round of the last commit; None: nothing is read from disk

    @property
    def stateful(self) -> bool:
        return bool(self._shapes)

    def open(self, round: int, writable: bool = True) -> None:
        """Go to the state of the checkpoint at `round` (0: no client has been met)."""
        self.forget()
        if self.stateful and not self.mapped:
            self._all()
        if self._folder is None or not self.stateful:
            return
        self._opened = round
        for path, width in ((self._tags, SLOTS * 8), (self._rows, SLOTS * self._width)):
            size = len(self._known) * width
            if round == 0 and writable:
                self._folder.mkdir(parents=True, exist_ok=True)
                path.write_bytes(b"")
                os.truncate(path, size)
            elif not path.exists() or path.stat().st_size != size:
                raise ApieceError(f"{path} is missing or cut short: restore it, or start a new run")
        for begin in range(0, len(self._known) if round else 0, BLOCK):
            tags = np.fromfile(self._tags, np.int64, BLOCK * SLOTS, offset=begin * SLOTS * 8)
            tags = tags.reshape(-1, SLOTS)
            late = np.flatnonzero((tags > round).any(axis=1))
            tags[tags > round] = 0
            if writable and len(late):
                self._tag(begin + late, tags[late])
            self._known[begin : begin + len(tags)] = tags.any(axis=1)
        if not self.mapped:
            for ids in _some(np.flatnonzero(self._known)):
                self._scatter(ids, self._tree(self._read(ids)))

    def forget(self) -> None:
        """Drop whatever was not committed, and no longer know any client."""
        self._touched.clear()
        self._known[:] = False

    def known(self, ids: Sequence[int]) -> NDArray[np.bool_]:
        """Which clients have a state."""
        answer: NDArray[np.bool_] = self._known[list(ids)]
        return answer

    def get(self, ids: Sequence[int]) -> Tree:
        """States with a first axis of clients; of a client not known, anything."""
        if self.mapped:
            return tree.to(self._tree(self._latest(np.asarray(ids))), self.device)
        return tree.take(self._all(), placed(np.asarray(ids, dtype=np.int64), self.device))

    def put(self, ids: Sequence[int], states: Tree) -> None:
        """New states, provisional until `commit`."""
        if not self.stateful:
            return
        self._known[list(ids)] = True
        if self.mapped:
            # A row of its own for each: one that is replaced gives its memory back.
            rows = self._bytes(states, len(ids))
            self._touched.update({i: row.copy() for i, row in zip(ids, rows, strict=True)})
        else:
            self._touched.update(dict.fromkeys(ids))
            self._scatter(np.asarray(ids), states)

    def commit(self, round: int) -> None:
        """Write the rows touched since the last commit, tagged with the checkpoint's round."""
        if self._opened is None or not self._touched:
            return
        ids = np.array(sorted(self._touched), dtype=np.int64)
        tags = self._read_tags(ids)
        older = tags.argmin(axis=1)
        # A slot is invalid while it is written: a kill in between leaves no half-written row behind a tag.
        tags[np.arange(len(ids)), older] = 0
        self._tag(ids, tags, wait=False)
        latest = (row for some in _some(ids) for row in self._bytes(self.get(some.tolist()), len(some)))
        _write(self._rows, zip(self._places(ids, older), latest, strict=True))
        tags[np.arange(len(ids)), older] = round
        self._tag(ids, tags)
        self._opened = round
        self._touched.clear()

    @property
    def _tags(self) -> Path:
        assert self._folder is not None
        return self._folder / "clients.tags"

    @property
    def _rows(self) -> Path:
        assert self._folder is not None
        return self._folder / "clients.rows"

    def _places(self, ids: Ints, slots: Ints) -> list[int]:
        """Where those slots begin in the file of rows."""
        places: list[int] = ((ids * SLOTS + slots) * self._width).tolist()
        return places

    def _tag(self, ids: Ints, tags: Ints, wait: bool = True) -> None:
        _write(self._tags, zip((ids * SLOTS * 8).tolist(), tags.view(np.uint8), strict=True), wait)

    def _read_tags(self, ids: Ints) -> Ints:
        """The tags of the clients' slots, those later than the state that was opened as if empty."""
        assert self._opened is not None
        tags = _read(self._tags, (ids * SLOTS * 8).tolist(), SLOTS * 8).view(np.int64)
        tags[tags > self._opened] = 0
        return tags

    def _all(self) -> Tree:
        """All rows in memory."""
        if self._resident is None:
            count, device = len(self._known), self.device
            self._resident = tree.map(
                lambda t: torch.zeros((count, *t.shape), dtype=t.dtype, device=device), self.template
            )
        return self._resident

    def _scatter(self, ids: Ints, states: Tree) -> None:
        index = placed(ids, self.device)
        tree.map(lambda mine, new: mine.index_copy_(0, index, new.to(mine)), self._all(), states)

    def _latest(self, ids: Ints) -> Bytes:
        """The clients' rows: touched, on disk, or zeros."""
        rows = np.zeros((len(ids), self._width), dtype=np.uint8)
        held = np.array([int(i) in self._touched for i in ids], dtype=bool)
        for at in np.flatnonzero(held):
            rows[at] = self._touched[int(ids[at])]
        if self._opened is not None and not held.all():
            rows[~held] = self._read(ids[~held])
        return rows

    def _read(self, ids: Ints) -> Bytes:
        """The newest rows on disk."""
        newest = self._read_tags(ids).argmax(axis=1)
        return _read(self._rows, self._places(ids, newest), self._width)

    def _tree(self, rows: Bytes) -> Tree:
        """Rows of bytes as states."""
        values, start = {}, 0
        for name, (shape, dtype, size) in zip(tree.flatten(self.template), self._shapes, strict=True):
            part = torch.from_numpy(rows[:, start : start + size].copy())
            values[name] = part.view(dtype).reshape(len(rows), *shape)
            start += size
        return tree.restore(self.template, values)

    @staticmethod
    def _bytes(states: Tree, count: int) -> Bytes:
        """States as rows of bytes."""
        parts = [
            leaf.contiguous().reshape(count, -1).view(torch.uint8).numpy()
            for leaf in tree.leaves(tree.to(states, "cpu"))
        ]
        return np.concatenate(parts, axis=1)


def _some(ids: Ints) -> Iterator[Ints]:
    for begin in range(0, len(ids), ROWS):
        yield ids[begin : begin + ROWS]


def _read(path: Path, places: Sequence[int], width: int) -> Bytes:
    """`width` bytes from each of these places."""
    rows = np.empty((len(places), width), dtype=np.uint8)
    with path.open("rb", buffering=0) as file:
        if sys.platform == "linux":  # the disk is asked for all of them before one is waited for
            for place in places:
                os.posix_fadvise(file.fileno(), place, width, os.POSIX_FADV_WILLNEED)
        for place, row in zip(places, rows, strict=True):
            file.seek(place)
            if file.readinto(row.data) != width:
                raise OSError(errno.EIO, "cut short", str(path))
    return rows


def _write(path: Path, rows: Iterable[tuple[int, Bytes]], wait: bool = True) -> None:
    """(place, bytes) one after another; `wait` until they are on disk."""
    with path.open("r+b", buffering=0) as file:
        for place, row in rows:
            file.seek(place)
            if file.write(row.data) != len(row):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        if wait:
            os.fsync(file.fileno())
