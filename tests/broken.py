"""Methods for tests: one that reports sizes, and those that check_method must refuse, a rule broken each."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import grad

from apiece import MEAN, Batch, Method, Model, Params, Recipe, Reply, Round, Shard, Task, Wrapper, random, sgd
from apiece.local import loop
from apiece.method import Reduce


@dataclass(frozen=True)
class UpdateOf(Method):
    """Each client's update is its number of examples; the server keeps what was reduced."""

    reduction: Reduce = MEAN
    bad_size: int = -1
    raises: bool = False
    local: Recipe = Recipe()
    personal: Recipe = Recipe()

    def init(self, task: Task, params: Params, key: int) -> Model:
        return Model(Params({"total": torch.zeros(())}))

    def broadcast(self, server: Model, round: Round) -> Model:
        return server

    def reduce(self, broadcast: Model) -> Reduce:
        return self.reduction

    def client_update(self, task: Task, broadcast: Model, client: tuple[()], data: Shard) -> Reply:
        if self.raises:
            raise RuntimeError("broken on purpose")
        size = torch.where(data.size == self.bad_size, torch.nan, data.size.float())
        return Reply(size, weight=data.size)

    def server_update(self, task: Task, server: Model, update: Tensor, round: Round) -> Model:
        return Model(Params({"total": update}))

    def personalize(self, task: Task, broadcast: Model, client: tuple[()], data: Shard) -> Params:
        return broadcast.params


class Averaging(Method):
    """What the broken methods below share with FedAvg; abstract."""

    local: Recipe
    personal: Recipe

    def init(self, task: Task, params: Params, key: int) -> Model:
        return Model(params)

    def broadcast(self, server: Model, round: Round) -> Any:
        return server

    def server_update(self, task: Task, server: Model, update: Params, round: Round) -> Model:
        return Model(server.params + update)

    def personalize(self, task: Task, broadcast: Model, client: Any, data: Shard) -> Params:
        return sgd(task.objective, broadcast.params, data, self.personal)


@dataclass(frozen=True)
class HandWrittenLoop(Averaging):
    """A plain `for` over batches: the prox term pulls on padded batches too."""

    local: Recipe = Recipe(epochs=2)
    personal: Recipe = Recipe()

    def client_update(self, task: Task, broadcast: Model, client: Any, data: Shard) -> Reply:
        w0 = w = broadcast.params
        for batch in data.batches(self.local.batch_size, self.local.epochs):
            w = w - self.local.lr * (grad(task.objective)(w, batch) + 0.1 * (w - w0))
        return Reply(w - w0, weight=data.size, model=w)


@dataclass(frozen=True)
class CounterOutsideTheCarry(Averaging):
    """A learning rate that decays by a Python counter: padded batches count as well."""

    local: Recipe = Recipe(epochs=2)
    personal: Recipe = Recipe()

    def client_update(self, task: Task, broadcast: Model, client: Any, data: Shard) -> Reply:
        count = 0

        def step(w: Params, batch: Batch) -> Params:
            nonlocal count
            count += 1
            return w - self.local.lr / count * grad(task.objective)(w, batch)

        w = loop(step, broadcast.params, data.batches(self.local.batch_size, self.local.epochs))
        return Reply(w - broadcast.params, weight=data.size, model=w)


@dataclass(frozen=True)
class MutatedBroadcast(Averaging):
    """Trains in place in the tensors that all clients share."""

    local: Recipe = Recipe()
    personal: Recipe = Recipe()

    def client_update(self, task: Task, broadcast: Model, client: Any, data: Shard) -> Reply:
        w = sgd(task.objective, broadcast.params, data, self.local)
        update = w - broadcast.params
        for name, t in broadcast.params.items():
            t.copy_(w[name])
        return Reply(update, weight=data.size)


class Seen(NamedTuple):
    losses: Tensor


@dataclass(frozen=True)
class GrowingState(Averaging):
    """Appends to its state every round."""

    local: Recipe = Recipe()
    personal: Recipe = Recipe()

    def init_client(self, task: Task, broadcast: Model, start: Params, key: Tensor) -> Seen:
        return Seen(torch.zeros(1))

    def client_update(self, task: Task, broadcast: Model, client: Seen, data: Shard) -> Reply:
        w = sgd(task.objective, broadcast.params, data, self.local)
        return Reply(w - broadcast.params, Seen(torch.cat([client.losses, torch.zeros(1)])), weight=data.size)


class Mean(NamedTuple):
    loss: Tensor


@dataclass(frozen=True)
class DividesByTheSize(Averaging):
    """Keeps a mean that a client without examples has none of."""

    local: Recipe = Recipe()
    personal: Recipe = Recipe()

    def init_client(self, task: Task, broadcast: Model, start: Params, key: Tensor) -> Mean:
        return Mean(torch.zeros(()))

    def client_update(self, task: Task, broadcast: Model, client: Mean, data: Shard) -> Reply:
        w = sgd(task.objective, broadcast.params, data, self.local)
        everything = data.all()
        losses = task.losses(task.predict(w, everything.x), everything.y) * everything.weight
        return Reply(w - broadcast.params, Mean(losses.sum() / data.size), weight=data.size)


@dataclass(frozen=True)
class FieldWithoutType(Averaging):
    """A class attribute where a setting was meant."""

    local: Recipe = Recipe()
    personal: Recipe = Recipe()
    step = 0.5

    def client_update(self, task: Task, broadcast: Model, client: Any, data: Shard) -> Reply:
        w = sgd(task.objective, broadcast.params, data, self.local)
        return Reply(self.step * (w - broadcast.params), weight=data.size)


class Scheduled(NamedTuple):
    params: Params
    lr: Any


def _scheduled_update(task: Task, broadcast: Scheduled, data: Shard, recipe: Recipe) -> Reply:
    w = sgd(task.objective, broadcast.params, data, recipe._replace(lr=0.1 / (1 + broadcast.lr)))
    return Reply(w - broadcast.params, weight=data.size)


@dataclass(frozen=True)
class FloatInBroadcast(Averaging):
    """A schedule sent as a Python float: a captured program would replay its first value."""

    local: Recipe = Recipe()
    personal: Recipe = Recipe()

    def broadcast(self, server: Model, round: Round) -> Scheduled:
        return Scheduled(server.params, 0.1 * round.index)

    def client_update(self, task: Task, broadcast: Scheduled, client: Any, data: Shard) -> Reply:
        return _scheduled_update(task, broadcast, data, self.local)


@dataclass(frozen=True)
class RoundIndexInBroadcast(Averaging):
    """The same with the round's number."""

    local: Recipe = Recipe()
    personal: Recipe = Recipe()

    def broadcast(self, server: Model, round: Round) -> Scheduled:
        return Scheduled(server.params, round.index)

    def client_update(self, task: Task, broadcast: Scheduled, client: Any, data: Shard) -> Reply:
        return _scheduled_update(task, broadcast, data, self.local)


@dataclass(frozen=True)
class FlatDropoutCounter(Averaging):
    """Draws dropout from a number that counts every batch, padded ones too."""

    local: Recipe = Recipe(epochs=2)
    personal: Recipe = Recipe()

    def client_update(self, task: Task, broadcast: Model, client: Any, data: Shard) -> Reply:
        numbered = (
            batch._replace(key=random.fold(data.key, number))
            for number, batch in enumerate(data.batches(self.local.batch_size, self.local.epochs))
        )
        w = loop(lambda w, b: w - self.local.lr * grad(task.objective)(w, b), broadcast.params, numbered)
        return Reply(w - broadcast.params, weight=data.size)


@dataclass(frozen=True)
class ReadsTheProxy(Averaging):
    """A client trains on the server's own data."""

    local: Recipe = Recipe()
    personal: Recipe = Recipe()

    def client_update(self, task: Task, broadcast: Model, client: Any, data: Shard) -> Reply:
        assert task.proxy is not None, "no proxy"
        w = sgd(task.objective, broadcast.params, task.proxy, self.local)
        return Reply(w - broadcast.params, weight=data.size)


@dataclass(frozen=True)
class SameKeyEveryRound(Averaging):
    """Replaces the round's key by a constant: every round the same orders and masks."""

    local: Recipe = Recipe()
    personal: Recipe = Recipe()

    def client_update(self, task: Task, broadcast: Model, client: Any, data: Shard) -> Reply:
        constant = Shard(data._x, data._y, data._rows._replace(key=random.as_key(0)), data._even)
        w = sgd(task.objective, broadcast.params, constant, self.local)
        return Reply(w - broadcast.params, weight=data.size)


@dataclass(frozen=True)
class DroppedExampleWeight(Averaging):
    """Averages its loss over padding as well."""

    local: Recipe = Recipe()
    personal: Recipe = Recipe()

    def client_update(self, task: Task, broadcast: Model, client: Any, data: Shard) -> Reply:
        def objective(w: Params, batch: Batch) -> Tensor:
            return task.losses(task.predict(w, batch.x, batch.key), batch.y).mean()

        w = sgd(objective, broadcast.params, data, self.local)
        return Reply(w - broadcast.params, weight=data.size)


@dataclass(frozen=True)
class DroppedReplyWeight(Wrapper):
    """Builds a new reply and forgets the inner one's weight."""

    inner: Method

    def client_update(self, task: Task, broadcast: Any, client: Any, data: Shard) -> Reply:
        reply = self.inner.client_update(task, broadcast, client, data)
        return Reply(reply.update, reply.state, model=reply.model)


@dataclass(frozen=True)
class ForgetsInnerState(Wrapper):
    """Hands back the state it was given instead of the inner method's new one."""

    inner: Method

    def client_update(self, task: Task, broadcast: Any, client: Any, data: Shard) -> Reply:
        return self.inner.client_update(task, broadcast, client, data)._replace(state=client)


@dataclass(frozen=True)
class HiddenState(Averaging):
    """Remembers in a list what belongs into its state."""

    local: Recipe = Recipe()
    personal: Recipe = Recipe()
    calls = []

    def client_update(self, task: Task, broadcast: Model, client: Any, data: Shard) -> Reply:
        self.calls.append(1)
        w = sgd(task.objective, broadcast.params, data, self.local)
        return Reply((w - broadcast.params) * (1.0 / len(self.calls)), weight=data.size)


@dataclass(frozen=True)
class BranchesOnATensor(Averaging):
    """A Python `if` on what differs by client."""

    local: Recipe = Recipe()
    personal: Recipe = Recipe()

    def client_update(self, task: Task, broadcast: Model, client: Any, data: Shard) -> Reply:
        update = sgd(task.objective, broadcast.params, data, self.local) - broadcast.params
        if update.sqnorm() > 1.0:
            update = 0.5 * update
        return Reply(update, weight=data.size)


@dataclass(frozen=True)
class RepliesWithParams(Averaging):
    """Hands back the update alone."""

    local: Recipe = Recipe()
    personal: Recipe = Recipe()

    def client_update(self, task: Task, broadcast: Model, client: Any, data: Shard) -> Any:
        return sgd(task.objective, broadcast.params, data, self.local) - broadcast.params


class Elsewhere(nn.Linear):
    """Does something else in every process but the one it was made in."""

    def __init__(self, deed: Callable[[], object]) -> None:
        super().__init__(5, 3)
        self.deed, self.home = deed, os.getpid()

    def forward(self, x: Tensor) -> Tensor:
        if os.getpid() != self.home:
            self.deed()
        return super().forward(x)
