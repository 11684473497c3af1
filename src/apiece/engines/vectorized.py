"""Vectorized: a chunk of clients as one program, the whole client function under `vmap`."""

from __future__ import annotations

from collections.abc import Sequence

from torch.func import vmap

from apiece.engines.base import Engine, Program, cut
from apiece.engines.narrowing import computed, narrowing
from apiece.local import looping
from apiece.optim import Recipe
from apiece.tree import Tree


class Vectorized(Engine):
    """Shorter clients are padded to the longest of their chunk, and leave its loops when they are done."""

    name = "vectorized"
    overhead = 12.0

    def cut(self, sizes: Sequence[int], recipe: Recipe) -> list[list[int]]:
        return cut(sizes, recipe, self.limit, self.overhead, narrowed=computed)

    def each(self, program: Program, shared: Tree, clients: tuple[Tree, ...]) -> Tree:
        with looping(narrowing):
            return mapped(program, shared, clients)


def mapped(program: Program, shared: Tree, clients: tuple[Tree, ...]) -> Tree:
    answers = vmap(lambda *client: program(shared, *client))(*clients)
    return program.finish(answers, clients)
