"""Per-FedAvg: Fallah, Mokhtari, Ozdaglar, "Personalized Federated Learning with Theoretical Guarantees: A
Model-Agnostic Meta-Learning Approach", NeurIPS 2020, Algorithm 1.

    min_w mean over clients i of f_i(w − α∇f_i(w))

A client takes τ local steps w ← w − β(I − α∇²f(w; D″)) ∇f(w − α∇f(w; D); D′) with three independent batches.
The Hessian is dropped (first-order, "fo"), or its product is a difference of gradients (Hessian-free, "hf").
With a `support` below 1 examples are split as in MAML: D and D″ come from the support, D′ from the query.

Departures: D runs through the shard in passes, as in all local training here, so τ may be given in epochs; D′
and D″ are drawn anew for every step. They may share examples, as independent draws do; in a shard of at most
one batch all three are the whole of it. The exact Hessian, which the paper's experiments avoid too, is not
offered. A client without examples, or without a query, does not count in the mean. A client deploys w after
one step of α on its whole training shard.
"""

from __future__ import annotations

from dataclasses import dataclass

from apiece.errors import ApieceError, unknown
from apiece.local import grad, loop, sgd
from apiece.meta import check_plain, check_support
from apiece.method import Client, Method, Model, Reply, Round, Span
from apiece.optim import INHERIT, Recipe
from apiece.params import Params
from apiece.random import fold
from apiece.shard import Batch, Shard
from apiece.task import Task

HESSIANS = ("fo", "hf")


@dataclass(frozen=True)
class PerFedAvg(Method):
    """FedAvg on the loss after one gradient step: local MAML steps, first-order or Hessian-free."""

    paper = "Fallah et al. 2020"
    kind = "meta"
    search = {"local.lr": Span(0.01, 0.5), "alpha": Span(0.01, 0.5)}

    alpha: float = 0.1
    hessian: str = "fo"
    delta: float = 0.01  # of the differences in "hf"
    support: float = 1.0  # share of a client's examples for D and D″; 1: all three are drawn from all of them
    local: Recipe = Recipe(lr=0.1, epochs=5)  # lr is β; τ steps
    personal: Recipe = Recipe(batch_size=0, steps=1)  # lr is α

    def __post_init__(self) -> None:
        own = self.personal.lr
        super().__post_init__()
        if own is INHERIT:
            object.__setattr__(self, "personal", self.personal._replace(lr=self.alpha))
        for recipe, name in ((self.local, "local"), (self.personal, "personal")):
            check_plain(recipe, name)
        if self.support != 1.0:
            check_support(self.support)
        if self.hessian not in HESSIANS:
            raise unknown("hessian", self.hessian, HESSIANS)
        for name, fine in (("alpha", self.alpha >= 0), ("delta", self.delta > 0)):
            if not fine:
                raise ApieceError(f"{name}={getattr(self, name)} is out of range: alpha ≥ 0, delta > 0")
        if self.personal.lr != self.alpha:
            raise ApieceError(
                f"personal.lr={self.personal.lr} must be alpha={self.alpha}: clients personalize by steps of "
                f"alpha; leave personal.lr out"
            )

    def init(self, task: Task, params: Params, key: int) -> Model:
        return Model(params)

    def broadcast(self, server: Model, round: Round) -> Model:
        return server

    def client_update(self, task: Task, broadcast: Model, client: Client, data: Shard) -> Reply:
        alpha, beta, delta = self.alpha, self.local.lr, self.delta
        nabla = grad(task.objective)
        S, Q = (data, data) if self.support == 1.0 else data.split(self.support)

        def another(batch: Batch, name: str, of: Shard) -> Batch:
            """A batch drawn independently of `batch` and of those with other names."""
            return next(of.at(fold(batch.key, name)).batches(self.local.batch_size, steps=1))

        def step(w: Params, D: Batch) -> Params:
            v: Params = nabla(w - alpha * nabla(w, D), another(D, "D′", Q))
            if self.hessian == "hf":
                D2 = another(D, "D″", S)
                v = v - alpha * (nabla(w + delta * v, D2) - nabla(w - delta * v, D2)) / (2 * delta)
            return w - beta * v

        batches = S.batches(self.local.batch_size, self.local.epochs, self.local.steps)
        w = loop(step, broadcast.params, batches)
        return Reply(w - broadcast.params, weight=(Q.size > 0).float(), model=w)

    def server_update(self, task: Task, server: Model, update: Params, round: Round) -> Model:
        return Model(server.params + update)

    def personalize(self, task: Task, broadcast: Model, client: Client, data: Shard) -> Params:
        return sgd(task.objective, broadcast.params, data, self.personal)
