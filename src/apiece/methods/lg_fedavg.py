"""LG-FedAvg: Liang, Liu, Ziyin, Allen, Auerbach, Brent, Salakhutdinov, Morency, "Think Locally, Act Globally:
Federated Learning with Local and Global Representations", 2020, Algorithm 1.

The mirror image of FedPer: the layers near the input, ℓ_m, are client m's own, and a model g of what they
represent is shared. Both are trained together.

Departures: the auxiliary losses on ℓ_m (self-supervised, fair) are left out. Every ℓ_m starts from one common
draw; to start from a model that FedAvg has trained, write `stages(fedavg,lg_fedavg)`. For examples of a
device never met the paper asks all ℓ_m and averages, which a client cannot do; here such a client starts from
the common draw and trains both parts on its own data, as in a round. So does one that was met, from its ℓ_m.
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
class LGFedAvg(PartlyShared):
    """Private body, shared head, trained together; the mean of the heads, weighted by examples."""

    paper = "Liang et al. 2020"
    kind = "personalized"

    head: tuple[str, ...] = (LAST_LINEAR,)
    local: Recipe = Recipe(epochs=5)
    personal: Recipe = Recipe()

    def split(self, task: Task, params: Params) -> tuple[Params, Params]:
        """ℓ_m, g."""
        g, l_m = params.split(prefixes(task, self.head))
        return l_m, g

    def client_update(self, task: Task, broadcast: Model, client: Own, data: Shard) -> Reply:
        theta = sgd(task.objective, self.initial(task, broadcast, client), data, self.local)
        return self.reply(task, broadcast, theta, weight=data.size)

    def personalize(self, task: Task, broadcast: Model, client: Own, data: Shard) -> Params:
        return sgd(task.objective, self.initial(task, broadcast, client), data, self.personal)
