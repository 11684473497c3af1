"""FedCurv: Shoham, Avidor, Keren, Israel, Benditkis, Mor-Yosef, Zeitak, "Overcoming Forgetting in Federated
Learning on Non-IID Data", NeurIPS 2019 Workshop on Federated Learning for Data Privacy and Confidentiality.

In round t client k minimises L_k(w) + λ Σ_{j≠k} (w − w_j)ᵀ diag(F_j) (w − w_j), j over the clients that
answered in round t − 1, w_j being the model that client j then sent and F_j the diagonal of its Fisher
information there. Up to a constant that is

    L_k(w) + λ (wᵀ diag(U_k) w − 2 wᵀ V_k),   U_k = Σ_{j≠k} F_j,   V_k = Σ_{j≠k} F_j ⊙ w_j,

so two sums over all who answered are enough, from which a client that was one of them takes its own share.

Departures: in the paper all clients take part in every round; where a cohort does, the sums are the last
cohort's. A round that nobody answers leaves them as they are. F is the empirical Fisher: the mean over the
training examples of the squared gradient of one example's loss, at the new w_k, without dropout. Models are
averaged with weights n_k, as in FedAvg. The personalized model is the broadcast one fine-tuned without the
penalty, which the paper does not do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.func import grad, vmap

from apiece import tree
from apiece.errors import ApieceError
from apiece.local import loop, sgd
from apiece.method import Method, Reply, Round, Span
from apiece.optim import Recipe
from apiece.params import Params
from apiece.shard import Batch, Shard
from apiece.task import Task
from apiece.tree import Tree


class Curvature(NamedTuple):
    """One client's share of the sums, or the sums."""

    F: Params
    Fw: Params  # F ⊙ w


class Kept(NamedTuple):
    share: Curvature  # as the client last answered
    rounds: Tensor  # that had closed when its answer was counted


class Curved(NamedTuple):
    params: Params  # w
    total: Curvature  # over the clients that answered last
    rounds: Tensor  # that have closed


class Answer(NamedTuple):
    step: Params  # n_k (w_k − w): the reply has weight 1, for the sums' sake
    n: Tensor  # n_k
    share: Curvature


def fisher(task: Task, w: Params, data: Shard, batch_size: int) -> Params:
    """Mean over the examples of ∇ℓ(w; x, y)², elementwise."""

    def square(x: Tree, y: Tree, weight: Tensor) -> Params:
        x, y, weight = tree.map(lambda leaf: leaf[None], (x, y, weight))
        g: Params = grad(task.loss)(w, Batch(x, y, weight, None, data.key))  # 0 where it is padding
        return g * g

    def step(total: Params, batch: Batch) -> Params:
        squares: Params = vmap(square)(batch.x, batch.y, batch.weight)
        return total + squares.map(lambda s: s.sum(0))

    return loop(step, w.zeros(), data.batches(batch_size)) / data.size.clamp(min=1)


@dataclass(frozen=True)
class FedCurv(Method):
    """FedAvg whose clients are held, weight by weight, to the models that matter to the others (EWC)."""

    paper = "Shoham et al. 2019"
    kind = "global"
    search: ClassVar = {"local.lr": Span(0.01, 0.5), "lam": Span(0.03, 3.0)}

    lam: float = 1.0
    local: Recipe = Recipe(epochs=5)
    personal: Recipe = Recipe()

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.lam >= 0:
            raise ApieceError(f"lam must not be negative, got {self.lam}; 0 is FedAvg")

    def init(self, task: Task, params: Params, key: int) -> Curved:
        return Curved(params, Curvature(params.zeros(), params.zeros()), torch.zeros((), device=task.device))

    def init_client(self, task: Task, broadcast: Curved, start: Params, key: Tensor) -> Kept:
        return Kept(Curvature(start.zeros(), start.zeros()), torch.zeros_like(broadcast.rounds))

    def broadcast(self, server: Curved, round: Round) -> Curved:
        return server

    def client_update(self, task: Task, broadcast: Curved, client: Kept, data: Shard) -> Reply:
        w_t, total, n = broadcast.params, broadcast.total, data.size
        counted = (client.rounds == broadcast.rounds).float()
        U, V = total.F - counted * client.share.F, total.Fw - counted * client.share.Fw

        def curved(w: Params, batch: Batch, outputs: Tensor) -> Tensor:
            return self.lam * (U * w - 2 * V).dot(w)

        w = sgd(task.penalized(curved).objective, w_t, data, self.local)
        F = fisher(task, w, data, self.local.batch_size)
        share = Curvature(F, F * w)
        kept: Kept = tree.where(n > 0, Kept(share, broadcast.rounds + 1), client)
        return Reply(Answer(n * (w - w_t), n.float(), share), kept, model=w)

    def server_update(self, task: Task, server: Curved, update: Answer, round: Round) -> Curved:
        examples = update.n * round.replies
        w = server.params + update.step * round.replies / examples.clamp(min=1)
        F, Fw = (share * round.replies for share in update.share)
        closed: Curved = tree.where(examples > 0, Curved(w, Curvature(F, Fw), server.rounds + 1), server)
        return closed

    def personalize(self, task: Task, broadcast: Curved, client: Kept, data: Shard) -> Params:
        return sgd(task.objective, broadcast.params, data, self.personal)
