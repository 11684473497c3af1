"""Elastic: the constraint of FedEC (Lan et al. 2023, Eq. 6) around any method.

In training, a client adds α·c(θ, θ̂) to its objective, θ̂ being its own model after the last round it took part
in (`reply.model` of the inner method) and c(θ, θ̂) either KL(p_θ̂(x) ‖ p_θ(x)) or ‖θ − θ̂‖². A client's first
round has no constraint. Elastic(Reptile) is FedEC.

Departures: the paper names other methods as future work and does not say how. Here every gradient of the
objective that the inner method takes is a constrained one, at all levels of a meta-learning step and for all
parts of a split model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from apiece.errors import ApieceError
from apiece.method import Broadcast, Client, Method, Reply, Span, Wrapper
from apiece.params import Params
from apiece.penalty import Memory, check_elastic, elastic
from apiece.shard import Shard
from apiece.task import Task


class Held(NamedTuple):
    memory: Memory
    inner: Client


@dataclass(frozen=True)
class Elastic(Wrapper):
    """The inner method, held elastically to the client's own last model."""

    paper = "Lan et al. 2023"
    kind = "personalized"
    search = {"alpha": Span(0.05, 5.0)}

    inner: Method
    alpha: float = 0.5
    constraint: str = "kl"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_elastic(self.alpha, self.constraint)

    def constrained(self, task: Task, client: Held) -> Task:
        return elastic(task, client.memory, self.alpha, self.constraint)

    def init_client(self, task: Task, broadcast: Broadcast, start: Params, key: Tensor) -> Held:
        nothing = Memory(start, torch.zeros((), device=key.device))
        return Held(nothing, self.inner.init_client(task, broadcast, start, key))

    def client_update(self, task: Task, broadcast: Broadcast, client: Held, data: Shard) -> Reply:
        reply = self.inner.client_update(self.constrained(task, client), broadcast, client.inner, data)
        if reply.model is None:
            raise ApieceError(
                f"{type(self.inner).__name__} replies without a model: nothing to be elastic to"
            )
        memory = client.memory.updated(reply.model, data.size > 0)
        return reply._replace(state=Held(memory, reply.state))

    def initial(self, task: Task, broadcast: Broadcast, client: Held) -> Params:
        return self.inner.initial(task, broadcast, client.inner)

    def personalize(self, task: Task, broadcast: Broadcast, client: Held, data: Shard) -> Params:
        return self.inner.personalize(self.constrained(task, client), broadcast, client.inner, data)
