"""Vectorized: a chunk of clients as one program, the whole client function under `vmap`."""

from __future__ import annotations

from collections.abc import Callable

from torch.func import vmap

from apiece.engines.base import Engine
from apiece.tree import Tree


class Vectorized(Engine):
    """Shorter clients are padded to the longest of their chunk."""

    name = "vectorized"

    def each(self, fn: Callable[..., Tree], arguments: tuple[Tree, ...]) -> Tree:
        return vmap(fn)(*arguments)
