"""Centralized: the baseline that a federation gives up. The seen clients' training data are pooled and
trained on as one; the model is scored on the real clients. A round is `local.epochs` passes over the pool.
"""

from __future__ import annotations

from dataclasses import dataclass

from apiece.local import sgd
from apiece.method import Client, Method, Model, Reply, Round
from apiece.optim import Recipe
from apiece.params import Params
from apiece.shard import Shard
from apiece.task import Task


@dataclass(frozen=True)
class Centralized(Method):
    """One model trained on everybody's data in one place: what privacy costs."""

    paper = "baseline"
    kind = "baseline"
    pooled = True

    local: Recipe = Recipe(epochs=1)
    personal: Recipe = Recipe(epochs=5)

    def init(self, task: Task, params: Params, key: int) -> Model:
        return Model(params)

    def broadcast(self, server: Model, round: Round) -> Model:
        return server

    def client_update(self, task: Task, broadcast: Model, client: Client, data: Shard) -> Reply:
        w = sgd(task.objective, broadcast.params, data, self.local)
        return Reply(w - broadcast.params, model=w)

    def server_update(self, task: Task, server: Model, update: Params, round: Round) -> Model:
        return Model(server.params + update)

    def personalize(self, task: Task, broadcast: Model, client: Client, data: Shard) -> Params:
        return sgd(task.objective, broadcast.params, data, self.personal)
