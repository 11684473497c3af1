"""FedPer: Arivazhagan, Aggarwal, Singh, Choudhary, "Federated Learning with Personalization Layers", 2019,
Algorithms 1 (client) and 2 (server).

W_B, the base layers, are shared; W_P, the last layers, are each client's own. Both are trained together.

Departures: all clients take part in the paper; here W_B is the mean over the cohort, and the other clients
keep their W_P. Every W_P starts from one common draw, not each from its own. The paper scores the two parts
joined, the initial model here; the personalized one has trained both once more on the client's data, as in a
round. That is also how a client never met comes to a W_P of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from apiece.layers import LAST_LINEAR, Own, PartlyShared, prefixes
from apiece.local import sgd
from apiece.method import Model, Reply
from apiece.optim import Recipe
from apiece.params import Params
from apiece.shard import Shard
from apiece.task import Task


@dataclass(frozen=True)
class FedPer(PartlyShared):
    """Private head, shared body, trained together; the mean of the bodies, weighted by examples."""

    paper = "Arivazhagan et al. 2019"
    kind = "personalized"

    head: tuple[str, ...] = (LAST_LINEAR,)
    local: Recipe = Recipe(epochs=5)
    personal: Recipe = Recipe()

    def split(self, task: Task, params: Params) -> tuple[Params, Params]:
        """W_P, W_B."""
        return params.split(prefixes(task, self.head))

    def client_update(self, task: Task, broadcast: Model, client: Own, data: Shard) -> Reply:
        W = sgd(task.objective, self.initial(task, broadcast, client), data, self.local)
        return self.reply(task, broadcast, W, weight=data.size)

    def personalize(self, task: Task, broadcast: Model, client: Own, data: Shard) -> Params:
        return sgd(task.objective, self.initial(task, broadcast, client), data, self.personal)
