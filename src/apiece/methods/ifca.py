"""IFCA: Ghosh, Chung, Yin, Ramchandran, "An Efficient Framework for Clustered Federated Learning",
NeurIPS 2020, Algorithm 1 with model averaging (option II).

k models. In each round a client takes the one that fits its own examples best and trains it; a model becomes
the average of what was made of it, and one that nobody took stays.

Departures: clients are weighted by their number of examples, as in FedAvg; those of the paper are of one
size. θ_0 is the common start and the other models are drawn like it: the paper starts from k random models,
and equal ones would never part. The models share no layers (the paper's weight sharing on EMNIST). A client
that has not chosen yet, for want of a round or of examples, is given the model that most training examples
chose so far. The paper deploys the chosen model as it is: `personal.epochs` is 0, more is fine-tuning.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import vmap

from apiece import random, tree
from apiece.errors import ApieceError
from apiece.local import sgd
from apiece.method import Method, Reply, Round, Span
from apiece.optim import Recipe
from apiece.params import Params
from apiece.shard import Shard
from apiece.task import Task


class Clusters(NamedTuple):
    theta: Params  # k models, along a first axis
    votes: Tensor  # per cluster, the share of a round's examples that chose it, summed over the rounds


class Sent(NamedTuple):
    theta: Params
    popular: Tensor  # the cluster with most votes


class Choice(NamedTuple):
    cluster: Tensor  # ĵ of the last round the client took part in; −1 before it has chosen


class Answer(NamedTuple):
    s: Tensor  # ĵ, one-hot
    move: Params  # θ̃ − θ_ĵ; after `decode`, k of them, all but ĵ's zero


@dataclass(frozen=True)
class IFCA(Method):
    """k cluster models: each client trains, and deploys, the one with the smallest loss on its examples."""

    paper = "Ghosh et al. 2020"
    kind = "personalized"
    search = {"local.lr": Span(0.01, 0.5), "clusters": (2, 3, 4), "personal.epochs": (0, 5)}

    clusters: int = 2  # k
    local: Recipe = Recipe(epochs=5)
    personal: Recipe = Recipe(epochs=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.clusters < 1:
            raise ApieceError(f"clusters must be at least 1, got {self.clusters}")

    def init(self, task: Task, params: Params, key: int) -> Clusters:
        drawn = [task.init(random.fold(key, "cluster", j)) for j in range(1, self.clusters)]
        return Clusters(tree.stack([params, *drawn]), torch.zeros(self.clusters, device=task.device))

    def init_client(self, task: Task, broadcast: Sent, start: Params, key: Tensor) -> Choice:
        return Choice(torch.full((), -1, dtype=torch.int64, device=key.device))

    def broadcast(self, server: Clusters, round: Round) -> Sent:
        return Sent(server.theta, server.votes.argmax())

    def choose(self, task: Task, broadcast: Sent, client: Choice, data: Shard) -> Choice:
        """ĵ = argmin_j F_i(θ_j)."""
        examples = data.all()
        losses = vmap(lambda theta: task.loss(theta, examples))(broadcast.theta)
        return Choice(torch.where(data.size > 0, losses.argmin(), client.cluster))

    def client_update(self, task: Task, broadcast: Sent, client: Choice, data: Shard) -> Reply:
        choice = self.choose(task, broadcast, client, data)
        theta_j = self.initial(task, broadcast, choice)
        theta = sgd(task.objective, theta_j, data, self.local)
        s = F.one_hot(_settled(broadcast, choice), self.clusters).float()
        return Reply(Answer(s, theta - theta_j), choice, weight=data.size, model=theta)

    def decode(self, task: Task, broadcast: Sent, update: Answer) -> Answer:
        """One model was sent: here it takes its place among k, so that a mean over clients sums each."""
        return Answer(update.s, update.move.map(lambda move: torch.tensordot(update.s, move, 0)))

    def server_update(self, task: Task, server: Clusters, update: Answer, round: Round) -> Clusters:
        share = torch.where(update.s > 0, update.s, 1.0)  # a cluster that nobody chose has no move either

        def average(theta: Tensor, move: Tensor) -> Tensor:
            """θ_j + Σ s_ij n_i move_i / Σ s_ij n_i."""
            return theta + move / share.reshape(-1, *[1] * (move.dim() - 1))

        return Clusters(server.theta.map(average, update.move), server.votes + update.s)

    def initial(self, task: Task, broadcast: Sent, client: Choice) -> Params:
        # Indexed by a tensor of one entry: a 0-d index would be read on the host.
        theta: Params = tree.take(tree.take(broadcast.theta, _settled(broadcast, client)[None]), 0)
        return theta

    def personalize(self, task: Task, broadcast: Sent, client: Choice, data: Shard) -> Params:
        theta = self.initial(task, broadcast, self.choose(task, broadcast, client, data))
        return sgd(task.objective, theta, data, self.personal)


def _settled(broadcast: Sent, client: Choice) -> Tensor:
    """The client's cluster; the popular one until it has chosen."""
    return torch.where(client.cluster < 0, broadcast.popular, client.cluster)
