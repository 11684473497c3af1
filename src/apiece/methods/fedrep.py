"""FedRep: Collins, Hassani, Mokhtari, Shakkottai, "Exploiting Shared Representations for Personalized
Federated Learning", ICML 2021, Algorithm 1.

    min_φ 1/n Σ_i min_{h_i} f_i(h_i, φ)

φ, the representation, is shared; h_i is client i's own head. A client takes many steps on h_i for the φ that
it is sent, then a few on φ for that h_i. The mean of the φ_i is plain, whatever the clients' sizes.

Departures: steps are batches, given as epochs; each phase has orders of its own. Every h_i starts from one
common draw. A client without examples does not count in the mean. In the paper a new client fits its head to
the fixed φ; here every client does so before it deploys, one that was met from the head it has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from apiece.errors import ApieceError
from apiece.layers import LAST_LINEAR, Own, PartlyShared, fit, prefixes
from apiece.method import Model, Reply, Span
from apiece.optim import Recipe
from apiece.params import Params
from apiece.random import fold
from apiece.shard import Shard
from apiece.task import Task

_HEAD_PHASE = fold(0, "head")


@dataclass(frozen=True)
class FedRep(PartlyShared):
    """Private head, fitted first; shared body, trained for that head; the plain mean of the bodies."""

    paper = "Collins et al. 2021"
    kind = "personalized"
    search: ClassVar = {"local.lr": Span(0.01, 0.5), "head_epochs": (2, 5, 10)}

    head: tuple[str, ...] = (LAST_LINEAR,)
    head_epochs: int = 10
    local: Recipe = Recipe(epochs=5)  # of the body
    personal: Recipe = Recipe(epochs=10)  # of the head alone

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head_epochs < 0:
            raise ApieceError(f"head_epochs must not be negative, got {self.head_epochs}")

    def split(self, task: Task, params: Params) -> tuple[Params, Params]:
        """h_i, φ."""
        return params.split(prefixes(task, self.head))

    def fitted(self, task: Task, broadcast: Model, client: Own, data: Shard, recipe: Recipe) -> Params:
        """h_i for the φ that was sent."""
        return fit(task, client.private, broadcast.params, data.at(_HEAD_PHASE), recipe)

    def client_update(self, task: Task, broadcast: Model, client: Own, data: Shard) -> Reply:
        on_head = self.local._replace(epochs=self.head_epochs, steps=0)
        h = self.fitted(task, broadcast, client, data, on_head)
        phi = fit(task, broadcast.params, h, data, self.local)
        return self.reply(task, broadcast, phi | h, weight=data.size > 0)

    def personalize(self, task: Task, broadcast: Model, client: Own, data: Shard) -> Params:
        return broadcast.params | self.fitted(task, broadcast, client, data, self.personal)
