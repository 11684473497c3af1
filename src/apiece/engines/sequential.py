"""Sequential: one client after another. For debugging, and for conv nets on a CPU."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from apiece import tree
from apiece.engines.base import Engine, Known, Program
from apiece.shard import Rows
from apiece.tree import Tree


class Sequential(Engine):
    """Clients are computed without padding: a chunk is one client, or its clients' padding is cut off."""

    name = "sequential"

    def __init__(self, device: torch.device, limit: int = 1) -> None:
        super().__init__(device, limit)

    def each(self, program: Program, shared: Tree, clients: tuple[Tree, ...]) -> Tree:
        count = tree.leaves(clients)[0].shape[0]
        alone, each = program, [tree.take(clients, i) for i in range(count)]
        if count > 1:
            alone = replace(program, shards=(Known(True),) * len(program.shards))
            each = [_cut(one) for one in each]
        answers = [alone(shared, *one) for one in each]
        together = tree.map(_stacked, *answers) if count > 1 else tree.map(lambda leaf: leaf[None], *answers)
        return program.finish(together, clients)


def _stacked(*leaf: Tensor) -> Tensor:
    """Values for each example are padded, as those of clients computed together."""
    if len({one.shape for one in leaf}) == 1:
        return torch.stack(leaf)
    return pad_sequence(list(leaf), batch_first=True)


def _cut(client: tuple[Tree, ...]) -> tuple[Tree, ...]:
    """One client, its rows as many as they are."""
    return tuple(
        part._replace(place=part.place[: int(part.size)]) if isinstance(part, Rows) else part
        for part in client
    )
