"""CUDA graphs: a chunk's program is recorded once and replayed with the numbers of every later round.

The first call of a program runs it plainly, which also warms the libraries up; the second one records it.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Hashable
from typing import NamedTuple

import torch
from torch import Tensor

from apiece import tree
from apiece.engines.base import Program
from apiece.engines.vectorized import Vectorized
from apiece.tree import Tree

log = logging.getLogger("apiece")

MOST_GRAPHS = 64


class _Recording(NamedTuple):
    program: Program  # kept alive: the key speaks of its objects by id
    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    outputs: Tree


class Captured(Vectorized):
    """Vectorized on a CUDA device, replayed: no Python and no launches between a chunk's kernels."""

    def __init__(self, device: torch.device, limit: int) -> None:
        super().__init__(device, limit)
        self._met: dict[Hashable, Program] = {}
        self._recordings: OrderedDict[Hashable, _Recording] = OrderedDict()
        self._pool = torch.cuda.graph_pool_handle()
        self.captures = 0

    def each(self, program: Program, shared: Tree, clients: tuple[Tree, ...]) -> Tree:
        given = (shared, clients)
        key = (program.key, _signature(given), torch.backends.cuda.matmul.allow_tf32)
        if key not in self._met:
            self._met[key] = program
            return super().each(program, shared, clients)
        if key not in self._recordings:
            self._recordings[key] = self._record(program, given)
            if len(self._recordings) > MOST_GRAPHS:
                self._recordings.popitem(last=False)
        self._recordings.move_to_end(key)
        recording = self._recordings[key]
        torch._foreach_copy_(recording.inputs, tree.tensors(given))
        recording.graph.replay()
        # The next replay overwrites the outputs.
        return tree.map(torch.clone, recording.outputs)

    def _record(self, program: Program, given: tuple[Tree, tuple[Tree, ...]]) -> _Recording:
        begin = time.perf_counter()
        held = tree.map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, given)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            outputs = super().each(program, *held)
        self.captures += 1
        seconds = time.perf_counter() - begin
        log.info("CUDA graph %d: %s recorded in %.2f s", self.captures, program.fn.__name__, seconds)
        return _Recording(program, graph, tree.tensors(held), outputs)


def _signature(given: Tree) -> Hashable:
    """Shapes and types of the tensors, values of all else: what a recording is fixed to."""
    return tuple(
        (path, tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else (path, leaf)
        for path, leaf in tree.flatten(given).items()
    )
