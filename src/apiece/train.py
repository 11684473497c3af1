"""The round loop."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from apiece import random, tree
from apiece.engines.base import Engine, Federation, client_phase
from apiece.errors import ApieceError
from apiece.method import Broadcast, Round, Server
from apiece.sample import Sampler
from apiece.spec import Uplink


class Closed(NamedTuple):
    """A round that is over."""

    round: Round
    ids: tuple[int, ...]  # the cohort
    server: Server
    bytes_up: int  # of the whole cohort
    bytes_down: int
    finite: Tensor  # per client of the cohort
    metrics: dict[str, Tensor]


@dataclass(frozen=True)
class Training:
    """The rounds of a run, each a function of the server's state before it."""

    engine: Engine
    federation: Federation
    sampler: Sampler
    cohort_size: int
    uplink: Uplink

    def round(self, index: int) -> Round:
        data = self.federation.data
        return Round(
            index=index,
            key=random.fold(self.federation.root, "round", index),
            cohort_size=self.cohort_size,
            population=int(data.seen.sum()),
            examples=int(data.train.sizes[data.seen].sum()),
        )

    def broadcast(self, server: Server, index: int) -> Broadcast:
        return self.federation.method.broadcast(server, self.round(index))

    def rounds(self, server: Server, begin: int, end: int) -> Iterator[Closed]:
        """Close rounds begin … end − 1 one after another."""
        method, task = self.federation.method, self.federation.task
        for index in range(begin, end):
            round = self.round(index)
            cohort = self.sampler(self.federation.data, round)
            broadcast = method.broadcast(server, round)
            outcome = client_phase(self.engine, self.federation, broadcast, cohort, round)
            round = round._replace(replies=outcome.finite.sum())
            updated = method.server_update(task, server, outcome.update, round)
            server = tree.where(outcome.weight > 0, updated, server)
            size = len(cohort.ids)
            up, down = self.uplink(broadcast) * size, tree.nbytes(broadcast) * size
            yield Closed(round, cohort.ids, server, up, down, outcome.finite, outcome.metrics)


def refuse_nan(closed: list[Closed], keep: str) -> None:
    """Stop at the first reply that is not finite; `keep` says what is left to go on from."""
    for done in closed:
        bad = [client for client, fine in zip(done.ids, done.finite.tolist(), strict=True) if not fine]
        if bad:
            raise ApieceError(
                f"round {done.round.index}: the update of client {', '.join(map(str, bad))} is not finite "
                f"(NaN or infinity). Lower the learning rate (--set lr=...), or drop such updates with "
                f"--on-nan skip. {keep}"
            )
