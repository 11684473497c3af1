"""What `vmap` computes with, as it lies in memory: one tensor for all clients, an axis of them in it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._C._functorch import TransformType
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack


def levels() -> list[TransformType]:
    """The transformations that are being computed under, outermost first."""
    return [level.key() for level in torch._C._functorch.get_interpreter_stack() or ()]


def innermost() -> int:
    """The level of the transformation that is being computed under."""
    level: int = torch._C._functorch.peek_interpreter_stack().level()
    return level


def physical(tensor: Tensor) -> tuple[Tensor, int | None]:
    """The tensor that lies in memory, and which of its axes is that of clients."""
    if not torch._C._functorch.is_batchedtensor(tensor):
        return tensor, None
    return torch._C._functorch.get_unwrapped(tensor), torch._C._functorch.maybe_get_bdim(tensor)


def on_host(tensor: Tensor) -> bool:
    """Does it lie where its numbers can be read at once? For those on a GPU the host would have to wait."""
    return tensor.device.type == "cpu"


def memory(tensor: Tensor) -> int:
    """What the tensor lies in: the same number for tensors that one write may change."""
    place: int = physical(tensor)[0].untyped_storage()._cdata
    return place


def clients_of(*tensors: Tensor) -> int | None:
    """How many clients the tensors are of; None: of one, or of none in particular."""
    sizes = (found.shape[axis] for found, axis in map(physical, tensors) if axis is not None)
    return next(sizes, None)


def clients_first(tensor: Tensor, clients: int) -> Tensor:
    """The tensor that lies in memory, clients along its first axis; one that is everybody's, for each."""
    found, axis = physical(tensor)
    return found.expand(clients, *found.shape) if axis is None else found.movedim(axis, 0)


def each_client(tensor: Tensor, level: int | None = None) -> Tensor:
    """What lies in memory, clients first, as one client's inside the `vmap` of that level: the innermost."""
    found: Tensor = torch._C._functorch._add_batch_dim(tensor, 0, innermost() if level is None else level)
    return found


def first_clients(tensor: Tensor, clients: int, few: int, level: int) -> Tensor:
    """Of a tensor of the clients of that level, so many, the first few's; any other as it is."""
    whole, axis = physical(tensor)
    if axis is None or whole.shape[axis] != clients or torch._C._functorch.maybe_get_level(tensor) != level:
        return tensor
    if innermost() == level:
        return each_client(whole.movedim(axis, 0)[:few], level)
    with temporarily_clear_interpreter_stack():  # what is computed under a gradient would be the gradient's
        rows = whole.movedim(axis, 0)[:few]
    return each_client(rows, level)
