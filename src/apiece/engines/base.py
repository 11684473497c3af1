"""What every engine shares: cutting a cohort into chunks, one client phase, its reduction.

An engine decides only how a function of one client is applied to a chunk of them (`Engine.each`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from apiece import random, tree
from apiece.data.federated import Federated, Ragged
from apiece.method import MEAN, Broadcast, Method, Reply, Round, Stacked
from apiece.optim import Recipe
from apiece.params import Params
from apiece.sample import Cohort
from apiece.shard import Rows, Shard
from apiece.store import Store
from apiece.task import Task
from apiece.tree import Tree

WASTE = 1.5


class Engine(ABC):
    """How a chunk of clients is computed. `limit`: clients in a chunk at the most."""

    name: ClassVar[str]

    def __init__(self, device: torch.device, limit: int) -> None:
        self.device = device
        self.limit = limit

    @abstractmethod
    def each(self, fn: Callable[..., Tree], arguments: tuple[Tree, ...]) -> Tree:
        """`fn` of every client; the leaves of arguments and answer have a first axis of clients."""


def cut(sizes: Sequence[int], recipe: Recipe, limit: int) -> list[list[int]]:
    """Positions of clients in chunks whose padded work is at most WASTE times the real work."""

    def cost(size: int) -> int:
        return recipe.steps or max(1, math.ceil(size / (recipe.batch_size or max(size, 1))))

    chunks: list[list[int]] = []
    longest = work = 0
    for position in sorted(range(len(sizes)), key=lambda i: (-cost(sizes[i]), i)):
        mine = cost(sizes[position])
        fits = chunks and len(chunks[-1]) < limit
        if fits and longest * (len(chunks[-1]) + 1) <= WASTE * (work + mine):
            chunks[-1].append(position)
            work += mine
        else:
            chunks.append([position])
            longest = work = mine
    return chunks


@dataclass(frozen=True)
class Federation:
    """Everything a client phase works with, constant over a run."""

    method: Method
    task: Task
    start: Params
    data: Federated
    store: Store
    root: int  # key of the run's seed

    def rows(self, part: Ragged, positions: Sequence[int], ids: Sequence[int], key: int) -> tuple[Rows, bool]:
        """The clients' Rows as one tree, and whether none of them is padded."""
        index = part.padded(positions, self.data.padding)
        sizes = part.sizes[list(positions)]
        device = self.task.device
        clients = torch.as_tensor(list(ids), device=device)
        rows = Rows(
            torch.as_tensor(index, device=device),
            torch.as_tensor(sizes, device=device),
            random.fold(key, clients),
            random.fold(random.fold(self.root, "split"), clients),
        )
        return rows, bool((sizes == index.shape[1]).all())

    def shard(self, rows: Rows, even: bool) -> Shard:
        return Shard(self.data.x, self.data.y, rows, even)

    def newcomers(self, data: Federated, *purpose: str) -> Federation:
        """Other clients, none of them ever met, with keys of their own below `purpose`."""
        store = Store(self.store.template, data.population, self.task.device, None, mapped=False)
        return replace(self, data=data, store=store, root=random.fold(self.root, *purpose))

    def states(self, engine: Engine, broadcast: Broadcast, ids: Sequence[int]) -> Tree:
        """The clients' states; of one not met before, its first."""
        if not self.store.stateful:
            return self.store.template
        known = self.store.known(ids)
        if known.all():
            return self.store.get(ids)
        task = self.task.for_clients()
        clients = torch.as_tensor(list(ids), device=self.task.device)
        keys = random.fold(random.fold(self.root, "client"), clients)
        fresh = engine.each(lambda key: self.method.init_client(task, broadcast, self.start, key), (keys,))
        if not known.any():
            return fresh
        return _choose(torch.as_tensor(known, device=self.task.device), self.store.get(ids), fresh)


class Outcome(NamedTuple):
    """A client phase, reduced."""

    update: Tree
    weight: Tensor  # total; 0: nothing to learn from
    finite: Tensor  # per client of the cohort: was its reply finite?
    metrics: dict[str, Tensor]  # mean over the finite replies


def client_phase(
    engine: Engine, federation: Federation, broadcast: Broadcast, cohort: Cohort, round: Round
) -> Outcome:
    """Every client of the cohort updates; partial sums are added in the order of the chunks."""
    method, task = federation.method, federation.task.for_clients()
    reduce = method.reduce(broadcast)
    key = random.fold(round.key, "client")
    positions: list[int] = []
    parts: list[_Part] = []
    for chunk in cut(cohort.train.sizes.tolist(), method.local, engine.limit):
        ids = [cohort.ids[at] for at in chunk]
        rows, even = federation.rows(cohort.train, chunk, ids, key)
        before = federation.states(engine, broadcast, ids)

        def client(rows: Rows, state: Tree, even: bool = even) -> tuple[Tree, ...]:
            reply = method.client_update(task, broadcast, state, federation.shard(rows, even))
            return _finished(method, task, broadcast, reply)

        try:
            update, state, weight, metrics, finite = engine.each(client, (rows, before))
        except Exception as error:
            error.add_note(f"in client_update of {type(method).__name__}, round {round.index}, clients {ids}")
            raise
        federation.store.put(ids, _choose(finite, state, before))
        update = _choose(finite, update, tree.zeros(update))
        weight = torch.where(finite, weight, 0.0)
        if reduce is MEAN:
            update = tree.map(lambda u, w=weight: torch.tensordot(w, u.to(w.dtype), 1), update)
        counted = tree.map(lambda m, f=finite: torch.where(f, m, 0.0).sum(), metrics)
        parts.append(_Part(update, weight, finite, counted))
        positions += chunk

    order = torch.as_tensor(np.argsort(positions), device=engine.device)
    weights = torch.cat([part.weight for part in parts])[order]
    finite = torch.cat([part.finite for part in parts])[order]
    total = weights.sum()
    if reduce is MEAN:
        divisor = torch.where(total > 0, total, 1.0)
        update = tree.map(lambda *sums: sum(sums[1:], sums[0]) / divisor, *(part.update for part in parts))
    else:
        update = Stacked(tree.take(tree.concat([part.update for part in parts]), order), weights)
    replies = finite.sum().clamp(min=1)
    metrics = tree.map(lambda *sums: sum(sums[1:], sums[0]) / replies, *(part.metrics for part in parts))
    return Outcome(update, total, finite, metrics)


class _Part(NamedTuple):
    """One chunk's contribution."""

    update: Tree  # its weighted sum, or its rows of the stack
    weight: Tensor
    finite: Tensor
    metrics: Tree  # sums


def _finished(method: Method, task: Task, broadcast: Broadcast, reply: Reply) -> tuple[Tree, ...]:
    """One reply as tensors: decoded, weighed and judged."""
    weight: Any = reply.weight
    if not isinstance(weight, Tensor):
        weight = torch.full((), weight, device=task.device)
    weight = weight.float()
    finite = tree.finite((reply.update, reply.state, weight), task.device)
    update = method.decode(task, broadcast, reply.update)
    return update, reply.state, weight, dict(reply.metrics), finite


def _choose(condition: Tensor, a: Tree, b: Tree) -> Tree:
    """Per client: `a` where the condition holds, else `b`."""

    def choose(x: Tensor, y: Tensor) -> Tensor:
        return torch.where(condition.reshape(-1, *[1] * (x.dim() - 1)), x, y)

    return tree.map(choose, a, b)
