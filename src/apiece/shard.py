"""Shard and Batch: one client's examples, as a method sees them."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from apiece import random, tree
from apiece.batched import on_host
from apiece.random import Key, fold
from apiece.tree import Tree

_LAST = torch.iinfo(torch.int64).max


class Batch(NamedTuple):
    x: Tree
    y: Tree
    weight: Tensor  # 1 for a real example, 0 for padding
    live: Tensor | None  # 0-d bool: does it hold a real example? None: known to
    key: Key
    full: bool = False  # known to have no padding: its loss is a plain mean, whatever the weights
    first: int | None = None  # only so many of a chunk's clients, its first, may be live; None: any


class Rows(NamedTuple):
    """Where a client's examples lie: what differs between the clients of one chunk."""

    place: Tensor  # rows of the resident arrays, padded at the end
    size: Tensor  # how many of them are real
    key: Key  # this client in this round
    split_key: Key  # this client in every round


@dataclass(frozen=True)
class Shard:
    """One client's examples: rows of resident arrays, padded to the length of its chunk.

    Methods use `size`, `key`, `batches`, `split`, `folds` and `all`; none of them shows the padding.
    """

    _x: Tree
    _y: Tree
    _rows: Rows
    _even: bool  # no client of the chunk is padded: masks are left out
    # Of each client of the chunk, no more than of the one before: examples at the most; (): nobody knows.
    _most: tuple[int, ...] = ()

    @property
    def size(self) -> Tensor:
        return self._rows.size

    @property
    def key(self) -> Key:
        return self._rows.key

    @property
    def _capacity(self) -> int:
        return self._rows.place.shape[0]

    def _positions(self, count: int) -> Tensor:
        return torch.arange(count, device=self._rows.place.device)

    def _taken(self, index: Tensor) -> tuple[Tree, Tree]:
        return _rows(self._x, index), _rows(self._y, index)

    def _first(self, examples: int) -> int | None:
        """Only so many of the chunk's first clients may have more examples."""
        return bisect_left(self._most, -examples, key=lambda count: -count) if self._most else None

    def _order(self, key: Key) -> Tensor:
        """A permutation of the real examples, then the padding."""
        n = self._capacity
        rank = random.rank(key, n)
        if not self._even:
            rank = torch.where(self._positions(n) < self.size, rank, _LAST)
        return rank.argsort(stable=True)

    def batches(self, batch_size: int, epochs: int = 1, steps: int = 0) -> Iterator[Batch]:
        """`epochs` passes in fresh orders or, if `steps` > 0, that many batches whatever the size.

        batch_size 0 is the whole shard. Step j is batch j mod B of pass j div B, B the batches of a pass.
        """
        n = self._capacity
        if n == 0:
            return
        width = min(batch_size or n, n)
        per_pass = math.ceil(n / width)
        if steps and not self._even:
            yield from self._steps(width, steps)
            return
        passes = math.ceil(steps / per_pass) if steps else epochs
        count = steps or passes * per_pass
        for epoch in range(passes):
            key = fold(self.key, epoch)
            place = self._rows.place[self._order(key)]
            # A GPU gathers a whole pass at once, of which batches are views; a CPU what fits into its cache.
            whole = None if on_host(place) else self._taken(place)
            numbers, weight = self._positions(per_pass), self._weight()
            keys, live = fold(key, numbers), self.size > numbers * width
            for batch in range(min(per_pass, count - epoch * per_pass)):
                rows = slice(batch * width, min((batch + 1) * width, n))
                x, y = self._taken(place[rows]) if whole is None else tree.take(whole, rows)
                alive = None if self._even else live[batch]
                first = self._first(batch * width)
                yield Batch(x, y, weight[rows], alive, keys[batch], self._even, first)

    def _steps(self, width: int, steps: int) -> Iterator[Batch]:
        """As above where B differs between the clients of the chunk: pass and batch are tensors."""
        per_pass = torch.clamp((self.size + width - 1) // width, min=1)
        for step in range(steps):
            epoch, batch = step // per_pass, step % per_pass
            order = self._order(fold(self.key, epoch))
            position = batch * width + self._positions(width)
            index = self._rows.place[order[position.clamp(max=self._capacity - 1)]]
            key = fold(self.key, epoch, batch)
            yield Batch(*self._taken(index), (position < self.size).float(), self.size > 0, key)

    def all(self) -> Batch:
        """Every example in one batch, in stored order."""
        examples, key = self._taken(self._rows.place), fold(self.key, "all")
        full = self._even and self._capacity > 0
        return Batch(*examples, self._weight(), None if self._even else self.size > 0, key, full)

    def _weight(self) -> Tensor:
        """Of every row, the real ones first."""
        if self._even:
            return torch.ones(self._capacity, device=self._rows.place.device)
        return (self._positions(self._capacity) < self.size).float()

    def at(self, key: int | Key) -> Shard:
        """The same examples, their orders and masks drawn below `key`: the server's proxy of one round."""
        return replace(self, _rows=self._rows._replace(key=fold(self.key, key)))

    def split(self, fraction: float = 0.5) -> tuple[Shard, Shard]:
        """(support, query): the same two parts in every round. The support is rounded up."""
        n, lasting = self._capacity, self._order(self._rows.split_key)
        share, rest = partial(_share, fraction=fraction), partial(_no_share, fraction=fraction)
        # A full shard has the largest support of all, and the largest query.
        query = lasting[share(self.size) + self._positions(rest(n))]
        return self._part(lasting[: share(n)], "support", share), self._part(query, "query", rest)

    def folds(self, count: int) -> Iterator[tuple[Shard, Shard]]:
        """(rest, fold), `count` ≥ 2 times: each example is in one fold, in the same one in every round."""
        n, lasting = self._capacity, self._order(self._rows.split_key)
        for i in range(count):
            turn = lasting[i::count]
            others = self._positions(n - turn.shape[0])
            others = others + (others + count - 1 - i) // (count - 1)  # skips every turn
            held, rest = partial(_held, turn=i, turns=count), partial(_not_held, turn=i, turns=count)
            yield self._part(lasting[others], f"rest {i}", rest), self._part(turn, f"fold {i}", held)

    def _part(self, index: Tensor, name: str, of: Callable[[Any], Any]) -> Shard:
        """Some of the rows, the first of them real, `of` so many; room for one at least, as a batch needs."""
        size, even = of(self.size), self._even and index.shape[0] > 0
        if not index.shape[0]:
            index = self._positions(min(1, self._capacity))
        place = self._rows.place[index]
        if not even:  # the padding row is the last of the resident arrays
            padding = tree.leaves(self._y)[0].shape[0] - 1
            place = torch.where(self._positions(index.shape[0]) < size, place, padding)
        rows = Rows(place, size, fold(self.key, name), fold(self._rows.split_key, name))
        return replace(self, _rows=rows, _even=even, _most=tuple(map(of, self._most)))


# Parts of so many examples: of a number, or of each in a tensor. Of more examples none is smaller.


def _share(count: Any, fraction: float) -> Any:
    """Rounded up, but for what a product is off."""
    if isinstance(count, Tensor):
        return torch.ceil(count.double() * fraction - 1e-9).long()
    return math.ceil(count * fraction - 1e-9)


def _no_share(count: Any, fraction: float) -> Any:
    return count - _share(count, fraction)


def _held(count: Any, turn: int, turns: int) -> Any:
    """Every so manieth, from that one on."""
    return (count + turns - 1 - turn) // turns


def _not_held(count: Any, turn: int, turns: int) -> Any:
    return count - _held(count, turn, turns)


def _rows(examples: Tree, index: Tensor) -> Tree:
    """Those at `index`; on a CPU as an embedding, which copies whole rows, and not entry by entry."""

    def some(leaf: Tensor) -> Tensor:
        if leaf.dim() == 1 or not on_host(leaf):
            return leaf[index]
        rows: Tensor = F.embedding(index, leaf.flatten(1)).unflatten(-1, leaf.shape[1:])
        return rows

    return tree.map(some, examples)
