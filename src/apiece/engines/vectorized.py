"""Vectorized: a chunk of clients as one program, the whole client function under `vmap`."""

from __future__ import annotations

from torch.func import vmap

from apiece.engines.base import Engine, Program
from apiece.tree import Tree


class Vectorized(Engine):
    """Shorter clients are padded to the longest of their chunk."""

    name = "vectorized"
    overhead = 12.0

    def each(self, program: Program, shared: Tree, clients: tuple[Tree, ...]) -> Tree:
        answers = vmap(lambda *client: program(shared, *client))(*clients)
        return program.finish(answers, clients)
