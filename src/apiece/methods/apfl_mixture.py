"""APFL: Deng, Kamani, Mahdavi, "Adaptive Personalized Federated Learning", 2020, Algorithm 1 with Eq. 10.

    v̄_i = α_i v_i + (1 − α_i) w,  w minimises mean_i f_i(w),  v_i minimises f_i(v̄_i), w as it is

Not `apfl_ewc`, another method called APFL. ∇_v f_i(v̄) is the derivative by v: α ∇f_i(v̄), by the chain
rule.

Departures: no projection onto W. α steps once per round, on its first batch, where w is still the model
sent, as in the authors' code; Eq. 10 carries the index of a local step. v_i starts from the w that the
client is first sent. w and v may step by any optimizer; SGD is the paper's, and α's in any case. The
deployed v̄_i has trained once more, by `personal`, and mixes v_i with the client's own w_i: what the
authors score.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from apiece.errors import ApieceError
from apiece.local import grad, loop
from apiece.method import Method, Model, Reply, Round, Span
from apiece.optim import Recipe
from apiece.params import Params
from apiece.shard import Batch, Shard
from apiece.task import Task
from apiece.tree import Tree


class Own(NamedTuple):
    v: Params  # v_i
    alpha: Tensor  # α_i


class Local(NamedTuple):
    w: Params  # w_i
    own: Own
    first: Tensor  # is this the first batch?
    optimizers: Tree  # of w_i and v_i


def mixture(own: Own, w: Params) -> Params:
    """v̄_i"""
    return own.alpha * own.v + (1 - own.alpha) * w


@dataclass(frozen=True)
class ApflMixture(Method):
    """FedAvg, and a mixture of its model with one of the client's own; each client learns its share α."""

    paper = "Deng et al. 2020"
    kind = "personalized"
    search = {"local.lr": Span(0.01, 0.5), "alpha": (0.25, 0.5, 0.75)}

    alpha: float = 0.25  # α_i before a client's first round
    adaptive: bool = True  # false: α_i stays
    local: Recipe = Recipe(epochs=5)
    personal: Recipe = Recipe()

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.alpha <= 1:
            raise ApieceError(f"alpha must lie in [0, 1], got {self.alpha}")

    def init(self, task: Task, params: Params, key: int) -> Model:
        return Model(params)

    def init_client(self, task: Task, broadcast: Model, start: Params, key: Tensor) -> Own:
        return Own(broadcast.params, torch.full((), self.alpha, device=key.device))

    def broadcast(self, server: Model, round: Round) -> Model:
        return server

    def adapt(self, task: Task, w: Params, own: Own, data: Shard, recipe: Recipe) -> tuple[Params, Own]:
        """The local steps of one round: (w_i, (v_i, α_i))."""
        optimizer, nabla = recipe.rule.build(), grad(task.objective)

        def step(at: Local, batch: Batch) -> Local:
            (v, alpha), (of_w, of_v) = at.own, at.optimizers
            slope = nabla(mixture(at.own, at.w), batch)  # ∇f(v̄)
            w, of_w = optimizer.update(nabla(at.w, batch), of_w, at.w)
            v, of_v = optimizer.update(alpha * slope, of_v, v)
            if self.adaptive:
                moved = (alpha - recipe.lr * (at.own.v - at.w).dot(slope)).clamp(0, 1)
                alpha = torch.where(at.first, moved, alpha)
            return Local(w, Own(v, alpha), torch.zeros_like(at.first), (of_w, of_v))

        first = torch.ones_like(own.alpha, dtype=torch.bool)
        start = Local(w, own, first, (optimizer.init(w), optimizer.init(own.v)))
        end = loop(step, start, data.batches(recipe.batch_size, recipe.epochs, recipe.steps))
        return end.w, end.own

    def client_update(self, task: Task, broadcast: Model, client: Own, data: Shard) -> Reply:
        w, own = self.adapt(task, broadcast.params, client, data, self.local)
        return Reply(w - broadcast.params, own, model=mixture(own, w))

    def server_update(self, task: Task, server: Model, update: Params, round: Round) -> Model:
        return Model(server.params + update)

    def initial(self, task: Task, broadcast: Model, client: Own) -> Params:
        return mixture(client, broadcast.params)

    def personalize(self, task: Task, broadcast: Model, client: Own, data: Shard) -> Params:
        w, own = self.adapt(task, broadcast.params, client, data, self.personal)
        return mixture(own, w)
