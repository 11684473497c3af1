"""Evaluation: every client's initial and personalized score. Reads the state, never writes it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from apiece import random, tree
from apiece.engines.base import Engine, Federation, cut
from apiece.method import Broadcast
from apiece.params import Params
from apiece.shard import Rows, Shard
from apiece.tree import Tree

Floats = NDArray[np.float64]


class Pair(NamedTuple):
    """The two scores of each client, by id; NaN where there is nothing to score."""

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
    engine: Engine, federation: Federation, broadcast: Broadcast, ids: list[int], round: int
) -> list[tuple[Params, Params]]:
    """Each client's (initial, personalized) model: what `evaluate` scores at this round."""
    out: dict[int, tuple[Params, Params]] = {}
    for chunk, (initial, personalized) in _each_client(engine, federation, broadcast, ids, round, _both):
        for at, client in enumerate(chunk):
            out[client] = (tree.take(initial, at), tree.take(personalized, at))
    return [out[client] for client in ids]


def evaluate(
    engine: Engine, federation: Federation, broadcast: Broadcast, ids: list[int], round: int
) -> dict[str, Pair]:
    """metric → scores of all clients (NaN for those not in `ids`), after `round` rounds."""
    n = federation.data.population
    pairs: dict[str, Pair] = {}
    for chunk, scores in _each_client(engine, federation, broadcast, ids, round, _score):
        for which, metrics in enumerate(scores):
            for name, values in metrics.items():
                pair = pairs.setdefault(name, Pair(np.full(n, np.nan), np.full(n, np.nan)))
                pair[which][chunk] = values.double().cpu().numpy()
    return pairs


def _both(federation: Federation, broadcast: Broadcast, client: Tree, train: Shard, test: Shard) -> Tree:
    method, task = federation.method, federation.task.for_clients()
    return method.initial(task, broadcast, client), method.personalize(task, broadcast, client, train)


def _score(federation: Federation, broadcast: Broadcast, client: Tree, train: Shard, test: Shard) -> Tree:
    task, examples = federation.task, test.all()

    def metrics(params: Params) -> dict[str, Tensor]:
        """A model that is not finite has no score: argmax of its outputs would be a number all the same."""
        fine = tree.finite(params, task.device)
        found = task.metrics(task.predict(params, examples.x), examples)
        return {name: torch.where(fine, value, torch.nan) for name, value in found.items()}

    return tuple(metrics(params) for params in _both(federation, broadcast, client, train, test))


def _each_client(
    engine: Engine,
    federation: Federation,
    broadcast: Broadcast,
    ids: list[int],
    round: int,
    fn: Callable[..., Tree],
) -> Iterator[tuple[list[int], Tree]]:
    """(ids, answers) chunk by chunk of `fn(federation, broadcast, client, train, test)`."""
    data = federation.data
    key = random.fold(federation.root, "personalize", round)
    for chunk in cut(data.train.sizes[ids].tolist(), federation.method.personal, engine.limit):
        clients = [ids[at] for at in chunk]
        train, train_even = federation.rows(data.train, clients, clients, key)
        test, test_even = federation.rows(data.test, clients, clients, key)
        states = federation.states(engine, broadcast, clients)

        even = (train_even, test_even)

        def one(train: Rows, test: Rows, state: Tree, even: tuple[bool, bool] = even) -> Tree:
            shards = federation.shard(train, even[0]), federation.shard(test, even[1])
            return fn(federation, broadcast, state, *shards)

        try:
            yield clients, engine.each(one, (train, test, states))
        except Exception as error:
            error.add_note(f"in personalize of {type(federation.method).__name__}, clients {clients}")
            raise


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
