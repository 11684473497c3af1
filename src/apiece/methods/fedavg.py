"""FedAvg: McMahan, Moore, Ramage, Hampson, Agüera y Arcas, "Communication-Efficient Learning of Deep
Networks from Decentralized Data", AISTATS 2017, Algorithm 1.

FedSGD is `local=Recipe(batch_size=0, steps=1)`.
Departures: the server steps with an optimizer on the mean update (Reddi et al. 2021); its default, SGD with
lr 1, is the paper's average. The personalized model is the broadcast one fine-tuned on the client's data,
which the paper does not do.
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
class FedAvg(Method):
    """Average of the clients' models, weighted by their number of examples."""

    paper = "McMahan et al. 2017"
    kind = "global"

    local: Recipe = Recipe(epochs=5)
    personal: Recipe = Recipe()
    outer: Rule = Rule("sgd", lr=1.0)

    def init(self, task: Task, params: Params, key: int) -> Stepped:
        return self.outer.start(params)

    def broadcast(self, server: Stepped, round: Round) -> Model:
        return Model(server.params)

    def client_update(self, task: Task, broadcast: Model, client: Client, data: Shard) -> Reply:
        w = sgd(task.objective, broadcast.params, data, self.local)
        return Reply(w - broadcast.params, weight=data.size, model=w)

    def server_update(self, task: Task, server: Stepped, update: Params, round: Round) -> Stepped:
        return self.outer.step(server, update)

    def personalize(self, task: Task, broadcast: Model, client: Client, data: Shard) -> Params:
        return sgd(task.objective, broadcast.params, data, self.personal)
