"""Store: the clients' states, each row committed by round.

On disk every client has two slots with round tags, so the rows of the last two checkpoints both stand:
a commit writes the touched clients' newer slot and leaves the other. Whatever a kill leaves behind, opening
at a checkpoint's round drops the slots with later tags. Between commits new rows live in memory: all rows
(`mapped=False`), or only those touched since the last commit.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from apiece import tree
from apiece.tree import Tree

SLOTS = 2


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
        self._touched: dict[int, Tree] = {}
        self._known = np.zeros(population, dtype=bool)
        self._resident: Tree = None
        if not mapped:
            self._resident = tree.map(
                lambda t: torch.zeros((population, *t.shape), dtype=t.dtype, device=device), template
            )
        self._folder = folder
        self._tags: NDArray[np.int64] | None = None
        self._slots: NDArray[np.uint8] | None = None

    @property
    def stateful(self) -> bool:
        return bool(self._shapes)

    def open(self, round: int, writable: bool = True) -> None:
        """Go to the state of the checkpoint at `round` (0: no client has been met)."""
        self.forget()
        if self._folder is None or not self.stateful:
            return
        population, width = len(self._known), sum(size for _, _, size in self._shapes)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._tags = _mapped(self._folder / "clients.tags", np.int64, (population, SLOTS))
        self._slots = _mapped(self._folder / "clients.rows", np.uint8, (population, SLOTS, width))
        if not writable:
            self._tags = np.array(self._tags)
        self._tags[self._tags > round] = 0
        self._known[:] = self._tags.max(axis=1) > 0
        if not self.mapped:
            met = np.flatnonzero(self._known)
            if len(met):
                self._scatter(met, self._read(met))

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
        if not self.mapped:
            return tree.take(self._resident, torch.as_tensor(list(ids), device=self.device))
        rows = self._read(np.asarray(ids))
        held = [(at, self._touched[i]) for at, i in enumerate(ids) if i in self._touched]
        for at, row in held:
            tree.map(lambda leaf, new, at=at: leaf[at].copy_(new), rows, row)
        return tree.to(rows, self.device)

    def put(self, ids: Sequence[int], states: Tree) -> None:
        """New states, provisional until `commit`."""
        if not self.stateful:
            return
        self._known[list(ids)] = True
        if self.mapped:
            states = tree.to(states, "cpu")
            self._touched.update({i: tree.take(states, at) for at, i in enumerate(ids)})
        else:
            self._touched.update(dict.fromkeys(ids))
            self._scatter(np.asarray(ids), states)

    def commit(self, round: int) -> None:
        """Write the rows touched since the last commit, tagged with the checkpoint's round."""
        if self._tags is None or self._slots is None or not self._touched:
            return
        ids = np.array(sorted(self._touched), dtype=np.int64)
        older = self._tags[ids].argmin(axis=1)
        rows = self._bytes(tree.to(self.get(ids.tolist()), "cpu"), len(ids))
        # A slot is invalid while it is written: a kill in between leaves no half-written row behind a tag.
        self._tags[ids, older] = 0
        self._slots[ids, older] = rows
        self._flush(self._slots)
        self._tags[ids, older] = round
        self._flush(self._tags)
        self._touched.clear()

    @staticmethod
    def _flush(array: NDArray) -> None:
        assert isinstance(array, np.memmap)
        array.flush()

    def _scatter(self, ids: NDArray[np.int64], states: Tree) -> None:
        index = torch.as_tensor(ids, device=self.device)
        tree.map(lambda mine, new: mine.index_copy_(0, index, new.to(mine)), self._resident, states)

    def _read(self, ids: NDArray[np.int64]) -> Tree:
        """The newest rows on disk, as CPU tensors; zeros where nothing is on disk yet."""
        if self._tags is None or self._slots is None:
            return tree.map(lambda t: torch.zeros((len(ids), *t.shape), dtype=t.dtype), self.template)
        newest = self._tags[ids].argmax(axis=1)
        raw = np.asarray(self._slots[ids, newest])
        values, start = {}, 0
        for name, (shape, dtype, size) in zip(tree.flatten(self.template), self._shapes, strict=True):
            part = torch.from_numpy(raw[:, start : start + size].copy())
            values[name] = part.view(dtype).reshape(len(ids), *shape)
            start += size
        return tree.restore(self.template, values)

    @staticmethod
    def _bytes(states: Tree, count: int) -> NDArray[np.uint8]:
        parts = [
            leaf.contiguous().reshape(count, -1).view(torch.uint8).numpy() for leaf in tree.leaves(states)
        ]
        return np.concatenate(parts, axis=1)


def _mapped(path: Path, dtype: Any, shape: tuple[int, ...]) -> NDArray[Any]:
    """A zero-filled file of that shape, sparse until written, or the one already there."""
    return np.memmap(path, dtype=dtype, mode="r+" if path.exists() else "w+", shape=shape)
