"""Local: every client trains alone from the common start; nothing is sent. The baseline of every paper.

`personal.epochs` is the whole training. An experiment that does not set it gives Local as many epochs as
FedAvg's average client trains: rounds × cohort / seen clients × local.epochs.
"""

from __future__ import annotations

from dataclasses import dataclass

from apiece.local import sgd
from apiece.method import Method, Model, Reply, Round
from apiece.optim import Recipe
from apiece.params import Params
from apiece.shard import Shard
from apiece.task import Task


@dataclass(frozen=True)
class Local(Method):
    """No federation: each client trains on its own data only."""

    paper = "baseline"
    kind = "baseline"

    local: Recipe = Recipe(epochs=5)
    personal: Recipe = Recipe()

    def init(self, task: Task, params: Params, key: int) -> Model:
        return Model(params)

    def init_client(self, task: Task, broadcast: tuple[()], start: Params, key: object) -> Model:
        return Model(start)

    def broadcast(self, server: Model, round: Round) -> tuple[()]:
        return ()

    def client_update(self, task: Task, broadcast: tuple[()], client: Model, data: Shard) -> Reply:
        return Reply((), client)

    def server_update(self, task: Task, server: Model, update: tuple[()], round: Round) -> Model:
        return server

    def initial(self, task: Task, broadcast: tuple[()], client: Model) -> Params:
        return client.params

    def personalize(self, task: Task, broadcast: tuple[()], client: Model, data: Shard) -> Params:
        return sgd(task.objective, client.params, data, self.personal)
