"""Ditto: Li, Hu, Beirami, Smith, "Ditto: Fair and Robust Federated Learning Through Personalization", ICML
2021, Algorithm 1.

    v_k minimises h_k(v; w*) = F_k(v) + (λ/2)‖v − w*‖²,  w* the minimum of FedAvg's objective

Two models: w is trained by FedAvg; v_k stays with client k and is held to the w that it is sent.

Departures: the paper leaves v_k^0 open. Here v_k starts from the w that the client is first sent: that is
w^0 in round 0, and a client never met has something to start from. UPDATE_GLOBAL and AGGREGATE are
FedAvg's; the s steps of v_k follow `personal`, by any optimizer. The deployed v_k has trained once more,
towards the latest w.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from apiece.errors import ApieceError
from apiece.local import sgd
from apiece.method import Method, Model, Reply, Round, Span
from apiece.optim import Recipe
from apiece.params import Params
from apiece.shard import Batch, Shard
from apiece.task import Task


class Own(NamedTuple):
    v: Params  # v_k


@dataclass(frozen=True)
class Ditto(Method):
    """FedAvg, and beside it a model per client that is held to the shared one."""

    paper = "Li et al. 2021"
    kind = "personalized"
    search = {"local.lr": Span(0.01, 0.5), "lam": Span(0.01, 2.0)}

    lam: float = 0.1
    local: Recipe = Recipe(epochs=5)  # of w
    personal: Recipe = Recipe()  # of v_k

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.lam < math.inf:
            raise ApieceError(f"lam must be finite and not negative, got {self.lam}; 0 is training alone")

    def init(self, task: Task, params: Params, key: int) -> Model:
        return Model(params)

    def init_client(self, task: Task, broadcast: Model, start: Params, key: Tensor) -> Own:
        return Own(broadcast.params)

    def broadcast(self, server: Model, round: Round) -> Model:
        return server

    def client_update(self, task: Task, broadcast: Model, client: Own, data: Shard) -> Reply:
        w_t = broadcast.params
        w = sgd(task.objective, w_t, data, self.local)
        v = self.personalize(task, broadcast, client, data)
        return Reply(w - w_t, Own(v), weight=data.size, model=v)

    def server_update(self, task: Task, server: Model, update: Params, round: Round) -> Model:
        return Model(server.params + update)

    def initial(self, task: Task, broadcast: Model, client: Own) -> Params:
        return client.v

    def personalize(self, task: Task, broadcast: Model, client: Own, data: Shard) -> Params:
        def held(v: Params, batch: Batch, outputs: Tensor) -> Tensor:
            return self.lam / 2 * (v - broadcast.params).sqnorm()

        return sgd(task.penalized(held).objective, client.v, data, self.personal)
