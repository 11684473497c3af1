"""Reptile: Nichol, Achiam, Schulman, "On First-Order Meta-Learning Algorithms", 2018, Algorithm 2 (batched).

Clients are the tasks: K inner steps whatever the client's size, unweighted mean, outer step.
Departures: the outer step may use any optimizer on the mean update; the default, SGD, is the paper's.
"""

from __future__ import annotations

from dataclasses import dataclass

from apiece.local import sgd
from apiece.method import Client, Method, Model, Reply, Round
from apiece.optim import Recipe, Rule, Stepped
from apiece.params import Params
from apiece.shard import Shard
from apiece.task import Task


@dataclass(frozen=True)
class Reptile(Method):
    """Unweighted mean of the clients' adapted models, K steps each: an initial model that adapts well."""

    paper = "Nichol et al. 2018"
    kind = "meta"

    local: Recipe = Recipe(steps=20)
    personal: Recipe = Recipe()
    outer: Rule = Rule("sgd", lr=1.0)

    def init(self, task: Task, params: Params, key: int) -> Stepped:
        return self.outer.start(params)

    def broadcast(self, server: Stepped, round: Round) -> Model:
        return Model(server.params)

    def client_update(self, task: Task, broadcast: Model, client: Client, data: Shard) -> Reply:
        theta = sgd(task.objective, broadcast.params, data, self.local)
        return Reply(theta - broadcast.params, model=theta)

    def server_update(self, task: Task, server: Stepped, update: Params, round: Round) -> Stepped:
        return self.outer.step(server, update)

    def personalize(self, task: Task, broadcast: Model, client: Client, data: Shard) -> Params:
        return sgd(task.objective, broadcast.params, data, self.personal)
