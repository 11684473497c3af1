"""Stages: one method after another, as in Personalized FedAvg (Jiang et al. 2019, Algorithm 2), but any two.

Rounds before `switch` are the first method's; the others are the second's, which counts them from 0, so that
its schedules begin with it and stages nest: Stages(a, Stages(b, c, 100), 200) runs a in rounds 0–199, b in
200–299, then c. The second starts from the first's newcomer model, the initial model of a client never met.

Departures: the paper's two stages keep no client state. Here the states of both lie side by side, in one
shape from round 0 on; a client's state in the second stage begins when the client first takes part in it.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from apiece import tree
from apiece.errors import ApieceError
from apiece.method import Broadcast, Client, Method, Reduce, Reply, Round, Server, newcomer
from apiece.optim import Recipe
from apiece.params import Params
from apiece.random import as_key, fold
from apiece.shard import Shard
from apiece.task import Task
from apiece.tree import Tree


class StageServer(NamedTuple):
    """What the server keeps of one stage."""

    server: Server
    start: Params  # what `init` got
    outline: Tree  # its client state without elements: a leaf of shape s has shape (0, *s)


class StagedServer(NamedTuple):
    first: StageServer
    then: StageServer  # until it begins, what it would begin with


class StagedBroadcast(NamedTuple):
    second: bool
    active: Broadcast  # the active stage's
    start: Tree  # what the second stage's `init` got, while clients may need it; else ()
    outlines: tuple[Tree, Tree]  # no bytes


class StagedClient(NamedTuple):
    first: Client
    then: Client  # zeros until the client joins
    joined: Tree  # 0-d bool: has it taken part in the second stage? () where that keeps no client state
    key: Tree  # the client's own, for the moment it joins; () likewise


def _begin(method: Method, task: Task, params: Params, key: int) -> StageServer:
    server = method.init(task, params, key)
    anyone = Round(index=0, key=key, cohort_size=1, population=1, examples=1)
    broadcast = method.broadcast(server, anyone)
    client = method.init_client(task.for_clients(), broadcast, params, as_key(key, task.device))
    return StageServer(server, params, tree.map(lambda leaf: leaf.new_empty((0, *leaf.shape)), client))


def _newcomer(method: Method, task: Task, stage: StageServer, round: Round) -> Params:
    """The newcomer model of a stage at a round."""
    key = as_key(fold(round.key, "newcomer"), task.device)
    return newcomer(method, task, method.broadcast(stage.server, round), stage.start, key)


def _blank(outline: Tree) -> Client:
    return tree.map(lambda leaf: leaf.new_zeros(leaf.shape[1:]), outline)


class Staged(Method):
    """What methods of two stages share; their fields are those of `__init__`, which a dataclass writes."""

    first: Method
    then: Method
    switch: int

    @abstractmethod
    def __init__(self, first: Method, then: Method, switch: int) -> None: ...

    def __post_init__(self) -> None:
        for stage in (self.first, self.then):
            if not isinstance(stage, Method):
                raise TypeError(f"{type(self).__name__} runs methods one after another, got {stage!r}")
            if stage.pooled:
                raise ApieceError(f"{type(stage).__name__} trains on pooled data: it cannot be a stage")
        if self.switch < 1:
            raise ApieceError(f"switch, the length of the first stage, must be at least 1, got {self.switch}")

    @property
    def needs_proxy(self) -> bool:  # type: ignore[override]
        return self.first.needs_proxy or self.then.needs_proxy

    @property
    def local(self) -> Recipe:  # type: ignore[override]
        return _by_epochs(self.first.local, self.then.local)

    @property
    def personal(self) -> Recipe:  # type: ignore[override]
        return _by_epochs(self.first.personal, self.then.personal)

    def init(self, task: Task, params: Params, key: int) -> StagedServer:
        then = _begin(self.then, task, params, fold(key, "then"))
        return StagedServer(_begin(self.first, task, params, key), then)

    def init_client(self, task: Task, broadcast: StagedBroadcast, start: Params, key: Tensor) -> StagedClient:
        first, then = (_blank(outline) for outline in broadcast.outlines)
        if not broadcast.second:
            first = self.first.init_client(task, broadcast.active, start, key)
        if not tree.leaves(then):
            return StagedClient(first, then, (), ())
        return StagedClient(first, then, torch.zeros((), dtype=torch.bool, device=key.device), key)

    def broadcast(self, server: StagedServer, round: Round) -> StagedBroadcast:
        outlines = server.first.outline, server.then.outline
        if round.index < self.switch:
            return StagedBroadcast(False, self.first.broadcast(server.first.server, round), (), outlines)
        active = self.then.broadcast(server.then.server, self._own(round))
        start = server.then.start if tree.leaves(server.then.outline) else ()
        return StagedBroadcast(True, active, start, outlines)

    def client_update(
        self, task: Task, broadcast: StagedBroadcast, client: StagedClient, data: Shard
    ) -> Reply:
        state = self._state(task, broadcast, client)
        reply = self._active(broadcast).client_update(task, broadcast.active, state, data)
        if broadcast.second:
            joined = tree.map(torch.ones_like, client.joined)
            return reply._replace(state=client._replace(then=reply.state, joined=joined))
        return reply._replace(state=client._replace(first=reply.state))

    def decode(self, task: Task, broadcast: StagedBroadcast, update: Tree) -> Tree:
        return self._active(broadcast).decode(task, broadcast.active, update)

    def reduce(self, broadcast: StagedBroadcast) -> Reduce:
        return self._active(broadcast).reduce(broadcast.active)

    def server_update(self, task: Task, server: StagedServer, update: Tree, round: Round) -> StagedServer:
        if round.index >= self.switch:
            after = self.then.server_update(task, server.then.server, update, self._own(round))
            return server._replace(then=server.then._replace(server=after))
        after = self.first.server_update(task, server.first.server, update, round)
        first = server.first._replace(server=after)
        # In every round, for the last may be without replies, and then the server keeps what it had before.
        model = _newcomer(self.first, task, first, round._replace(index=round.index + 1))
        return StagedServer(first, _begin(self.then, task, model, fold(round.key, "then")))

    def initial(self, task: Task, broadcast: StagedBroadcast, client: StagedClient) -> Params:
        state = self._state(task, broadcast, client)
        return self._active(broadcast).initial(task, broadcast.active, state)

    def personalize(
        self, task: Task, broadcast: StagedBroadcast, client: StagedClient, data: Shard
    ) -> Params:
        state = self._state(task, broadcast, client)
        return self._active(broadcast).personalize(task, broadcast.active, state, data)

    def _own(self, round: Round) -> Round:
        """A round of the whole as the second stage counts it; its key is already like no other's."""
        return round._replace(index=round.index - self.switch)

    def _active(self, broadcast: StagedBroadcast) -> Method:
        return self.then if broadcast.second else self.first

    def _state(self, task: Task, broadcast: StagedBroadcast, client: StagedClient) -> Client:
        """The client's state in the active stage."""
        if not broadcast.second:
            return client.first
        if not tree.leaves(client.then):
            return client.then
        key: Tensor = client.key
        fresh = self.then.init_client(task, broadcast.active, broadcast.start, fold(key, "then"))
        return tree.where(client.joined, client.then, fresh)


def _by_epochs(first: Recipe, then: Recipe) -> Recipe:
    """Engines chunk a cohort by one recipe: of the two, one whose work depends on the client's size."""
    return then if first.steps else first


@dataclass(frozen=True)
class Stages(Staged):
    """One method, then another that starts from its model."""

    paper = "Jiang et al. 2019"
    kind = "meta"
    search = {}  # its stages have theirs

    first: Method
    then: Method
    switch: int = 25
