"""Evaluation: every client's initial and personalized score. Reads the state, never writes it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from apiece import random, tree
from apiece.data.federated import Clients, Ints
from apiece.engines.base import Call, Engine, Federation, Program, cut
from apiece.method import Broadcast
from apiece.params import Params
from apiece.shard import Rows, Shard
from apiece.tree import Tree

Floats = NDArray[np.float64]


class Pair(NamedTuple):
    """The two scores of each client that was asked for; NaN where there is nothing to score."""

    initial: Floats
    personalized: Floats


class Group(NamedTuple):
    """Scores of the seen or the unseen clients, in figures."""

    clients: int
    scored: int
    initial: float
    personalized: float
    initial_weighted: float
    personalized_weighted: float
    initial_std: float
    personalized_std: float
    initial_worst10: float
    personalized_worst10: float
    harmed: float


def models(
    engine: Engine, federation: Federation, broadcast: Broadcast, ids: Sequence[int], round: int
) -> list[tuple[Params, Params]]:
    """Each client's (initial, personalized) model: what `evaluate` scores at this round."""
    out: dict[int, tuple[Params, Params]] = {}
    for chunk, (initial, personalized) in _each_client(engine, federation, broadcast, ids, round, _models):
        for at, position in enumerate(chunk):
            out[position] = (tree.take(initial, at), tree.take(personalized, at))
    return [out[position] for position in range(len(ids))]


def chosen(data: Clients, count: int, key: int) -> Ints:
    """The ids of `count` clients to score, 0 all: seen and unseen ones in proportion, some of either."""
    seen, unseen = data.seen_ids, data.unseen_ids
    if not 0 < count < data.population:
        return np.arange(data.population)
    few = min(max(round(count * len(unseen) / data.population), 1), count - 1, len(unseen))
    parts = ((seen, count - few, "seen"), (unseen, few, "unseen"))
    drawn = [ids[random.choose(random.fold(key, name), many, len(ids))] for ids, many, name in parts]
    return np.sort(np.concatenate(drawn))


def evaluate(
    engine: Engine, federation: Federation, broadcast: Broadcast, ids: Sequence[int], round: int
) -> dict[str, Pair]:
    """metric → scores of these clients, in their order, after `round` rounds."""
    n = len(ids)
    pairs: dict[str, Pair] = {}
    for chunk, scores in _each_client(engine, federation, broadcast, ids, round, _scores):
        for which, metrics in enumerate(scores):
            for name, values in metrics.items():
                pair = pairs.setdefault(name, Pair(np.full(n, np.nan), np.full(n, np.nan)))
                pair[which][chunk] = values.double().cpu().numpy()
    return pairs


def _both(federation: Federation, broadcast: Broadcast, client: Tree, train: Shard) -> tuple[Params, Params]:
    method, task = federation.method, federation.task.for_clients()
    return method.initial(task, broadcast, client), method.personalize(task, broadcast, client, train)


def _models(
    federation: Federation,
    even: tuple[bool, bool],
    broadcast: Broadcast,
    train: Rows,
    test: Rows,
    client: Tree,
) -> Tree:
    return _both(federation, broadcast, client, federation.shard(train, even[0]))


def _scores(
    federation: Federation,
    even: tuple[bool, bool],
    broadcast: Broadcast,
    train: Rows,
    test: Rows,
    client: Tree,
) -> Tree:
    task, examples = federation.task, federation.shard(test, even[1]).all()

    def metrics(params: Params) -> dict[str, Tensor]:
        """A model that is not finite has no score: argmax of its outputs would be a number all the same."""
        fine = tree.finite(params, task.device)
        found = task.metrics(task.predict(params, examples.x), examples)
        return {name: torch.where(fine, value, torch.nan) for name, value in found.items()}

    return tuple(metrics(p) for p in _both(federation, broadcast, client, federation.shard(train, even[0])))


def _each_client(
    engine: Engine,
    federation: Federation,
    broadcast: Broadcast,
    ids: Sequence[int],
    round: int,
    fn: Callable[..., Tree],
) -> Iterator[tuple[list[int], Tree]]:
    """(positions in ids, answers) chunk by chunk of the program that `fn` is."""
    key = random.fold(federation.root, "personalize", round)
    sizes = federation.data.sizes(ids)[0].tolist()
    chunks = cut(sizes, federation.method.personal, engine.limit, engine.overhead)

    def call(chunk: list[int]) -> Call:
        clients = [int(ids[at]) for at in chunk]
        data = federation.data.take(clients)
        held = replace(federation, data=data)
        train, train_even = held.rows(data.train, range(len(clients)), clients, key)
        test, test_even = held.rows(data.test, range(len(clients)), clients, key)
        states = held.states(engine, broadcast, clients)
        where = f"in personalize of {type(federation.method).__name__}, clients {clients}"
        return Call(Program(fn, held, (train_even, test_even)), broadcast, (train, test, states), where)

    yield from zip(chunks, engine.answers(map(call, chunks)), strict=True)


def summarize(pair: Pair, chosen: NDArray[np.bool_], n_test: NDArray[np.int64]) -> Group | None:
    """Figures over the `chosen` clients that could be scored; None if there are no such clients at all."""
    if not chosen.any():
        return None
    initial, personalized, weight = pair.initial[chosen], pair.personalized[chosen], n_test[chosen]
    scored = ~np.isnan(initial) & ~np.isnan(personalized)
    initial, personalized, weight = initial[scored], personalized[scored], weight[scored]
    if not len(initial):
        return Group(int(chosen.sum()), 0, *[math.nan] * 9)
    return Group(
        int(chosen.sum()),
        len(initial),
        float(initial.mean()),
        float(personalized.mean()),
        float(np.average(initial, weights=weight)),
        float(np.average(personalized, weights=weight)),
        float(initial.std()),
        float(personalized.std()),
        _worst(initial),
        _worst(personalized),
        float((personalized < initial).mean()),
    )


def _worst(scores: Floats) -> float:
    """Mean of the worst tenth of the clients, at least one."""
    return float(np.sort(scores)[: max(1, math.ceil(len(scores) / 10))].mean())
