"""Sequential: one client after another. For debugging, and for conv nets on a CPU."""

from __future__ import annotations

import torch

from apiece import tree
from apiece.engines.base import Engine, Program
from apiece.tree import Tree


class Sequential(Engine):
    """Chunks of one client, so nothing is ever padded."""

    name = "sequential"

    def __init__(self, device: torch.device) -> None:
        super().__init__(device, limit=1)

    def each(self, program: Program, shared: Tree, clients: tuple[Tree, ...]) -> Tree:
        count = tree.leaves(clients)[0].shape[0]
        answers = tree.stack([program(shared, *tree.take(clients, i)) for i in range(count)])
        return program.finish(answers, clients)
