"""Sequential: one client after another. For debugging, and for conv nets on a CPU."""

from __future__ import annotations

from collections.abc import Callable

import torch

from apiece import tree
from apiece.engines.base import Engine
from apiece.tree import Tree


class Sequential(Engine):
    """Chunks of one client, so nothing is ever padded."""

    name = "sequential"

    def __init__(self, device: torch.device) -> None:
        super().__init__(device, limit=1)

    def each(self, fn: Callable[..., Tree], arguments: tuple[Tree, ...]) -> Tree:
        count = tree.leaves(arguments)[0].shape[0]
        return tree.stack([fn(*tree.take(arguments, i)) for i in range(count)])
