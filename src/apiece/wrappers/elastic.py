"""Elastic: the constraint of FedEC (Lan et al. 2023, Eq. 6) around any method.

In training, a client adds α·KL(p_θ̂(x) ‖ p_θ(x)) to its objective, θ̂ being its own model after the last
round it took part in (`reply.model` of the inner method); a client's first round has no constraint.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from apiece import tree
from apiece.method import Broadcast, Client, Method, Reply, Wrapper
from apiece.params import Params
from apiece.shard import Batch, Shard
from apiece.task import Task, weighted_mean


class Memory(NamedTuple):
    theta: Params
    known: Tensor  # 0 before the first round the client took part in, then 1
    inner: Client


def kl(target: Tensor, outputs: Tensor, weight: Tensor) -> Tensor:
    """Mean over the examples of KL(softmax(target) ‖ softmax(outputs))."""
    p, q = F.log_softmax(target, -1), F.log_softmax(outputs, -1)
    return weighted_mean((p.exp() * (p - q)).sum(-1), weight)


@dataclass(frozen=True)
class Elastic(Wrapper):
    """The inner method, held elastically to the client's own last model."""

    paper = "Lan et al. 2023"
    kind = "personalized"

    inner: Method
    alpha: float = 0.5

    def constrained(self, task: Task, memory: Memory) -> Task:
        def elastic(theta: Params, batch: Batch, outputs: Tensor) -> Tensor:
            remembered = task.predict(memory.theta, batch.x)
            return memory.known * self.alpha * kl(remembered, outputs, batch.weight)

        return task.penalized(elastic)

    def init_client(self, task: Task, broadcast: Broadcast, start: Params, key: Tensor) -> Memory:
        inner = self.inner.init_client(task, broadcast, start, key)
        device = next(iter(start.values())).device
        return Memory(start.zeros(), torch.zeros((), device=device), inner)

    def client_update(self, task: Task, broadcast: Broadcast, client: Memory, data: Shard) -> Reply:
        reply = self.inner.client_update(self.constrained(task, client), broadcast, client.inner, data)
        if reply.model is None:
            raise TypeError(f"{type(self.inner).__name__} replies without a model: nothing to be elastic to")
        took_part = data.size > 0
        theta = tree.where(took_part, reply.model, client.theta)
        known = torch.where(took_part, torch.ones_like(client.known), client.known)
        return reply._replace(state=Memory(theta, known, reply.state))

    def initial(self, task: Task, broadcast: Broadcast, client: Memory) -> Params:
        return self.inner.initial(task, broadcast, client.inner)

    def personalize(self, task: Task, broadcast: Broadcast, client: Memory, data: Shard) -> Params:
        return self.inner.personalize(self.constrained(task, client), broadcast, client.inner, data)
