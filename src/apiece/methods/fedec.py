"""FedEC: Lan, Chen, Xie, Chen, He, Zhang, Chen, Xu, "Elastically-Constrained Meta-Learner for Federated
Learning", 2023, Algorithm 1.

Reptile with a memory: client i adapts φ under l_i(θ) + α·c_i(θ, θ̂_i), θ̂_i being its adapted model of the last
round it took part in. The rows FedEC, FedEC-l2 and FedEC-wo of Table 2 are constraint="kl", constraint="l2"
and alpha=0.

Departures: the branches of lines 13–16 are swapped in print; they are read as Eq. 6, so a client's first
round has no constraint. τ ("steps" in the algorithm, "epochs" in the text) is `local.epochs`. The outer step
may use any optimizer on the mean update; the default, SGD, is Eq. 8. The paper writes no formula for L2: here
c_i = ‖θ − θ̂_i‖². It gives no α, τ or step sizes: the defaults are ours. θ̂_i predicts without dropout. A
client without examples replies zeros and remembers nothing. The paper scores a client of the cohort by the
model it sent and leaves the others open: here everybody adapts φ afresh under its own constraint.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from apiece.local import sgd
from apiece.method import Method, Model, Reply, Round, Span
from apiece.optim import Recipe, Rule, Stepped
from apiece.params import Params
from apiece.penalty import Memory, check_elastic, elastic
from apiece.shard import Shard
from apiece.task import Task


@dataclass(frozen=True)
class FedEC(Method):
    """Reptile whose clients are held elastically to what their own last model predicts."""

    paper = "Lan et al. 2023"
    kind = "meta"
    search = {"local.lr": Span(0.01, 0.5), "alpha": Span(0.05, 5.0)}

    alpha: float = 0.5
    constraint: str = "kl"
    local: Recipe = Recipe(epochs=5)
    personal: Recipe = Recipe()
    outer: Rule = Rule("sgd", lr=1.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_elastic(self.alpha, self.constraint)

    def init(self, task: Task, params: Params, key: int) -> Stepped:
        return self.outer.start(params)

    def init_client(self, task: Task, broadcast: Model, start: Params, key: Tensor) -> Memory:
        return Memory(start, torch.zeros((), device=key.device))

    def broadcast(self, server: Stepped, round: Round) -> Model:
        return Model(server.params)

    def adapt(self, task: Task, phi: Params, memory: Memory, data: Shard, tau: Recipe) -> Params:
        """InnerUpdate_i, lines 11–17."""
        l_tilde = elastic(task, memory, self.alpha, self.constraint).objective
        return sgd(l_tilde, phi, data, tau)

    def client_update(self, task: Task, broadcast: Model, client: Memory, data: Shard) -> Reply:
        phi = broadcast.params
        theta = self.adapt(task, phi, client, data, self.local)
        return Reply(theta - phi, client.updated(theta, data.size > 0), model=theta)

    def server_update(self, task: Task, server: Stepped, update: Params, round: Round) -> Stepped:
        return self.outer.step(server, update)

    def personalize(self, task: Task, broadcast: Model, client: Memory, data: Shard) -> Params:
        return self.adapt(task, broadcast.params, client, data, self.personal)
