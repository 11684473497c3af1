"""What every engine shares: cutting a cohort into chunks, one client phase, its reduction.

An engine decides only how a function of one client is applied to a chunk of them (`Engine.each`), and
whether it computes several chunks at once (`Engine.answers`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from apiece import random, tree
from apiece.batched import on_host
from apiece.data.arena import Arena, placed
from apiece.data.federated import Clients, Ragged
from apiece.method import MEAN, Broadcast, Method, Reduce, Round, Stacked
from apiece.optim import Recipe
from apiece.params import Params
from apiece.sample import Cohort
from apiece.shard import Rows, Shard
from apiece.store import Store
from apiece.task import Task
from apiece.tree import Tree

WASTE = 1.5  # steps that are computed, in real ones, at the most
ROOM = 2.0  # examples that are read, where steps are narrowed


class Engine(ABC):
    """How a chunk of clients is computed. `limit`: clients in a chunk at the most."""

    name: ClassVar[str]
    overhead: float = 0.0  # of a step of a chunk, in clients: what `cut` weighs padding against
    # Chunk k is made ready when chunk k − under_way has been answered; 0: no such promise.
    under_way: ClassVar[int] = 1

    def __init__(self, device: torch.device, limit: int) -> None:
        self.device = device
        self.limit = limit
        self.arenas = tuple(Arena() for _ in range(self.under_way))  # for chunks, in turn

    @abstractmethod
    def each(self, program: Program, shared: Tree, clients: tuple[Tree, ...]) -> Tree:
        """`program(shared, *client)` of every client; `clients` and the answer have an axis of them."""

    def cut(self, sizes: Sequence[int], recipe: Recipe) -> list[list[int]]:
        """Positions of clients in the chunks that they are computed in."""
        return cut(sizes, recipe, self.limit, self.overhead)

    def serving(self) -> AbstractContextManager[None]:
        """Around what a server computes: its loops, too, may be run the engine's way."""
        return nullcontext()

    def answers(self, calls: Iterable[Call]) -> Iterator[Tree]:
        """What `each` answers to calls of one method and task, in their order; errors tell whose they are."""
        for call in calls:
            try:
                answer = self.each(call.program, call.shared, call.clients)
            except Exception as error:
                error.add_note(call.where)
                raise
            yield answer


class Call(NamedTuple):
    """One chunk's part of a phase."""

    program: Program
    shared: Tree
    clients: tuple[Tree, ...]
    where: str  # for errors: what is computed, and of whom


def ceiling(number: int) -> int:
    """The next number of three binary digits and zeros: 1 … 8, 10, 12, 14, 16, 20, 24 …"""
    step = 1 << max((number - 1).bit_length() - 3, 0)
    return -(-number // step) * step


def work(sizes: Sequence[int], recipe: Recipe) -> list[int]:
    """Of each client: its steps, or the batches of a pass; its examples, where the shard is one batch."""
    if recipe.batch_size == 0:
        return [max(size, 1) for size in sizes]
    return [recipe.steps or max(1, math.ceil(size / recipe.batch_size)) for size in sizes]


def narrows(recipe: Recipe) -> bool:
    """Are there batches that some of a chunk's clients have and others do not?"""
    return recipe.batch_size > 0 and not recipe.steps


def recurring(sizes: Sequence[int]) -> bool:
    """Has everybody as many examples, so that chunks have the same shapes in every round?

    One client tells nothing.
    """
    return len(sizes) > 1 and len(set(sizes)) == 1


def cut(
    sizes: Sequence[int],
    recipe: Recipe,
    limit: int,
    overhead: float = 0.0,
    rounded: Callable[[int], int] = int,
    narrowed: Callable[[Sequence[int]], int] | None = None,
) -> list[list[int]]:
    """Positions of clients in chunks whose computed work is at most WASTE times the real work.

    Of all ways to cut clients sorted by their work, the cheapest: a chunk costs its longest client's work
    times its clients plus `overhead`, what it costs to compute anything at all, in clients. Both numbers
    count `rounded`, as they will be computed; instead of nobody, shorter clients are taken along. Where a
    step is narrowed to those who have a batch for it, a chunk costs instead what `narrowed` says of clients
    with so much work each; and the examples that it reads are ROOM times the real ones at the most.
    """
    steps = work(sizes, recipe)
    order = sorted(range(len(sizes)), key=lambda i: (-steps[i], i))
    longest_first = [steps[i] for i in order]
    real = list(accumulate(longest_first, initial=0))
    # Clients of about the same work stay together: where one chunk ends does not hang on every single size.
    about = [ceiling(taken) for taken in longest_first]
    ends = [at for at in range(1, len(order) + 1) if about[at - 1 : at] != about[at : at + 1]]
    best = {0: (0.0, 0)}  # of the first clients: the least cost, and where the last chunk begins
    for begin in range(len(order)):
        if begin not in best:
            continue
        longest = recipe.steps or rounded(longest_first[begin])
        most = min(limit, len(order) - begin)
        natural = [end - begin for end in ends if begin < end < begin + most] + [most]
        paid: dict[int, int] = {}
        for count in (min(rounded(n), most) for n in natural):
            padded, mine = longest * rounded(count), real[begin + count] - real[begin]
            computed, room = padded, WASTE
            if narrowed is not None and narrows(recipe):
                computed, room = narrowed(longest_first[begin : begin + count]), ROOM
            if computed <= WASTE * mine and padded <= room * mine:
                paid[count] = computed
        if not paid:  # of the clients of about the same work as many as are not rounded
            count = max(n for n in range(1, natural[0] + 1) if rounded(n) == n)
            paid[count] = longest * count
        for count, computed in paid.items():
            cost = best[begin][0] + computed + longest * overhead, begin
            best[begin + count] = min(best.get(begin + count, cost), cost)
    chunks: list[list[int]] = []
    end = len(order)
    while end:
        begin = best[end][1]
        chunks.insert(0, order[begin:end])
        end = begin
    return chunks


class Known(NamedTuple):
    """What is known of a chunk's shards before anything is computed: in what a GPU has recorded, for good."""

    even: bool  # no client of the chunk is padded
    most: tuple[int, ...] = ()  # of each client, no more than of the one before: examples at the most
    batch: int = 1  # examples that are rounded up together

    @staticmethod
    def of(sizes: Sequence[int], even: bool, recipe: Recipe) -> Known:
        """Of a chunk's clients, in their order, whose loops are the recipe's."""
        most = () if even or not narrows(recipe) else tuple(accumulate(reversed(sizes), max))[::-1]
        return Known(even, most, recipe.batch_size or 1)


@dataclass(frozen=True)
class Federation:
    """Everything a client phase works with, constant over a run."""

    method: Method
    task: Task
    start: Params
    data: Clients  # in a client phase, the cohort alone
    store: Store
    root: int  # key of the run's seed

    def rows(self, part: Ragged, positions: Sequence[int], ids: Sequence[int], key: int) -> tuple[Rows, bool]:
        """The clients' Rows as one tree, and whether none of them is padded."""
        index = part.padded(positions, self.data.padding)
        sizes = part.sizes[list(positions)]
        device = self.task.device
        keys = (random.fold_all(key, ids), random.fold_all(random.fold(self.root, "split"), ids))
        whole = placed(
            np.column_stack([index, sizes, *keys]), device
        )  # one array goes to the device, not four
        width = index.shape[1]
        rows = Rows(whole[:, :width], *(whole[:, width + at] for at in range(3)))
        return rows, bool((sizes == index.shape[1]).all())

    def shard(self, rows: Rows, known: Known | bool) -> Shard:
        """known: of a client alone, whether it is not padded."""
        even, most, _ = known if isinstance(known, Known) else Known(known)
        return Shard(self.data.x, self.data.y, rows, even, most)

    def newcomers(self, data: Clients, *purpose: str) -> Federation:
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
        keys = placed(random.fold_all(random.fold(self.root, "client"), ids), self.task.device)
        fresh = engine.each(Program(_first_state, self), (broadcast, self.start), (keys,))
        if not known.any():
            return fresh
        return _choose(placed(known, self.task.device), self.store.get(ids), fresh)


@dataclass(frozen=True)
class Program:
    """A function of one client with all that differs neither between clients nor between rounds."""

    fn: Callable[..., Tree]  # of (federation, shards, shared, *client); a function of a module
    federation: Federation
    shards: tuple[Known, ...] = ()  # that it reads
    together: Callable[..., Tree] | None = None  # of (all answers, all clients): what becomes of a chunk
    recurs: bool = False  # has it the same shapes in every round?

    def __call__(self, shared: Tree, *client: Tree) -> Tree:
        return self.fn(self.federation, self.shards, shared, *client)

    def finish(self, answers: Tree, clients: tuple[Tree, ...]) -> Tree:
        return answers if self.together is None else self.together(answers, *clients)

    @property
    def key(self) -> Hashable:
        """Programs with equal keys compute the same function of tensors, as long as both are alive."""
        f = self.federation
        resident = tuple(map(id, tree.leaves((f.data.x, f.data.y))))
        return self.fn, type(f), f.method, id(f.task.module), resident, self.shards, self.together


def _first_state(federation: Federation, shards: tuple[Known, ...], shared: Tree, key: Tensor) -> Tree:
    broadcast, start = shared
    return federation.method.init_client(federation.task.for_clients(), broadcast, start, key)


def _updated(
    federation: Federation,
    shards: tuple[Known, ...],
    broadcasts: Tree,
    real: Tensor,
    which: Tree,
    rows: Rows,
    state: Tree,
) -> tuple[Tree, ...]:
    """One client's reply as tensors, decoded and weighed."""
    method, task = federation.method, federation.task.for_clients()
    broadcast = broadcasts if which == () else _of(broadcasts, which)
    reply = method.client_update(task, broadcast, state, federation.shard(rows, shards[0]))
    weight: Any = reply.weight
    if not isinstance(weight, Tensor):
        weight = torch.full((), weight, device=task.device)
    update = method.decode(task, broadcast, reply.update)
    return update, reply.state, weight.float(), dict(reply.metrics)


class Member(NamedTuple):
    """A run's part in a client phase: one run alone, or one of several replicas that go together."""

    federation: Federation
    broadcast: Broadcast
    cohort: Cohort
    round: Round


class Outcome(NamedTuple):
    """A client phase, reduced."""

    update: Tree
    weight: Tensor  # total; 0: nothing to learn from
    finite: Tensor  # per client of the cohort: was its reply finite?
    metrics: dict[str, Tensor]  # mean over the finite replies


@dataclass(frozen=True)
class _Gather:
    """Replies of a chunk: those that are not finite dropped, the others summed up for each run."""

    reduce: Reduce
    runs: int

    def __call__(
        self, replies: tuple[Tree, ...], real: Tensor, which: Tree, rows: Rows, before: Tree
    ) -> tuple[Tree, Tree, Tensor, Tensor, Tree]:
        update, state, weight, metrics = replies
        run = torch.arange(self.runs, device=weight.device)[:, None]
        own = torch.ones_like(weight)[None] if which == () else (which == run).to(weight.dtype)
        # A GPU would have to be waited for; a CPU is asked, and saves passes over all that clients answer.
        asked = on_host(weight)
        total = self._total(update, own * weight) if asked else update
        # A sum that is finite has no other parts, if everybody counts in it.
        sound = asked and self.reduce is MEAN and bool(weight.all() & tree.finite(total, weight.device))
        finite = real & _finite((() if sound else update, state, weight))
        if not asked or not finite.all():
            state = _choose(finite, state, before)
            update = tree.map(lambda leaf: torch.where(_spread(finite, leaf), leaf, 0.0), update)
            weight = torch.where(finite, weight, 0.0)
            total = self._total(update, own * weight)
        counted = tree.map(lambda leaf: own.to(leaf.dtype) @ torch.where(finite, leaf, 0.0), metrics)
        return total, state, weight, finite, counted

    def _total(self, update: Tree, weights: Tensor) -> Tree:
        """Of each run; all updates, where the server is to have them."""
        if self.reduce is not MEAN:
            return update
        return tree.map(lambda leaf: torch.tensordot(weights, leaf.to(weights.dtype), 1), update)


class _Part(NamedTuple):
    """One chunk's contribution to one run."""

    positions: list[int]  # in the cohort
    update: Tree  # its rows of the stack; (): added to the sum
    weight: Tensor
    finite: Tensor
    metrics: Tree  # sums


def client_phase(engine: Engine, *members: Member) -> list[Outcome]:
    """Every client of every cohort updates; partial sums are added in the order of the chunks.

    The members' broadcasts must agree in their static fields, their federations in all but keys and states.
    """
    first = members[0].federation
    gather = _Gather(first.method.reduce(members[0].broadcast), len(members))
    alone = len(members) == 1
    shared = members[0].broadcast if alone else _stacked([member.broadcast for member in members])
    places = [(m, at) for m, member in enumerate(members) for at in range(len(member.cohort.ids))]
    each = [member.cohort.train.sizes.tolist() for member in members]
    sizes = [size for mine in each for size in mine]
    parts: list[list[_Part]] = [[] for _ in members]
    sums: list[Tree] = [() for _ in members]  # weighted, of MEAN
    chunks = [[places[at] for at in chunk] for chunk in engine.cut(sizes, first.method.local)]
    recurs = recurring(sizes)

    def call(chosen: list[tuple[int, int]]) -> Call:
        mine = _by_member(chosen)
        prepared = [_before(engine, members[m], [chosen[i][1] for i in turns]) for m, turns in mine.items()]
        rows, even = _joined([rows for rows, _ in prepared], first.data.padding)
        before = tree.concat([state for _, state in prepared])
        # One member after another so far; but who has most steps comes first.
        turn = np.argsort([i for turns in mine.values() for i in turns]).tolist()
        rows, before = tree.take((rows, before), _index(turn, engine.device))
        real = torch.ones(len(chosen), dtype=torch.bool, device=engine.device)
        which: Tree = () if alone else placed(np.array([m for m, _ in chosen]), engine.device)
        known = Known.of([each[m][at] for m, at in chosen], even, first.method.local)
        program = Program(_updated, first, (known,), gather, recurs)
        ids = [members[m].cohort.ids[at] for m, at in chosen]
        name, round = type(first.method).__name__, members[0].round.index
        where = f"in client_update of {name}, round {round}, clients {ids}"
        return Call(program, shared, (real, which, rows, before), where)

    answers = engine.answers(map(call, chunks))
    for chosen, (update, state, weight, finite, metrics) in zip(chunks, answers, strict=True):
        for m, turns in _by_member(chosen).items():
            own, positions = _index(turns, engine.device), [chosen[i][1] for i in turns]
            rows: Tree = ()
            if gather.reduce is MEAN:
                sums[m] = _added(sums[m], tree.take(update, m), len(parts[m]))
            else:
                rows = tree.take(update, own)
            ids = [members[m].cohort.ids[at] for at in positions]
            members[m].federation.store.put(ids, tree.take(state, own))
            parts[m].append(_Part(positions, rows, weight[own], finite[own], tree.take(metrics, m)))
    return [
        _reduced(own, gather.reduce, total, engine.device) for own, total in zip(parts, sums, strict=True)
    ]


def _by_member(chosen: list[tuple[int, int]]) -> dict[int, list[int]]:
    """Of each member, where in a chunk of (member, position) its clients are."""
    found: dict[int, list[int]] = {}
    for i, (m, _) in enumerate(chosen):
        found.setdefault(m, []).append(i)
    return found


def _index(turns: list[int], device: torch.device) -> slice | Tensor:
    """A slice where it can be one: views need no copy."""
    begin, end = turns[0], turns[-1] + 1
    return slice(begin, end) if turns == list(range(begin, end)) else placed(np.array(turns), device)


def _added(total: Tree, more: Tree, before: int) -> Tree:
    """The sum of one chunk more; in place, once it is a tensor of its own and no engine's."""
    if before < 2:
        return tree.map(torch.add, total, more) if before else more
    return tree.map(Tensor.add_, total, more)


def _before(engine: Engine, member: Member, positions: list[int]) -> tuple[tuple[Rows, bool], Tree]:
    """The rows and the states of some clients of a cohort."""
    f, cohort = member.federation, member.cohort
    ids = [cohort.ids[at] for at in positions]
    key = random.fold(member.round.key, "client")
    return f.rows(cohort.train, positions, ids, key), f.states(engine, member.broadcast, ids)


def _joined(rows: list[tuple[Rows, bool]], padding: int) -> tuple[Rows, bool]:
    """Rows of several runs as one, padded to the longest."""
    if len(rows) == 1:
        return rows[0]
    longest = max(some.place.shape[1] for some, _ in rows)
    wide = [
        some._replace(place=F.pad(some.place, (0, longest - some.place.shape[1]), value=padding))
        for some, _ in rows
    ]
    return tree.concat(wide), all(even and some.place.shape[1] == longest for some, even in rows)


def _reduced(parts: list[_Part], reduce: Reduce, sums: Tree, device: torch.device) -> Outcome:
    positions = [at for part in parts for at in part.positions]
    order = placed(np.argsort(positions), device)
    weights = torch.cat([part.weight for part in parts])[order]
    finite = torch.cat([part.finite for part in parts])[order]
    total = weights.sum()
    if reduce is MEAN:
        divisor = torch.where(total > 0, total, 1.0)
        update = tree.map(lambda leaf: leaf / divisor, sums)
    else:
        update = Stacked(tree.take(tree.concat([part.update for part in parts]), order), weights)
    replies = finite.sum().clamp(min=1)
    metrics = tree.map(lambda *sums: sum(sums[1:], sums[0]) / replies, *(part.metrics for part in parts))
    return Outcome(update, total, finite, metrics)


def _stacked(broadcasts: list[Broadcast]) -> Broadcast:
    return tree.map(lambda *leaf: torch.stack(leaf) if isinstance(leaf[0], Tensor) else leaf[0], *broadcasts)


def _of(broadcasts: Broadcast, which: Tensor) -> Broadcast:
    return tree.map(lambda leaf: leaf[which] if isinstance(leaf, Tensor) else leaf, broadcasts)


def _choose(condition: Tensor, a: Tree, b: Tree) -> Tree:
    """Per client: `a` where the condition holds, else `b`."""

    return tree.map(lambda x, y: torch.where(_spread(condition, x), x, y), a, b)


def _spread(condition: Tensor, like: Tensor) -> Tensor:
    """A bool per client, with as many axes as `like`."""
    return condition.reshape(-1, *[1] * (like.dim() - 1))


def _finite(replies: Tree) -> Tensor:
    """Per client: no floating leaf holds a NaN or an infinity, for one of its extremes would be it."""
    rows = [
        leaf.reshape(len(leaf), -1)
        for leaf in tree.tensors(replies)
        if leaf.is_floating_point() and leaf.numel()
    ]
    extremes = [extreme for row in rows for extreme in (row.amax(1), row.amin(1))]
    return torch.stack(extremes).isfinite().all(0)
