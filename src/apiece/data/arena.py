"""Arena: room on a device for some examples, that others take when these are done with.

On CUDA nobody waits for a copy: it queues up behind what reads the examples that were there, and what reads
the new ones queues up behind it. So an arena may be filled again as soon as all that reads it is queued on
the current stream, or on another that the current stream has been told to wait for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from apiece import tree
from apiece.tree import Tree

AHEAD = 2  # copies under way at the most: what they read is locked in the host's memory


class Arena:
    """The same tensors for one filling after another, for recorded graphs read from where they lie."""

    def __init__(self) -> None:
        self._room: dict[Hashable, Tree] = {}  # by what an example looks like
        self._copies: deque[torch.cuda.Event] = deque()

    def filled(self, examples: Tree, rows: NDArray[np.int64], device: torch.device) -> Tree:
        """The rows of host tensors, first in tensors on the device whose last row is padding.

        What lies between is of earlier fillings, and nobody's.
        """
        looks = tuple((path, leaf.dtype, leaf.shape[1:]) for path, leaf in tree.flatten(examples).items())
        kind = (str(device), looks)
        room = self._room.get(kind)
        if room is None or len(tree.leaves(room)[0]) <= len(rows):
            # Doubled: recordings keep what was too small, all of it together no more than what is in use.
            room = self._room[kind] = _empty(examples, _power_of_two(len(rows)), device)
        while len(self._copies) >= AHEAD:
            self._copies.popleft().synchronize()
        _copy(examples, rows, room)
        if device.type == "cuda":
            self._copies.append(torch.cuda.current_stream(device).record_event())
        return room


def copied(examples: Tree, rows: NDArray[np.int64], device: torch.device) -> Tree:
    """The rows of host tensors and a row of padding, in tensors of their own on the device."""
    room = _empty(examples, len(rows), device)
    _copy(examples, rows, room)
    return room


def placed(array: NDArray[Any], device: torch.device) -> Tensor:
    """An array on the device, without waiting for what the device is doing."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def _empty(examples: Tree, count: int, device: torch.device) -> Tree:
    """Room for so many rows and the padding: zeros."""

    def made(leaf: Tensor) -> Tensor:
        return torch.zeros((count + 1, *leaf.shape[1:]), dtype=leaf.dtype, device=device)

    return tree.map(made, examples)


def _copy(examples: Tree, rows: NDArray[np.int64], room: Tree) -> None:
    """The rows into the first places of the room."""
    index = torch.from_numpy(rows)

    def copy(leaf: Tensor, into: Tensor) -> Tensor:
        if into.device.type != "cuda":
            return torch.index_select(leaf, 0, index, out=into[: len(rows)])
        # Pinned memory that is let go here is handed out again only when the copy is over.
        pinned = torch.empty((len(rows), *leaf.shape[1:]), dtype=leaf.dtype, pin_memory=True)
        torch.index_select(leaf, 0, index, out=pinned)
        return into[: len(rows)].copy_(pinned, non_blocking=True)

    tree.map(copy, examples, room)


def _power_of_two(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()
