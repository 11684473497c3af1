"""SCAFFOLD: Karimireddy, Kale, Mohri, Reddi, Stich, Suresh, "SCAFFOLD: Stochastic Controlled Averaging for
Federated Learning", ICML 2020, Algorithm 1 with option II.

    min_x 1/N Σ_i f_i(x)

Every client has a control variate c_i, an estimate of ∇f_i, and the server their mean c over the population.
A local step goes along g_i(y) − c_i + c, so that clients do not drift towards their own minima.

Departures: c_i and c start at 0. K is the number of steps that this client took, so clients may take
different numbers (epochs over shards of different sizes); the paper has one K. A client without examples
replies zeros: its f_i is 0, and so is its c_i. |S| is the number of replies that arrived. The personalized
model is the broadcast one fine-tuned without control variates, which the paper does not do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from apiece import tree
from apiece.errors import ApieceError
from apiece.local import grad, loop, sgd
from apiece.method import Method, Reply, Round, Span
from apiece.optim import Recipe, Rule
from apiece.params import Params
from apiece.shard import Batch, Shard
from apiece.task import Task


class Controlled(NamedTuple):
    params: Params  # x
    c: Params  # the mean of c_i over the population


class Variate(NamedTuple):
    c: Params  # c_i


class Change(NamedTuple):
    y: Params  # Δy_i
    c: Params  # Δc_i


@dataclass(frozen=True)
class Scaffold(Method):
    """FedAvg whose local steps are corrected for the difference between a client's gradient and the mean."""

    paper = "Karimireddy et al. 2020"
    kind = "global"
    search: ClassVar = {"local.lr": Span(0.01, 0.5), "outer_lr": Span(0.3, 1.5)}

    local: Recipe = Recipe(epochs=5)
    personal: Recipe = Recipe()
    outer_lr: float = 1.0  # η_g

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.local.rule != Rule(lr=self.local.lr) or self.local.lr == 0:
            raise ApieceError(
                "SCAFFOLD reads its control variates off plain SGD steps: of the optimizer in `local` set lr "
                "alone, above 0"
            )
        if not self.outer_lr > 0:
            raise ApieceError(f"outer_lr must be above 0, got {self.outer_lr}")

    def init(self, task: Task, params: Params, key: int) -> Controlled:
        return Controlled(params, params.zeros())

    def init_client(self, task: Task, broadcast: Controlled, start: Params, key: Tensor) -> Variate:
        return Variate(start.zeros())

    def broadcast(self, server: Controlled, round: Round) -> Controlled:
        return server

    def client_update(self, task: Task, broadcast: Controlled, client: Variate, data: Shard) -> Reply:
        (x, c), c_i, eta = broadcast, client.c, self.local.lr
        g = grad(task.objective)

        def step(carry: tuple[Params, Tensor], batch: Batch) -> tuple[Params, Tensor]:
            y, K = carry
            return y - eta * (g(y, batch) - c_i + c), K + 1

        batches = data.batches(self.local.batch_size, self.local.epochs, self.local.steps)
        y, K = loop(step, (x, torch.zeros((), device=data.key.device)), batches)

        c_plus = c_i - c + (x - y) / (K.clamp(min=1) * eta)
        c_plus = tree.where(K > 0, c_plus, c_i)
        return Reply(Change(y - x, c_plus - c_i), Variate(c_plus), model=y)

    def server_update(self, task: Task, server: Controlled, update: Change, round: Round) -> Controlled:
        x, c = server
        return Controlled(x + self.outer_lr * update.y, c + update.c * (round.replies / round.population))

    def personalize(self, task: Task, broadcast: Controlled, client: Variate, data: Shard) -> Params:
        return sgd(task.objective, broadcast.params, data, self.personal)
