"""FedOpt: Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan, "Adaptive Federated Optimization",
ICLR 2021, Algorithm 2: FedAdam, FedYogi and FedAdagrad.

Clients are FedAvg's. The server reads Δ, the mean of their moves, as a negative gradient and takes an
adaptive step, without bias correction.

Departures: v is built from Δ², as in the authors' code and their correction of Algorithm 2; the ICLR print
squares the momentum of Δ there. The mean is weighted by numbers of examples, as in the paper's experiments;
Algorithm 2 prints the plain mean. v starts at τ², the least that the paper allows. The personalized model is
the broadcast one fine-tuned on the client's data; the paper has none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch

from apiece.errors import ApieceError, unknown
from apiece.local import sgd
from apiece.method import Client, Method, Model, Reply, Round, Span
from apiece.optim import Recipe
from apiece.params import Params
from apiece.shard import Shard
from apiece.task import Task

OPTIMIZERS = ("adagrad", "adam", "yogi")


class Adaptive(NamedTuple):
    """The server's state."""

    params: Params  # x_t
    m: Params  # m_{t−1}
    v: Params  # v_{t−1}


@dataclass(frozen=True)
class FedOpt(Method):
    """FedAvg whose server steps by Adam, Yogi or Adagrad along the mean update."""

    paper = "Reddi et al. 2021"
    kind = "global"
    search: ClassVar = {"local.lr": Span(0.01, 0.5), "eta": Span(0.003, 0.3)}

    optimizer: str = "adam"
    eta: float = 0.01
    b1: float = 0.9
    b2: float = 0.99
    tau: float = 1e-3
    local: Recipe = Recipe(epochs=5)
    personal: Recipe = Recipe()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.optimizer not in OPTIMIZERS:
            raise unknown("server optimizer", self.optimizer, OPTIMIZERS)
        if not (0 < self.eta < math.inf and 0 < self.tau < math.inf):
            raise ApieceError(f"eta and tau must be positive, got eta={self.eta}, tau={self.tau}")
        if not (0 <= self.b1 < 1 and 0 <= self.b2 < 1):
            raise ApieceError(f"b1 and b2 must lie in [0, 1), got b1={self.b1}, b2={self.b2}")

    def init(self, task: Task, params: Params, key: int) -> Adaptive:
        return Adaptive(params, params.zeros(), params.zeros() + self.tau**2)

    def broadcast(self, server: Adaptive, round: Round) -> Model:
        return Model(server.params)

    def client_update(self, task: Task, broadcast: Model, client: Client, data: Shard) -> Reply:
        x = sgd(task.objective, broadcast.params, data, self.local)
        return Reply(x - broadcast.params, weight=data.size, model=x)

    def server_update(self, task: Task, server: Adaptive, update: Params, round: Round) -> Adaptive:
        """`update` is Δ_t."""
        m = self.b1 * server.m + (1 - self.b1) * update
        v = self.second_moment(server.v, update * update)
        x = server.params + self.eta * m / (v.map(torch.sqrt) + self.tau)
        return Adaptive(x, m, v)

    def second_moment(self, v: Params, square: Params) -> Params:
        """v_t from v_{t−1} and Δ_t²."""
        if self.optimizer == "adagrad":
            return v + square
        if self.optimizer == "yogi":
            return v - (1 - self.b2) * square * (v - square).map(torch.sign)
        return self.b2 * v + (1 - self.b2) * square

    def personalize(self, task: Task, broadcast: Model, client: Client, data: Shard) -> Params:
        return sgd(task.objective, broadcast.params, data, self.personal)
