"""FedBABU: Oh, Kim, Yun, "FedBABU: Toward Enhanced Representation for Federated Image Classification", ICLR
2022, Algorithm 1.

The head θ_cls keeps the value it was drawn with, one for all clients; the body θ_ext is trained and averaged.
The head learns only when a client fine-tunes the model for itself.

Departures: none in training; a client keeps the head it got at first contact, so that it is not sent again.
Of the parts that the paper tries to fine-tune (body, head, all) this is all of the model. The step sizes are
ours: the body of a head as small as it is drawn wants larger steps than the model that is fine-tuned.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from apiece.layers import LAST_LINEAR, Own, PartlyShared, fit, prefixes
from apiece.local import sgd
from apiece.method import Model, Reply, Span
from apiece.optim import Recipe
from apiece.params import Params
from apiece.shard import Shard
from apiece.task import Task


@dataclass(frozen=True)
class FedBABU(PartlyShared):
    """FedAvg of the body for a head that stays as it was drawn; personalization trains both."""

    paper = "Oh et al. 2022"
    kind = "personalized"
    search: ClassVar = {
        "local.lr": Span(0.05, 1.0),
        "personal.lr": Span(0.02, 0.5),
        "personal.epochs": (5, 20),
    }

    head: tuple[str, ...] = (LAST_LINEAR,)
    local: Recipe = Recipe(lr=0.3, epochs=5)
    personal: Recipe = Recipe(lr=0.1, epochs=20)

    def split(self, task: Task, params: Params) -> tuple[Params, Params]:
        """θ_cls, θ_ext."""
        return params.split(prefixes(task, self.head))

    def client_update(self, task: Task, broadcast: Model, client: Own, data: Shard) -> Reply:
        theta_ext = fit(task, broadcast.params, client.private, data, self.local)
        return self.reply(task, broadcast, theta_ext | client.private, weight=data.size)

    def personalize(self, task: Task, broadcast: Model, client: Own, data: Shard) -> Params:
        return sgd(task.objective, self.initial(task, broadcast, client), data, self.personal)
