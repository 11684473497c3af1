"""LearnedAggregation: the aggregator of FedPA around any method whose update is a difference of params.
Shen, Kuang, Li, Wang, Lv, Yang, Wu, Wu, "Learning to Aggregate: A Parameterized Aggregator to Debias Model
Aggregation for Cross-Device Federated Learning", submitted to ICLR 2023, Algorithm 1 and Eqs. 4–7.

The server replaces the mean of w_t − Δ_k by the mean of w_t − Δ_k ⊙ (1 − u_k) with u_k = h(w_t, Δ_k; ϕ), and
trains ϕ so that the aggregated model does well on its proxy data. FedPA is LearnedAggregation(FedAvg).

The inner method must send the whole model as `broadcast.params`, its updates must be w_k − w_t = −Δ_k under
the same names, and its reduction must be MEAN. Replies count alike whatever their weight (footnote 2). The
aggregate goes to the inner method's `server_update` as the mean update w_{t+1} − w_t, so server momentum and
the like still apply; FedAvg with lr 1 ends at w_{t+1}.

h works on each tensor of d entries alone, with p = ⌊log2 d⌋ + 1 hidden units on either side:
a = tanh(A1 w), b_k = tanh(A2 Δ_k), u_k = B1 a + B2 b_k. No u_k is ever formed: the cohort is read through the
d × p sums Δᵀb, and the only tensor of replies × d entries is the stack that the server receives.

Departures: the paper names neither the activation nor the aggregator's optimizer; tanh and Adam are those of
the authors' code, and so are layers without bias, dropout in the aggregated model and the additive form
w_t − Δ_k + u_k. The output layers start at 0, ours, so that an untrained ϕ takes the plain mean. "Layer-wise"
is read as tensor by tensor. Algorithm 1 trains ϕ while the clients train, so on the updates of the round
before; Eq. 6 takes this round's, which is the default. `meantime=True` is Algorithm 1: aggregate first, then
train ϕ for the next round.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import grad

from apiece import random
from apiece.errors import ApieceError
from apiece.local import loop
from apiece.method import (
    MEAN,
    STACK,
    Broadcast,
    Client,
    Method,
    Reduce,
    Reply,
    Round,
    Server,
    Span,
    Stacked,
    Wrapper,
)
from apiece.optim import DEFAULT, Recipe, Stepped
from apiece.params import Params
from apiece.shard import Batch, Shard
from apiece.task import Task


class Aggregating(NamedTuple):
    inner: Server
    phi: Stepped  # the aggregator and its optimizer's state


def init_phi(w: Params, key: int) -> Params:
    """ϕ for a model like `w`: input layers uniform in ±1/√d, output layers 0."""
    phi = {}
    for name, t in w.items():
        d = t.numel()
        p = d.bit_length()  # ⌊log2 d⌋ + 1
        for layer in ("A1", "A2"):
            draw = random.uniform(random.as_key(random.fold(key, name, layer), t.device), (p, d))
            phi[f"{name}.{layer}"] = ((2.0 * draw - 1.0) / math.sqrt(d)).to(t.dtype)
        for layer in ("B1", "B2"):
            phi[f"{name}.{layer}"] = torch.zeros((d, p), dtype=t.dtype, device=t.device)
    return Params(phi)


def aggr(w_t: Params, updates: Params, K: Tensor | int, phi: Params, additive: bool) -> Params:
    """w_{t+1} − w_t from stacked updates −Δ_k, K of them real and the others zero (Eq. 4)."""

    def one(name: str, w: Tensor, minus_delta: Tensor) -> Tensor:
        A1, A2, B1, B2 = (phi[f"{name}.{layer}"] for layer in ("A1", "A2", "B1", "B2"))
        mean = minus_delta.sum(0) / K
        B1a = B1 @ torch.tanh(A1 @ w.flatten())
        b = torch.tanh(-(minus_delta @ A2.T))
        if additive:
            return mean + B1a + B2 @ b.sum(0) / K
        M = minus_delta.T @ (-b / K)
        return mean * (1.0 - B1a) + (B2 * M).sum(1)

    def flat(stack: Tensor) -> Tensor:
        return stack.reshape(stack.shape[0], -1)

    return Params({name: one(name, w, flat(updates[name])).view_as(w) for name, w in w_t.items()})


@dataclass(frozen=True)
class LearnedAggregation(Wrapper):
    """The inner method, its updates averaged by an aggregator that is learned on the server's proxy data."""

    paper = "Shen et al. 2023"
    kind = "global"
    search = {"aggregator.lr": Span(1e-4, 1e-2)}
    needs_proxy = True

    inner: Method
    aggregator: Recipe = Recipe("adam", lr=0.001, batch_size=500, epochs=30)
    additive: bool = False
    meantime: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "aggregator", self.aggregator.over(DEFAULT).checked("aggregator"))

    def init(self, task: Task, params: Params, key: int) -> Aggregating:
        task.need_proxy()
        phi = init_phi(params, random.fold(key, "aggregator"))
        return Aggregating(self.inner.init(task, params, key), self.aggregator.rule.start(phi))

    def broadcast(self, server: Aggregating, round: Round) -> Broadcast:
        return self.inner.broadcast(server.inner, round)

    def client_update(self, task: Task, broadcast: Broadcast, client: Client, data: Shard) -> Reply:
        return self.inner.client_update(task, broadcast, client, data)

    def reduce(self, broadcast: Broadcast) -> Reduce:
        if self.inner.reduce(broadcast) is not MEAN:
            raise ApieceError(f"{type(self.inner).__name__} does not average its updates: nothing to learn")
        return STACK

    def server_update(self, task: Task, server: Aggregating, update: Stacked, round: Round) -> Aggregating:
        w_t, updates = self._difference(self.inner.broadcast(server.inner, round), update)
        K, optimizer = round.replies, self.aggregator.rule.build()

        def f(phi: Params, batch: Batch) -> Tensor:
            """Eq. 6."""
            return task.objective(w_t + aggr(w_t, updates, K, phi, self.additive), batch)

        def step(at: Stepped, batch: Batch) -> Stepped:
            return Stepped(*optimizer.update(grad(f)(at.params, batch), at.state, at.params))

        recipe = self.aggregator
        batches = task.need_proxy().at(round.key).batches(recipe.batch_size, recipe.epochs, recipe.steps)
        trained = loop(step, server.phi, batches)
        phi = server.phi if self.meantime else trained
        mean = aggr(w_t, updates, K, phi.params, self.additive)
        return Aggregating(self.inner.server_update(task, server.inner, mean, round), trained)

    def _difference(self, broadcast: Broadcast, update: Stacked) -> tuple[Params, Params]:
        w_t, updates = getattr(broadcast, "params", None), update.updates
        if isinstance(w_t, Params) and isinstance(updates, Params) and w_t.keys() == updates.keys():
            return w_t, updates
        raise ApieceError(
            f"the update of {type(self.inner).__name__} is not a difference of params: learned aggregation "
            f"needs a method that sends broadcast.params and is answered Params with the same names"
        )
