"""Penalties: terms that training adds to a client's loss, and what they are measured from.

The elastic constraint of Lan et al. 2023 (Eqs. 6, 9) is here because FedEC and the wrapper Elastic share it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from apiece import tree
from apiece.errors import ApieceError, unknown
from apiece.params import Params
from apiece.shard import Batch
from apiece.task import Task, weighted_mean

CONSTRAINTS = ("kl", "l2")


class Memory(NamedTuple):
    """θ̂: a client's own model of the last round it took part in."""

    theta: Params  # before the first such round, any finite params
    known: Tensor  # 0 before that round, then 1

    def updated(self, theta: Params, took_part: Tensor) -> Memory:
        """`theta` remembered if the client took part, else this memory."""
        memory: Memory = tree.where(took_part, Memory(theta, torch.ones_like(self.known)), self)
        return memory


def kl(target: Tensor, outputs: Tensor, weight: Tensor) -> Tensor:
    """Mean over the examples of KL(softmax(target) ‖ softmax(outputs))."""
    p, q = F.log_softmax(target, -1), F.log_softmax(outputs, -1)
    return weighted_mean((p.exp() * (p - q)).sum(-1), weight)


def elastic(task: Task, memory: Memory, alpha: float, constraint: str) -> Task:
    """`task` whose objective adds α·c(θ, θ̂) where there is a θ̂.

    c is KL(p_θ̂(x) ‖ p_θ(x)), θ̂ predicting in evaluation mode, or ‖θ − θ̂‖². With α = 0 it is `task` itself.
    """
    if alpha == 0.0:
        return task

    def c(theta: Params, batch: Batch, outputs: Tensor) -> Tensor:
        if constraint == "l2":
            return (theta - memory.theta).sqnorm()
        return kl(task.predict(memory.theta, batch.x), outputs, batch.weight)

    def constrained(theta: Params, batch: Batch, outputs: Tensor) -> Tensor:
        return alpha * (memory.known * c(theta, batch, outputs))

    return task.penalized(constrained)


def check_elastic(alpha: float, constraint: str) -> None:
    if constraint not in CONSTRAINTS:
        raise unknown("constraint", constraint, CONSTRAINTS)
    if not 0.0 <= alpha < math.inf:
        raise ApieceError(f"alpha must be finite and not negative, got {alpha}; 0 is no constraint")
