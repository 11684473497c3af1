"""FedPA: Shen, Kuang, Li, Wang, Lv, Yang, Wu, Wu, "Learning to Aggregate: A Parameterized Aggregator to
Debias Model Aggregation for Cross-Device Federated Learning", submitted to ICLR 2023, Algorithm 1.

LearnedAggregation(FedAvg) with the paper's settings: 5 epochs of Adam, lr 0.01, on the clients; 30 epochs of
lr 0.001 on the aggregator (MovieLens: 5). Proxy batches of 500 are those of the authors' code on FEMNIST.
Departures: those of learned_aggregation.py. The batch size of the clients is not given; 10 is ours. The
personalized model is the broadcast one fine-tuned on the client's data, which the paper does not do.
"""

from __future__ import annotations

from dataclasses import dataclass

from apiece.method import Client, Method, Model, Reduce, Reply, Round, Span, Stacked
from apiece.methods.fedavg import FedAvg
from apiece.optim import Recipe
from apiece.params import Params
from apiece.shard import Shard
from apiece.task import Task
from apiece.wrappers.learned_aggregation import Aggregating, LearnedAggregation


@dataclass(frozen=True)
class FedPA(Method):
    """FedAvg whose average is an aggregator learned on the server's proxy data."""

    paper = "Shen et al. 2023"
    kind = "global"
    needs_proxy = True
    search = {"local.lr": Span(0.001, 0.05), "aggregator.lr": Span(1e-4, 1e-2)}

    local: Recipe = Recipe("adam", lr=0.01, epochs=5)
    personal: Recipe = Recipe()
    aggregator: Recipe = Recipe("adam", lr=0.001, batch_size=500, epochs=30)
    additive: bool = False
    meantime: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "aggregator", self.composed.aggregator)

    @property
    def composed(self) -> LearnedAggregation:
        clients = FedAvg(self.local, self.personal)
        return LearnedAggregation(clients, self.aggregator, self.additive, self.meantime)

    def init(self, task: Task, params: Params, key: int) -> Aggregating:
        return self.composed.init(task, params, key)

    def broadcast(self, server: Aggregating, round: Round) -> Model:
        model: Model = self.composed.broadcast(server, round)
        return model

    def client_update(self, task: Task, broadcast: Model, client: Client, data: Shard) -> Reply:
        return self.composed.client_update(task, broadcast, client, data)

    def reduce(self, broadcast: Model) -> Reduce:
        return self.composed.reduce(broadcast)

    def server_update(self, task: Task, server: Aggregating, update: Stacked, round: Round) -> Aggregating:
        return self.composed.server_update(task, server, update, round)

    def personalize(self, task: Task, broadcast: Model, client: Client, data: Shard) -> Params:
        return self.composed.personalize(task, broadcast, client, data)
