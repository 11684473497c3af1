"""Messages to processes that compute: pickled, but for their tensors, which lie side by side in a room.

Only what this package sent itself is ever read back.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from apiece.errors import ApieceError

RESIDENT, BOARD, SLOT = "resident", "board", "slot"  # where tensors are: theirs, a phase's, a call's own

ALIGNMENT = 64  # bytes, as in PyTorch's own memory: there are kernels whose bits depend on it
LEAST = 1 << 16


class Room:
    """Memory that grows; tensors are put into it one behind the other."""

    def __init__(self, bytes: Tensor | None = None) -> None:
        self.end = 0
        self._bytes = torch.empty(0, dtype=torch.uint8) if bytes is None else bytes

    @property
    def used(self) -> Tensor:
        """The bytes of what was put here."""
        return self._bytes[: self.end]

    def put(self, tensor: Tensor) -> tuple[Any, ...]:
        """Copy a tensor behind the others; where `get` finds it."""
        place = (self.end, tensor.dtype, tuple(tensor.shape))
        self.get(*place).copy_(tensor)
        self.end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        return place

    def get(self, begin: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """The tensor that lies there; what is put there later is seen through it."""
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        end = begin + -(-nbytes // ALIGNMENT) * ALIGNMENT
        if end > len(self._bytes):
            self._bytes = self._with_room_for(end)
        return self._bytes[begin : begin + nbytes].view(dtype).view(shape)

    def _with_room_for(self, end: int) -> Tensor:
        larger = torch.empty(enough(end), dtype=torch.uint8, device=self._bytes.device)
        larger[: len(self._bytes)] = self._bytes
        return larger


def enough(end: int) -> int:
    return max(LEAST, 1 << (end - 1).bit_length())


class Posted(NamedTuple):
    """A tensor that is not sent with each call: the others have it, or find it on the board."""

    tensor: Tensor  # kept alive: it is known by its id
    place: tuple[Any, ...]


class _Packer(pickle.Pickler):
    """Tensors are put into a room, unless they are posted."""

    def __init__(self, file: io.BytesIO, room: Room, posted: Mapping[int, Posted]) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._room, self._posted = room, posted

    def persistent_id(self, thing: object) -> tuple[Any, ...] | None:
        if not isinstance(thing, Tensor):
            return None
        posted = self._posted.get(id(thing))
        return (SLOT, *self._room.put(thing)) if posted is None else posted.place


class _Unpacker(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, rooms: Mapping[str, Room], resident: Sequence[Tensor]) -> None:
        super().__init__(file)
        self._rooms, self._resident = rooms, resident

    def persistent_load(self, place: tuple[Any, ...]) -> Tensor:
        kind, *rest = place
        return self._resident[rest[0]] if kind == RESIDENT else self._rooms[kind].get(*rest)


def packed(things: Any, room: Room, posted: Mapping[int, Posted] | None = None) -> bytes:
    file = io.BytesIO()
    try:
        _Packer(file, room, posted or {}).dump(things)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ApieceError(
            f"the engine cannot send this to another process: {error}. "
            f"Define the classes of states and messages at the top of a module."
        ) from error
    return file.getvalue()


def unpacked(message: bytes, rooms: Mapping[str, Room], resident: Sequence[Tensor] = ()) -> Any:
    return _Unpacker(io.BytesIO(message), rooms, resident).load()
