"""Guarded: safe personalization, the problem that Jiang et al. 2019 ("Improving Federated Learning
Personalization via Model Agnostic Meta Learning") name and leave open: some clients are better off with the
initial model.

Each client tries personalization on a part of its training data and judges it by the rest, a slice that is
the same in every round: the loss must fall by `margin` standard errors, for a slice of ten examples says
little. A client that passes deploys the model personalized on its whole shard, any other one, or one with
less than two examples to judge by, its initial model. No test data is touched. Rounds train on the slice too:
kept out of them it costs more accuracy than the guard saves (docs/digits.md).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from apiece import tree
from apiece.errors import ApieceError
from apiece.method import Broadcast, Client, Method, Reply, Wrapper
from apiece.params import Params
from apiece.shard import Shard
from apiece.task import Task, by_example


@dataclass(frozen=True)
class Guarded(Wrapper):
    """The inner method; a client whose held-out loss does not clearly fall keeps its initial model."""

    paper = "this library"
    kind = "personalized"

    inner: Method
    held_out: float = 0.2  # share of the client's training examples
    margin: float = 0.5  # standard errors of the mean fall in loss

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 < self.held_out < 1.0:
            raise ApieceError(f"held_out must lie between 0 and 1, got {self.held_out}")

    def client_update(self, task: Task, broadcast: Broadcast, client: Client, data: Shard) -> Reply:
        return self.inner.client_update(task, broadcast, client, data)

    def personalize(self, task: Task, broadcast: Broadcast, client: Client, data: Shard) -> Params:
        training, held_out = data.split(1.0 - self.held_out)
        initial = self.inner.initial(task, broadcast, client)
        trial = self.inner.personalize(task, broadcast, client, training)
        pays = self.falls(task, initial, trial, held_out)
        deployed: Params = tree.where(pays, self.inner.personalize(task, broadcast, client, data), initial)
        return deployed

    def falls(self, task: Task, before: Params, after: Params, judges: Shard) -> Tensor:
        """Is the mean fall of the examples' losses more than `margin` of its standard errors?"""
        batch, n = judges.all(), judges.size.clamp(min=2)
        was, is_now = (task.losses(task.predict(w, batch.x), batch.y) for w in (before, after))
        fall = by_example(was - is_now, batch.weight)
        mean = fall.sum() / n
        variance = by_example(fall - mean, batch.weight).square().sum() / (n - 1)
        return (judges.size > 1) & (mean > self.margin * (variance / n).sqrt())
