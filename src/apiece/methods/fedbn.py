"""FedBN: Li, Jiang, Zhang, Kamp, Dou, "FedBN: Federated Learning on Non-IID Features via Local Batch
Normalization", ICLR 2021, Algorithm 1.

FedAvg whose clients keep their normalization layers: all layers are trained, all others are averaged.

Departures: the paper's layers are BatchNorm: scale, shift and running statistics. This library refuses
BatchNorm; the private layers are scale and shift of GroupNorm, LayerNorm or RMSNorm, which have no running
statistics. All clients take part in the paper; here the plain mean 1/K Σ_k is over the clients of the cohort
that have examples. The paper scores what Algorithm 1 leaves with a client, the initial model here; the
personalized one has trained all layers once more on the client's data. A client never met starts from the
normalization layers of the common start.
"""

from __future__ import annotations

from dataclasses import dataclass

from apiece.layers import NORMALIZATION, Own, PartlyShared, prefixes
from apiece.local import sgd
from apiece.method import Model, Reply
from apiece.optim import Recipe
from apiece.params import Params
from apiece.shard import Shard
from apiece.task import Task


@dataclass(frozen=True)
class FedBN(PartlyShared):
    """Private normalization layers; the plain mean of all others. Needs a model that has such layers."""

    paper = "Li et al. 2021"
    kind = "personalized"

    private: tuple[str, ...] = (NORMALIZATION,)
    local: Recipe = Recipe(epochs=5)
    personal: Recipe = Recipe()

    def split(self, task: Task, params: Params) -> tuple[Params, Params]:
        return params.split(prefixes(task, self.private))

    def client_update(self, task: Task, broadcast: Model, client: Own, data: Shard) -> Reply:
        w = sgd(task.objective, self.initial(task, broadcast, client), data, self.local)
        return self.reply(task, broadcast, w, weight=data.size > 0)

    def personalize(self, task: Task, broadcast: Model, client: Own, data: Shard) -> Params:
        return sgd(task.objective, self.initial(task, broadcast, client), data, self.personal)
