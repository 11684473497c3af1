"""FedNova: Wang, Liu, Liang, Joshi, Poor, "Tackling the Objective Inconsistency Problem in Heterogeneous
Federated Optimization", NeurIPS 2020.

FedAvg counts a client that takes more local steps for more. Here a client sends its mean step, and the server
takes τ_eff steps along the mean of those: w ← w − τ_eff Σ_i p_i η d_i, with d_i = G_i a_i / ‖a_i‖₁ and
τ_eff = Σ_i p_i ‖a_i‖₁. Column k of G_i is client i's gradient k, entry k of a_i its weight in (w − w_i) / η:
1 for plain SGD, (1 − ρ^(τ_i − k)) / (1 − ρ) with momentum ρ, k = 0 … τ_i − 1.

Departures: in the paper's equations everybody takes part; here the cohort is drawn uniformly and p_i is the
client's share of the cohort's examples. Weight decay is read as part of the gradient. Proximal clients and
the server's momentum are left out. The personalized model is the broadcast one fine-tuned on the client's
data; the paper has none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from apiece.errors import ApieceError
from apiece.local import grad, loop, sgd
from apiece.method import Client, Method, Model, Reply, Round
from apiece.optim import Recipe
from apiece.params import Params
from apiece.shard import Batch, Shard
from apiece.task import Task
from apiece.tree import Tree


class Normalized(NamedTuple):
    d: Params  # η d_i
    a: Tensor  # ‖a_i‖₁


class Trained(NamedTuple):
    """A client after some steps."""

    w: Params
    velocity: Tree
    entry: Tensor  # 1 + ρ + ρ² + …: the entries of a_i, the last one first
    a: Tensor  # their sum so far


@dataclass(frozen=True)
class FedNova(Method):
    """FedAvg of the clients' mean steps: those that step more often do not count for more."""

    paper = "Wang et al. 2020"
    kind = "global"

    local: Recipe = Recipe(epochs=5)
    personal: Recipe = Recipe()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.local.optimizer != "sgd":
            raise ApieceError(
                f"FedNova divides a client's move by the weights its gradients have in it: known for sgd, "
                f"with or without momentum, not for local.optimizer={self.local.optimizer}. Set it to sgd"
            )

    def init(self, task: Task, params: Params, key: int) -> Model:
        return Model(params)

    def broadcast(self, server: Model, round: Round) -> Model:
        return server

    def client_update(self, task: Task, broadcast: Model, client: Client, data: Shard) -> Reply:
        w, rho = broadcast.params, self.local.momentum
        optimizer, gradient = self.local.rule.build(), grad(task.objective)

        def step(at: Trained, batch: Batch) -> Trained:
            w, velocity = optimizer.update(gradient(at.w, batch), at.velocity, at.w)
            entry = rho * at.entry + 1
            return Trained(w, velocity, entry, at.a + entry)

        zero = torch.zeros((), device=data.key.device)
        batches = data.batches(self.local.batch_size, self.local.epochs, self.local.steps)
        end = loop(step, Trained(w, optimizer.init(w), zero, zero), batches)
        # With a step or more ‖a_i‖₁ ≥ 1: the bound acts where there is none, and w − w_i is 0.
        d = (w - end.w) / end.a.clamp(min=1)
        return Reply(Normalized(d, end.a), weight=data.size, model=end.w)

    def server_update(self, task: Task, server: Model, update: Normalized, round: Round) -> Model:
        """`update` is the mean with weights p_i: of d, and of a, which is τ_eff."""
        return Model(server.params - update.a * update.d)

    def personalize(self, task: Task, broadcast: Model, client: Client, data: Shard) -> Params:
        return sgd(task.objective, broadcast.params, data, self.personal)
