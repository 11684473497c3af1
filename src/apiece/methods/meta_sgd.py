"""Meta-SGD: Li, Zhou, Chen, Li, "Meta-SGD: Learning to Learn Quickly for Few-Shot Learning", 2017, federated
as in Chen, Luo, Dong, Li, He, "Federated Meta-Learning with Fast Convergence and Efficient Communication",
2018, Algorithm 1 (FedMeta with Meta-SGD).

    min_{θ, α} mean over clients u of L(θ_u, Q_u),  θ_u = θ − α ∘ ∇L(θ, S_u)

S_u and Q_u are client u's support and query. α has an entry for every parameter; it is learned and sent with
θ.

Departures: the inner loop may have several steps, all with the same α, on batches of the support (the
algorithm has one, on all of it). α starts at one number everywhere; nothing keeps its entries positive. S_u
and Q_u are the same in every round. A client without a query does not count in the mean. A client deploys θ
adapted by α to its whole training shard, and the test shard plays the query. The server may step with any
optimizer on the mean gradient: Algorithm 1 has SGD, the experiments name Adam, the default. Its lr is ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import grad

from apiece import tree
from apiece.errors import ApieceError
from apiece.local import loop
from apiece.meta import check_plain, check_support
from apiece.method import Client, Method, Reply, Round, Span
from apiece.optim import Recipe, Rule, Stepped
from apiece.params import Params
from apiece.shard import Batch, Shard
from apiece.task import Task


class Learner(NamedTuple):
    """θ and α: where adaptation starts and how far it steps; or the gradient of a loss by both."""

    params: Params
    alpha: Params


class Learners(NamedTuple):
    """The server's: θ and α, each with its optimizer's state."""

    theta: Stepped
    alpha: Stepped


@dataclass(frozen=True)
class MetaSGD(Method):
    """FedMeta with Meta-SGD: MAML that also learns a step size for every parameter."""

    paper = "Chen et al. 2018"
    kind = "meta"
    search = {"local.lr": Span(0.01, 0.5), "outer.lr": Span(0.001, 0.1)}

    local: Recipe = Recipe(lr=0.05, batch_size=0, steps=5)  # lr is where α starts
    personal: Recipe = Recipe()
    outer: Rule = Rule("adam", lr=0.01)  # lr is β, for θ and α
    support: float = 0.5  # share of a client's examples in S_u

    def __post_init__(self) -> None:
        super().__post_init__()
        check_plain(self.local, "local")
        check_plain(self.personal, "personal")
        if self.personal.lr != self.local.lr:
            raise ApieceError(
                f"personal.lr={self.personal.lr} has no use: clients personalize by the learned α, which "
                f"starts at local.lr={self.local.lr}; leave personal.lr out"
            )
        check_support(self.support)

    def init(self, task: Task, params: Params, key: int) -> Learners:
        alpha = params.map(lambda t: torch.full_like(t, self.local.lr))
        return Learners(self.outer.start(params), self.outer.start(alpha))

    def broadcast(self, server: Learners, round: Round) -> Learner:
        return Learner(server.theta.params, server.alpha.params)

    def adapt(self, task: Task, learner: Learner, data: Shard, recipe: Recipe) -> Params:
        nabla = grad(task.objective)

        def step(w: Params, batch: Batch) -> Params:
            g: Params = nabla(w, batch)
            return w - learner.alpha * g

        return loop(step, learner.params, data.batches(recipe.batch_size, recipe.epochs, recipe.steps))

    def client_update(self, task: Task, broadcast: Learner, client: Client, data: Shard) -> Reply:
        S, Q = data.split(self.support)

        def query_loss(learner: Learner) -> tuple[Tensor, Params]:
            theta_u = self.adapt(task, learner, S, self.local)
            return task.objective(theta_u, Q.all()), theta_u

        g, theta_u = grad(query_loss, has_aux=True)(broadcast)
        return Reply(tree.map(torch.neg, g), weight=(Q.size > 0).float(), model=theta_u)

    def server_update(self, task: Task, server: Learners, update: Learner, round: Round) -> Learners:
        theta, alpha = server
        return Learners(self.outer.step(theta, update.params), self.outer.step(alpha, update.alpha))

    def personalize(self, task: Task, broadcast: Learner, client: Client, data: Shard) -> Params:
        return self.adapt(task, broadcast, data, self.personal)
