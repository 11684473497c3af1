"""The round loop."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from torch import Tensor

from apiece import random, tree
from apiece.data.arena import Arena
from apiece.data.federated import Clients, Ints
from apiece.engines.base import Engine, Federation, Member, Outcome, client_phase
from apiece.errors import ApieceError
from apiece.method import Broadcast, Method, Round, Server
from apiece.params import Params
from apiece.sample import Cohort, Sampler
from apiece.spec import Shapes
from apiece.store import Store
from apiece.task import Task
from apiece.tree import Tree


class Closed(NamedTuple):
    """A round that is over."""

    round: Round
    ids: tuple[int, ...]  # the cohort
    server: Server
    bytes_up: int  # of the whole cohort
    bytes_down: int
    finite: Tensor  # per client of the cohort
    metrics: dict[str, Tensor]
    labels: Ints  # training examples of the cohort, by class


def describe(index: int, data: Clients, cohort_size: int, root: int) -> Round:
    """What the server knows of round `index` when it begins."""
    return Round(
        index=index,
        key=random.fold(root, "round", index),
        cohort_size=cohort_size,
        population=len(data.seen_ids),
        examples=data.examples,
    )


@dataclass(frozen=True)
class Training:
    """The rounds of a run, each a function of the server's state before it."""

    engine: Engine
    federation: Federation
    sampler: Sampler
    cohort_size: int
    shapes: Shapes
    arena: Arena = field(default_factory=Arena)  # for the cohort that is open

    def round(self, index: int) -> Round:
        return describe(index, self.federation.data, self.cohort_size, self.federation.root)

    def broadcast(self, server: Server, index: int) -> Broadcast:
        return self.federation.method.broadcast(server, self.round(index))

    def rounds(self, server: Server, begin: int, end: int) -> Iterator[Closed]:
        """Close rounds begin … end − 1 one after another."""
        for (closed,) in together([self], [server], begin, end):
            yield closed

    def drawn(self, round: Round, into: Arena | None = None) -> Cohort:
        """The cohort of a round, its examples where they are computed."""
        data = self.federation.data
        cohort = self.sampler(data.kept, round)
        return cohort._replace(data=data.brought(cohort.data, into))

    def open(self, server: Server, index: int) -> Member:
        """The round begins, and the one that was opened before is over: all its chunks have been answered."""
        round = self.round(index)
        cohort = self.drawn(round, self.arena if self.engine.arenas else None)
        broadcast = self.federation.method.broadcast(server, round)
        return Member(replace(self.federation, data=cohort.data), broadcast, cohort, round)

    def close(self, server: Server, opened: Member, outcome: Outcome) -> Closed:
        method, cohort, data = self.federation.method, opened.cohort, opened.cohort.data
        round = opened.round._replace(replies=outcome.finite.sum())
        with self.engine.serving():
            updated = method.server_update(self.federation.task, server, outcome.update, round)
        # Contiguous, as a checkpoint gives them back: sums over another layout may round otherwise.
        server = tree.contiguous(tree.where(outcome.weight > 0, updated, server))
        size = 0 if method.pooled else len(cohort.ids)
        up, down = self.shapes.of(opened.broadcast).bytes_up * size, tree.nbytes(opened.broadcast) * size
        labels = data.counts(cohort.train.rows)
        return Closed(round, cohort.ids, server, up, down, outcome.finite, outcome.metrics, labels)


def together(
    trainings: Sequence[Training], servers: Sequence[Server], begin: int, end: int
) -> Iterator[list[Closed]]:
    """Close rounds of replicas side by side: runs of one experiment with different seeds.

    Their clients are computed as one cohort where what they are sent agrees in its static fields.
    """
    for index in range(begin, end):
        opened = [training.open(server, index) for training, server in zip(trainings, servers, strict=True)]
        groups: dict[Hashable, list[int]] = {}
        for at, member in enumerate(opened):
            groups.setdefault(_kind(member), []).append(at)
        outcomes: dict[int, Outcome] = {}
        for group in groups.values():
            found = client_phase(trainings[0].engine, *(opened[at] for at in group))
            outcomes.update(zip(group, found, strict=True))
        closed = [
            training.close(server, opened[at], outcomes[at])
            for at, (training, server) in enumerate(zip(trainings, servers, strict=True))
        ]
        servers = [one.server for one in closed]
        yield closed


def _kind(member: Member) -> Hashable:
    """What members of one client phase must have in common."""
    static = [leaf for leaf in tree.leaves(member.broadcast) if not isinstance(leaf, Tensor)]
    return tuple(static), tuple(map(id, tree.leaves((member.cohort.data.x, member.cohort.data.y))))


def assemble(
    engine: Engine,
    method: Method,
    task: Task,
    start: Params,
    data: Clients,
    cohort_size: int,
    root: int,
    sampler: Sampler,
    store: Callable[[Tree], Store],
) -> tuple[Training, Server]:
    """A training and the server's first state; `store` makes a store for client states of a shape."""
    server = method.init(task, start, random.fold(root, "method"))
    broadcast = method.broadcast(server, describe(0, data, cohort_size, root))
    shapes = Shapes(method, task, start, data.x, data.y)
    states = store(shapes.of(broadcast).state)
    federation = Federation(method, task, start, data, states, root)
    return Training(engine, federation, sampler, cohort_size, shapes), server


def refuse_nan(closed: list[Closed], keep: str) -> None:
    """Stop at the first reply that is not finite; `keep` says what is left to go on from."""
    for done in closed:
        bad = [client for client, fine in zip(done.ids, done.finite.tolist(), strict=True) if not fine]
        if bad:
            raise ApieceError(
                f"round {done.round.index + 1}: the update of client {', '.join(map(str, bad))} is not "
                f"finite (NaN or infinity). Lower the learning rate (--set lr=...), or drop such updates "
                f"with --on-nan skip. {keep}"
            )
