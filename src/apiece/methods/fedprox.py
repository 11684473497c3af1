"""FedProx: Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, "Federated Optimization in Heterogeneous Networks",
MLSys 2020, Algorithm 2.

Client k minimises h_k(w; w_t) = F_k(w) + (μ/2)‖w − w_t‖² inexactly, w_t being the model it was sent.

Departures: the cohort is drawn uniformly and its mean is weighted by numbers of examples, as in FedAvg; the
paper draws client k with probability n_k / n and takes the plain mean. How inexactly is a number of epochs or
steps, the same for all clients; the paper also lets slow clients do less. The personalized model is the
broadcast one fine-tuned on F_k without the proximal term; the paper has none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from apiece.errors import ApieceError
from apiece.local import sgd
from apiece.method import Client, Method, Model, Reply, Round, Span
from apiece.optim import Recipe
from apiece.params import Params
from apiece.shard import Batch, Shard
from apiece.task import Task


@dataclass(frozen=True)
class FedProx(Method):
    """FedAvg whose clients are held to the model they were sent."""

    paper = "Li et al. 2020"
    kind = "global"
    search: ClassVar = {"local.lr": Span(0.01, 0.5), "mu": Span(0.001, 1.0)}

    mu: float = 0.1
    local: Recipe = Recipe(epochs=5)
    personal: Recipe = Recipe()

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 <= self.mu < math.inf:
            raise ApieceError(f"mu must be finite and not negative, got {self.mu}; 0 is FedAvg")

    def init(self, task: Task, params: Params, key: int) -> Model:
        return Model(params)

    def broadcast(self, server: Model, round: Round) -> Model:
        return server

    def client_update(self, task: Task, broadcast: Model, client: Client, data: Shard) -> Reply:
        w_t = broadcast.params

        def proximal(w: Params, batch: Batch, outputs: Tensor) -> Tensor:
            return self.mu / 2 * (w - w_t).sqnorm()

        h_k = task.penalized(proximal).objective
        w = sgd(h_k, w_t, data, self.local)
        return Reply(w - w_t, weight=data.size, model=w)

    def server_update(self, task: Task, server: Model, update: Params, round: Round) -> Model:
        return Model(server.params + update)

    def personalize(self, task: Task, broadcast: Model, client: Client, data: Shard) -> Params:
        return sgd(task.objective, broadcast.params, data, self.personal)
