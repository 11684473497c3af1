"""L2GD: Hanzely, Richtárik, "Federated Learning of a Mixture of Global and Local Models", 2020, Algorithm 1.

    min over x_1 … x_n of 1/n Σ f_i(x_i) + λ/(2n) Σ‖x_i − x̄‖²,  x̄ = 1/n Σ x_i

Loopless: a coin ξ makes a round a gradient step of everybody, or a step of everybody towards x̄.

Departures: `local.lr` is α/n. A round of tails follows `local`, by default five epochs of batches; the
paper's single step on all examples is `local=Recipe(batch_size=0, steps=1)`. All clients take part in the
paper; here those outside the cohort keep their x_i, and n counts the clients that have replied so far: x̄
is the mean of what they hold. A client starts from the x̄ that it is first sent, which is x^0 in round 0.
Clients send the change of x_i in every round; in the paper they are heard only when the coin turns. The
paper deploys x_i: that is `initial`. The personalized model is x_i (of a client never met, x̄) trained
once more by `personal`; with personal.epochs=0 it is x_i itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from apiece import random
from apiece.errors import ApieceError
from apiece.local import sgd
from apiece.method import Method, Reply, Round, Span
from apiece.optim import Recipe
from apiece.params import Params
from apiece.shard import Shard
from apiece.task import Task


class Mean(NamedTuple):
    params: Params  # x̄
    n: Tensor  # of how many clients


class Sent(NamedTuple):
    params: Params  # x̄
    heads: bool  # ξ = 1: step towards x̄


class Own(NamedTuple):
    x: Params  # x_i
    met: Tensor  # 0 before the first round, then 1


class Change(NamedTuple):
    """What a client adds to Σ x_i and to n."""

    x: Params
    n: Tensor


@dataclass(frozen=True)
class L2GD(Method):
    """A model per client and a pull to their mean: by a coin, all train or all step towards the mean."""

    paper = "Hanzely and Richtárik 2020"
    kind = "personalized"
    search = {"local.lr": Span(0.01, 0.2), "lam": Span(0.1, 1.0), "p": (0.2, 0.5)}

    lam: float = 1.0
    p: float = 0.2
    local: Recipe = Recipe(epochs=5)  # lr is α/n
    personal: Recipe = Recipe()

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.lam < math.inf:
            raise ApieceError(f"lam must be finite and not negative, got {self.lam}; 0 is training alone")
        if not 0 <= self.p <= 1:
            raise ApieceError(f"p is a probability, got {self.p}; 0 is training alone, 1 never trains")

    def init(self, task: Task, params: Params, key: int) -> Mean:
        return Mean(params, torch.zeros((), device=task.device))

    def init_client(self, task: Task, broadcast: Sent, start: Params, key: Tensor) -> Own:
        return Own(broadcast.params, torch.zeros((), device=key.device))

    def broadcast(self, server: Mean, round: Round) -> Sent:
        xi = random.uniform(random.as_key(random.fold(round.key, "coin")), ())
        return Sent(server.params, bool(xi < self.p))

    def client_update(self, task: Task, broadcast: Sent, client: Own, data: Shard) -> Reply:
        x, step = client.x, self.local.lr  # α/n
        if broadcast.heads:
            x = x - step * self.lam / self.p * (x - broadcast.params)
        else:
            x = sgd(task.objective, x, data, self.local._replace(lr=step / (1 - self.p)))
        change = Change(x - client.met * client.x, 1 - client.met)
        return Reply(change, Own(x, torch.ones_like(client.met)), model=x)

    def server_update(self, task: Task, server: Mean, update: Change, round: Round) -> Mean:
        n = (server.n + update.n * round.replies).round()
        total = server.n * server.params + update.x * round.replies
        return Mean(total / n.clamp(min=1), n)

    def initial(self, task: Task, broadcast: Sent, client: Own) -> Params:
        return client.x

    def personalize(self, task: Task, broadcast: Sent, client: Own, data: Shard) -> Params:
        return sgd(task.objective, client.x, data, self.personal)
