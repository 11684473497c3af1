"""Evaluation: every client's initial and personalized score. Reads the state, never writes it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import cycle
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from apiece import random, tree
from apiece.data.arena import Arena
from apiece.data.federated import Clients, Ints
from apiece.engines.base import Call, Engine, Federation, Known, Program, recurring
from apiece.errors import ApieceError
from apiece.method import Broadcast
from apiece.params import Params
from apiece.shard import Rows, Shard
from apiece.task import Task
from apiece.tree import Tree

Floats = NDArray[np.float64]


class Pair(NamedTuple):
    """The two scores of each client that was asked for; NaN where there is nothing to score."""

    initial: Floats
    personalized: Floats


class Outputs(NamedTuple):
    """What a client's two models say to its test examples, and the labels."""

    initial: Tensor
    personalized: Tensor
    y: Tensor


class Scores(NamedTuple):
    pairs: dict[str, Pair]
    outputs: list[Outputs]  # by client; none if the task has no measure over many clients' examples


class Total(NamedTuple):
    """A measure over the examples of many clients together."""

    initial: float
    personalized: float


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
    diverged: int  # clients whose personalized model is not finite: they count as harmed


def models(
    engine: Engine, federation: Federation, broadcast: Broadcast, ids: Sequence[int], round: int
) -> list[tuple[Params, Params]]:
    """Each client's (initial, personalized) model: what `evaluate` scores at this round."""
    out: dict[int, tuple[Params, Params]] = {}
    for chunk, (initial, personalized) in _each_client(engine, federation, broadcast, ids, round, _models):
        for at, position in enumerate(chunk):
            out[position] = tree.clone((tree.take(initial, at), tree.take(personalized, at)))
    return [out[position] for position in range(len(ids))]


def chosen(data: Clients, count: int, key: int, group: str = "all") -> Ints:
    """The ids of `count` clients to score, 0 all: seen and unseen ones in proportion, or of one group."""
    seen, unseen = data.seen_ids, data.unseen_ids
    if group != "all":
        ids = seen if group == "seen" else unseen
        if not len(ids):
            raise ApieceError(f"there are no {group} clients to score: change --evaluate-group or --unseen")
        if not 0 < count < len(ids):
            return ids
        return np.sort(ids[random.choose(random.fold(key, group), count, len(ids))])
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
    return score(engine, federation, broadcast, ids, round).pairs


def score(
    engine: Engine, federation: Federation, broadcast: Broadcast, ids: Sequence[int], round: int
) -> Scores:
    """The same, and what measures over many clients' examples together are taken from."""
    n, sizes = len(ids), federation.data.sizes(ids)[1]
    pairs: dict[str, Pair] = {}
    outputs: dict[int, Outputs] = {}
    for chunk, (*scores, y) in _each_client(engine, federation, broadcast, ids, round, _scores):
        for which, (metrics, _) in enumerate(scores):
            for name, values in metrics.items():
                pair = pairs.setdefault(name, Pair(np.full(n, np.nan), np.full(n, np.nan)))
                pair[which][chunk] = values.double().cpu().numpy()
        if federation.task.pooled:
            kept = tree.to((*(of_model for _, of_model in scores), y), "cpu")
            for at, position in enumerate(chunk):
                outputs[position] = Outputs(*(part[at, : sizes[position]] for part in kept))
    return Scores(pairs, [outputs[position] for position in sorted(outputs)])


def pool(task: Task, outputs: Sequence[Outputs], chosen: NDArray[np.bool_]) -> dict[str, Total]:
    """The task's measures over the test examples of the `chosen` clients together; of none, no measure."""
    kept = [one for one, mine in zip(outputs, chosen, strict=True) if mine and len(one.y)]
    fine = [one for one in kept if one.initial.isfinite().all() and one.personalized.isfinite().all()]
    if not fine:
        return {}
    initial, personalized, y = (torch.cat(parts) for parts in zip(*fine, strict=True))
    return {
        name: Total(float(measure(initial, y)), float(measure(personalized, y)))
        for name, measure in task.pooled.items()
    }


def _both(federation: Federation, broadcast: Broadcast, client: Tree, train: Shard) -> tuple[Params, Params]:
    method, task = federation.method, federation.task.for_clients()
    return method.initial(task, broadcast, client), method.personalize(task, broadcast, client, train)


def _models(
    federation: Federation,
    shards: tuple[Known, Known],
    broadcast: Broadcast,
    train: Rows,
    test: Rows,
    client: Tree,
) -> Tree:
    return _both(federation, broadcast, client, federation.shard(train, shards[0]))


def _scores(
    federation: Federation,
    shards: tuple[Known, Known],
    broadcast: Broadcast,
    train: Rows,
    test: Rows,
    client: Tree,
) -> Tree:
    task, examples = federation.task, federation.shard(test, shards[1]).all()

    def scored(params: Params) -> Tree:
        """A model that is not finite has no score: argmax of its outputs would be a number all the same."""
        fine = tree.finite(params, task.device)
        outputs = task.predict(params, examples.x)
        found = task.metrics(outputs, examples)
        metrics = {name: torch.where(fine, value, torch.nan) for name, value in found.items()}
        return metrics, torch.where(fine, outputs, torch.nan) if task.pooled else ()

    both = _both(federation, broadcast, client, federation.shard(train, shards[0]))
    return *map(scored, both), examples.y if task.pooled else ()


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
    sizes = [of_part.tolist() for of_part in federation.data.sizes(ids)]
    chunks, recurs = engine.cut(sizes[0], federation.method.personal), all(map(recurring, sizes))

    def call(chunk: list[int], arena: Arena | None) -> Call:
        clients = [int(ids[at]) for at in chunk]
        data = federation.data.brought(federation.data.kept.take(clients), arena)
        held = replace(federation, data=data)
        train, even = held.rows(data.train, range(len(clients)), clients, key)
        test, test_even = held.rows(data.test, range(len(clients)), clients, key)
        states = held.states(engine, broadcast, clients)
        where = f"in personalize of {type(federation.method).__name__}, clients {clients}"
        shards = Known.of(data.train.sizes.tolist(), even, federation.method.personal), Known(test_even)
        program = Program(fn, held, shards, recurs=recurs)
        return Call(program, broadcast, (train, test, states), where)

    arenas = cycle(engine.arenas or (None,))
    yield from zip(chunks, engine.answers(map(call, chunks, arenas)), strict=True)


def summarize(
    pair: Pair, chosen: NDArray[np.bool_], n_test: NDArray[np.int64], lower: bool = False
) -> Group | None:
    """Figures over the `chosen` clients that could be scored; None if there are no such clients at all.

    lower: the lower a score, the better.
    """
    if not chosen.any():
        return None
    measured = chosen & ~np.isnan(pair.initial)
    if not measured.any():
        return Group(int(chosen.sum()), 0, *_NOBODY, *_NOBODY, math.nan, 0)
    initial, personalized, weight = pair.initial[measured], pair.personalized[measured], n_test[measured]
    finite = ~np.isnan(personalized)
    worse = personalized > initial if lower else personalized < initial
    own, adapted = _spread(initial, weight, lower), _spread(personalized[finite], weight[finite], lower)
    return Group(
        int(chosen.sum()),
        len(initial),
        own[0],
        adapted[0],
        own[1],
        adapted[1],
        own[2],
        adapted[2],
        own[3],
        adapted[3],
        float((worse | ~finite).mean()),
        int((~finite).sum()),
    )


_NOBODY = (math.nan,) * 4


def _spread(scores: Floats, weight: NDArray[np.int64], lower: bool) -> tuple[float, float, float, float]:
    """Mean, mean by examples, standard deviation, and mean of the worst tenth."""
    if not len(scores):
        return _NOBODY
    mean, by_examples = float(scores.mean()), float(np.average(scores, weights=weight))
    return mean, by_examples, float(scores.std()), _worst(scores, lower)


def _worst(scores: Floats, lower: bool) -> float:
    """Mean of the worst tenth of the clients, at least one."""
    worst_first = np.sort(scores)[::-1] if lower else np.sort(scores)
    return float(worst_first[: max(1, math.ceil(len(scores) / 10))].mean())
