"""pFedMe: Dinh, Tran, Nguyen, "Personalized Federated Learning with Moreau Envelopes", NeurIPS 2020,
Algorithm 1.

    min_w mean_i F_i(w),  F_i(w) = min_θ f_i(θ) + (λ/2)‖θ − w‖²,  ∇F_i(w) = λ(w − θ_i(w))

θ_i(w), where the inner minimum is taken, is client i's own model. A client steps on F_i once per batch.

Departures: the paper wants θ̃ up to an accuracy ν; here it is K gradient steps, as in the paper's
experiments, and they start from w: the authors' code starts from the θ̃ of the batch before. A local
round is a batch of `local`, whose optimizer may be any; SGD is the paper's. Only the cohort computes; in
the paper everybody computes and a sample sends. The deployed model is the θ̃ of the last batch, as in the
experiments, after training w by `personal`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from apiece.errors import ApieceError
from apiece.local import grad, loop
from apiece.method import Client, Method, Model, Reply, Round, Span
from apiece.optim import Recipe
from apiece.params import Params
from apiece.shard import Batch, Shard
from apiece.task import Task
from apiece.tree import Tree


class Local(NamedTuple):
    w: Params  # w_{i,r}
    theta: Params  # θ̃_i(w_{i,r−1})
    optimizer: Tree


@dataclass(frozen=True)
class PFedMe(Method):
    """Clients step towards their own models θ, which are held to the shared one; θ is deployed."""

    paper = "Dinh et al. 2020"
    kind = "personalized"
    search = {"local.lr": Span(0.01, 0.2), "lam": Span(2.0, 20.0)}

    lam: float = 15.0
    inner_lr: float = 0.05  # of the K steps
    inner_steps: int = 5  # K
    beta: float = 1.0
    local: Recipe = Recipe(epochs=5)  # lr is η; a batch is one of the R local rounds
    personal: Recipe = Recipe()

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("lam", "inner_lr", "inner_steps", "beta"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ApieceError(f"{name} must be positive and finite, got {value}")
        if self.inner_lr * self.lam >= 2:
            raise ApieceError(
                f"inner_lr={self.inner_lr} with lam={self.lam} diverges on any loss: their product must stay "
                f"below 2. inner_lr={1 / (1 + self.lam):.2g}, 1 / (1 + lam), say"
            )

    def init(self, task: Task, params: Params, key: int) -> Model:
        return Model(params)

    def broadcast(self, server: Model, round: Round) -> Model:
        return server

    def adapt(self, task: Task, w: Params, data: Shard, recipe: Recipe) -> Local:
        """Lines 5–9."""
        optimizer, nabla = recipe.rule.build(), grad(task.objective)

        def step(at: Local, batch: Batch) -> Local:
            w = theta = at.w
            for _ in range(self.inner_steps):
                theta = theta - self.inner_lr * (nabla(theta, batch) + self.lam * (theta - w))
            w, state = optimizer.update(self.lam * (w - theta), at.optimizer, w)
            return Local(w, theta, state)

        batches = data.batches(recipe.batch_size, recipe.epochs, recipe.steps)
        return loop(step, Local(w, w, optimizer.init(w)), batches)

    def client_update(self, task: Task, broadcast: Model, client: Client, data: Shard) -> Reply:
        w, theta, _ = self.adapt(task, broadcast.params, data, self.local)
        return Reply(w - broadcast.params, model=theta)

    def server_update(self, task: Task, server: Model, update: Params, round: Round) -> Model:
        return Model(server.params + self.beta * update)

    def personalize(self, task: Task, broadcast: Model, client: Client, data: Shard) -> Params:
        return self.adapt(task, broadcast.params, data, self.personal).theta
