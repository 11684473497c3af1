"""FedDF: Lin, Kong, Stich, Jaggi, "Ensemble Distillation for Robust Model Fusion in Federated Learning",
NeurIPS 2020, Algorithm 1 (clients of one architecture).

FedAvg whose average is only a start: the server distils the ensemble of the clients' models into it, on
examples without labels,

    x_{t,j} = x_{t,j−1} − η ∂/∂x KL(σ(1/|S_t| Σ_k f(x_t^k, d)) ‖ σ(f(x_{t,j−1}, d)))        (AvgLogits)

Departures: the d are the server's proxy examples, in batches of passes over them, and N is given: the paper
samples d from another dataset or a generator and stops early where the accuracy on validation examples no
longer grows. The step size is constant, the paper's follows a cosine. Models of the ensemble and student
predict without dropout, so that a student that agrees with its teachers stays. Replies of clients without
examples and lost replies are neither averaged nor in the ensemble. The personalized model is the broadcast
one fine-tuned on the client's data, which the paper does not do.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import vmap

from apiece.local import sgd
from apiece.method import STACK, Client, Method, Model, Reduce, Reply, Round, Span, Stacked
from apiece.optim import DEFAULT, Recipe
from apiece.params import Params
from apiece.penalty import kl
from apiece.shard import Batch, Shard
from apiece.task import Task
from apiece.tree import Tree


@dataclass(frozen=True)
class FedDF(Method):
    """FedAvg, then the ensemble of the clients' models distilled into it on unlabelled proxy data."""

    paper = "Lin et al. 2020"
    kind = "global"
    needs_proxy = True
    search = {"local.lr": Span(0.01, 0.5), "distill.lr": Span(1e-4, 1e-2)}

    local: Recipe = Recipe(epochs=5)
    personal: Recipe = Recipe()
    distill: Recipe = Recipe("adam", lr=0.001, batch_size=128, steps=50)  # η and N

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "distill", self.distill.over(DEFAULT).checked("distill"))

    def init(self, task: Task, params: Params, key: int) -> Model:
        task.need_proxy()
        return Model(params)

    def broadcast(self, server: Model, round: Round) -> Model:
        return server

    def client_update(self, task: Task, broadcast: Model, client: Client, data: Shard) -> Reply:
        x = sgd(task.objective, broadcast.params, data, self.local)
        return Reply(x - broadcast.params, weight=data.size, model=x)

    def reduce(self, broadcast: Model) -> Reduce:
        return STACK

    def server_update(self, task: Task, server: Model, update: Stacked, round: Round) -> Model:
        n, x_k = update.weights, server.params + update.updates
        S = (n > 0).to(n.dtype)  # who is in the ensemble

        def avg_logits(d: Tree) -> Tensor:
            logits = vmap(lambda x: task.predict(x, d))(x_k)
            mean: Tensor = torch.tensordot(S / S.sum(), logits, 1)
            return mean

        def divergence(x: Params, batch: Batch) -> Tensor:
            return kl(avg_logits(batch.x), task.predict(x, batch.x), batch.weight)

        x_t0 = x_k.map(lambda x: torch.tensordot(n / n.sum(), x, 1))
        return Model(sgd(divergence, x_t0, task.need_proxy().at(round.key), self.distill))

    def personalize(self, task: Task, broadcast: Model, client: Client, data: Shard) -> Params:
        return sgd(task.objective, broadcast.params, data, self.personal)
