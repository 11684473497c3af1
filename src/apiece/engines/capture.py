"""CUDA graphs: a chunk's program is recorded once and replayed with the numbers of every later round.

The first call of a program runs it plainly, which also warms the libraries up; the next ones record it, once
for each number of clients.
Shapes are rounded up, so that few recordings serve all chunks: clients that nobody is, rows that are padding.
"""

from __future__ import annotations

import logging
import math
import time
import warnings
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from apiece import tree
from apiece.data.federated import Federated
from apiece.engines.base import Program, ceiling
from apiece.engines.vectorized import Vectorized
from apiece.shard import Rows
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

    overhead = 5.0

    def __init__(self, device: torch.device, limit: int) -> None:
        super().__init__(device, limit)
        self._met: dict[Hashable, Program] = {}
        self._recordings: OrderedDict[Hashable, _Recording] = OrderedDict()
        self._pool = torch.cuda.graph_pool_handle()
        self.captures = 0

    def each(self, program: Program, shared: Tree, clients: tuple[Tree, ...]) -> Tree:
        if isinstance(program.federation.data, Federated) and not program.federation.data.lasting:
            # A recording would hold on to examples that are made for this cohort alone.
            return super().each(program, shared, clients)
        count = tree.leaves(clients)[0].shape[0]
        program, clients = _rounded(program, clients, ceiling(count, digits=4))
        answers = self._replayed(program, shared, clients)
        # What a chunk is gathered to has no use for nobody's answers already.
        return answers if program.together is not None else tree.take(answers, slice(0, count))

    def _replayed(self, program: Program, shared: Tree, clients: tuple[Tree, ...]) -> Tree:
        given = (shared, clients)
        key = (program.key, _signature(given), torch.backends.cuda.matmul.allow_tf32)
        if key not in self._recordings:
            alike = (program.key, _signature((shared, tree.take(clients, 0))))
            if alike not in self._met:
                self._met[alike] = program
                return super().each(program, shared, clients)
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
        with warnings.catch_warnings():
            # A first state that is the start itself needs no kernel.
            warnings.filterwarnings("ignore", "The CUDA Graph is empty", UserWarning)
            with torch.cuda.graph(graph, pool=self._pool):
                outputs = super().each(program, *held)
        self.captures += 1
        seconds = time.perf_counter() - begin
        log.info("CUDA graph %d: %s recorded in %.2f s", self.captures, program.fn.__name__, seconds)
        return _Recording(program, graph, tree.tensors(held), outputs)


def vectorized(device: torch.device, limit: int) -> Vectorized:
    """The vectorized engine as the device runs it best."""
    return Captured(device, limit) if device.type == "cuda" else Vectorized(device, limit)


def _rounded(program: Program, clients: tuple[Tree, ...], count: int) -> tuple[Program, tuple[Tree, ...]]:
    """`count` clients, those that were not there all zeros; shards of a rounded number of batches."""
    unit = program.federation.method.local.batch_size or 1
    padding = program.federation.data.padding

    def wider(rows: Rows) -> Rows:
        width = rows.place.shape[1]
        batches = ceiling(math.ceil(width / unit)) * unit if width > unit else ceiling(width)
        return rows._replace(place=F.pad(rows.place, (0, batches - width), value=padding))

    wide = tuple(wider(part) if isinstance(part, Rows) else part for part in clients)
    if any(a.place.shape != b.place.shape for a, b in zip(clients, wide, strict=True) if isinstance(a, Rows)):
        program = replace(program, even=(False,) * len(program.even))
    more = count - tree.leaves(clients)[0].shape[0]
    if more == 0:
        return program, wide
    return program, tree.map(lambda leaf: torch.cat([leaf, leaf.new_zeros((more, *leaf.shape[1:]))]), wide)


def _signature(given: Tree) -> Hashable:
    """Shapes and types of the tensors, values of all else: what a recording is fixed to."""
    return tuple(
        (path, tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else (path, leaf)
        for path, leaf in tree.flatten(given).items()
    )
