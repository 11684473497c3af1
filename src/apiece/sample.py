"""Samplers: who takes part in a round, and with which rows. A function of the data and the round alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from apiece import random
from apiece.data.federated import Federated, Ragged
from apiece.method import Round


class Cohort(NamedTuple):
    ids: tuple[int, ...]  # sorted
    train: Ragged  # their training rows, in the order of ids


Sampler = Callable[[Federated, Round], Cohort]


def uniform(data: Federated, round: Round) -> Cohort:
    """`round.cohort_size` different seen clients, each as likely as any other."""
    seen = data.seen_ids
    chosen = random.choose(random.fold(round.key, "cohort"), round.cohort_size, len(seen))
    ids = tuple(int(seen[i]) for i in chosen)
    return Cohort(ids, data.train.take(ids))
