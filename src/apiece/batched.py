"""What `vmap` computes with, as it lies in memory: one tensor for all clients, an axis of them in it."""

from __future__ import annotations

import torch
from torch import Tensor


def physical(tensor: Tensor) -> tuple[Tensor, int | None]:
    """The tensor that lies in memory, and which of its axes is that of clients."""
    if not torch._C._functorch.is_batchedtensor(tensor):
        return tensor, None
    return torch._C._functorch.get_unwrapped(tensor), torch._C._functorch.maybe_get_bdim(tensor)


def clients_of(*tensors: Tensor) -> int | None:
    """How many clients the tensors are of; None: of one, or of none in particular."""
    sizes = (found.shape[axis] for found, axis in map(physical, tensors) if axis is not None)
    return next(sizes, None)


def clients_first(tensor: Tensor, clients: int) -> Tensor:
    """The tensor that lies in memory, clients along its first axis; one that is everybody's, for each."""
    found, axis = physical(tensor)
    return found.expand(clients, *found.shape) if axis is None else found.movedim(axis, 0)


def each_client(tensor: Tensor) -> Tensor:
    """Inside `vmap`: what lies in memory, clients first, as one client's."""
    level = torch._C._functorch.peek_interpreter_stack().level()
    found: Tensor = torch._C._functorch._add_batch_dim(tensor, 0, level)
    return found
