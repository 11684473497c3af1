"""Samplers: who takes part in a round, and with which rows. A function of the data and the round alone.

In a real federation the label mix differs between the clients of a round (client drift) and between rounds
(period drift). The samplers that take one or both away give clients other clients' rows, of the cohort or of
all seen clients: for simulation only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from apiece import random
from apiece.data.federated import Clients, Federated, Ints, Ragged, generator, resident
from apiece.errors import ApieceError
from apiece.method import Round


class Cohort(NamedTuple):
    ids: tuple[int, ...]  # sorted
    data: Federated  # these clients alone, in the order of ids

    @property
    def train(self) -> Ragged:
        return self.data.train


Sampler = Callable[[Clients, Round], Cohort]


def uniform(data: Clients, round: Round) -> Cohort:
    """`round.cohort_size` different seen clients, each as likely as any other: both drifts."""
    seen = data.seen_ids
    chosen = random.choose(random.fold(round.key, "cohort"), round.cohort_size, len(seen))
    ids = tuple(int(seen[i]) for i in chosen)
    return Cohort(ids, data.take(ids))


def period_drift(data: Clients, round: Round) -> Cohort:
    """The cohort's rows pooled, shuffled and dealt out in the same sizes: only period drift is left.

    Called iid_each_round in the FedPA paper.
    """
    cohort = uniform(data, round)
    return _dealt(cohort, _draw(round).permutation(cohort.train.rows))


def no_drift(data: Clients, round: Round) -> Cohort:
    """As many rows of the population's label mix, dealt out at random: neither drift is left."""
    data = resident(data, "--sampler no_drift")
    cohort = uniform(data, round)
    draw = _draw(round)
    rows = np.concatenate(_rows_of_global_mix(data, len(cohort.train.rows), draw))
    return _dealt(cohort, draw.permutation(rows))


def client_drift(data: Clients, round: Round) -> Cohort:
    """Rows of the population's label mix, dealt out as unevenly as the clients' own: only client drift."""
    data = resident(data, "--sampler client_drift")
    cohort = uniform(data, round)
    draw = _draw(round)
    by_class = _rows_of_global_mix(data, len(cohort.train.rows), draw)
    own = np.array([data.counts(rows) for rows in _parts(cohort.train)])
    table = _fitted(own, cohort.train.sizes, np.array([len(rows) for rows in by_class]))
    # Whole rows: client by client along each class, cut where the running total of the table says.
    ends = np.rint(np.cumsum(table, axis=0)).astype(int)
    pieces = [np.split(rows, ends[:-1, label]) for label, rows in enumerate(by_class)]
    dealt = Ragged.of([np.concatenate([p[i] for p in pieces]) for i in range(len(own))])
    return Cohort(cohort.ids, cohort.data.redealt(dealt))


SAMPLERS: dict[str, Sampler] = {
    "uniform": uniform,
    "client_drift": client_drift,
    "period_drift": period_drift,
    "no_drift": no_drift,
}


def _draw(round: Round) -> np.random.Generator:
    return generator(random.fold(round.key, "deal"))


def _parts(rows: Ragged) -> list[Ints]:
    return [rows[i] for i in range(len(rows.sizes))]


def _dealt(cohort: Cohort, rows: Ints) -> Cohort:
    return Cohort(cohort.ids, cohort.data.redealt(Ragged(rows, cohort.train.offsets)))


def _rows_of_global_mix(data: Federated, total: int, draw: np.random.Generator) -> list[Ints]:
    """`total` rows of the seen clients, by class, in the mix of them all; a short class gives rows twice."""
    if data.labels.ndim > 1:
        raise ApieceError("an example has many labels: there is no mix of classes, use --sampler uniform")
    pool = np.concatenate([data.train[i] for i in data.seen_ids])
    by_class = [pool[data.labels[pool] == label] for label in range(data.classes)]
    shares = np.cumsum([len(rows) for rows in by_class]) * total / len(pool)
    counts = np.diff(np.rint(shares).astype(int), prepend=0)
    return [
        draw.choice(rows, size=count, replace=count > len(rows)) if count else rows[:0]
        for rows, count in zip(by_class, counts, strict=True)
    ]


def _fitted(table: Ints, row_sums: Ints, column_sums: Ints) -> NDArray[np.float64]:
    """The table nearest to the given one (in odds ratios) with these sums: iterative proportional fitting."""
    fitted = table.astype(np.float64) + 1e-6
    for _ in range(100):
        fitted *= (row_sums / fitted.sum(1).clip(1e-12))[:, None]
        fitted *= column_sums / fitted.sum(0).clip(1e-12)
    return fitted
