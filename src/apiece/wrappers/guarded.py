"""Guarded: safe personalization, the problem that Jiang et al. 2019 ("Improving Federated Learning
Personalization via Model Agnostic Meta Learning") name and leave open: some clients are better off with the
initial model.

Each client tries personalization on all but one of a few slices of its training data, which are the same in
every round, and has that slice judge it; each slice in turn, so that every example judges a model that was
not personalized on it. The square root of the loss, in which a few confident mistakes do not outweigh all
else, must fall by more than some standard errors of its mean fall. A client that passes deploys the model
personalized on its whole shard, any other one, or one with less than two examples, its initial model. No test
data is touched. Rounds train on all slices: one kept out of them costs more accuracy than the guard saves
(docs/digits.md).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from apiece import tree
from apiece.errors import ApieceError
from apiece.method import Broadcast, Client, Method, Reply, Wrapper
from apiece.params import Params
from apiece.shard import Shard
from apiece.task import Task, by_example


@dataclass(frozen=True)
class Guarded(Wrapper):
    """The inner method; a client to whose own examples it does not clearly pay keeps its initial model."""

    paper = "this library"
    kind = "personalized"

    inner: Method
    folds: int = 5  # slices of a client's training examples
    standard_errors: float = 1.8  # by more of them the root of the loss must fall

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.folds < 2:
            raise ApieceError(f"folds must be 2 or more, got {self.folds}")
        if not self.standard_errors >= 0:
            raise ApieceError(f"standard_errors must be 0 or more, got {self.standard_errors}")

    def client_update(self, task: Task, broadcast: Broadcast, client: Client, data: Shard) -> Reply:
        return self.inner.client_update(task, broadcast, client, data)

    def personalize(self, task: Task, broadcast: Broadcast, client: Client, data: Shard) -> Params:
        initial = self.inner.initial(task, broadcast, client)
        total = squares = torch.zeros_like(data.size, dtype=torch.float64)
        for rest, judges in data.folds(self.folds):
            trial, batch = self.inner.personalize(task, broadcast, client, rest), judges.all()
            losses = (task.losses(task.predict(w, batch.x), batch.y) for w in (initial, trial))
            was, is_now = (_root(by_example(loss, batch.weight).double()) for loss in losses)
            falls = was - is_now
            total, squares = total + falls.sum(), squares + falls.square().sum()
        count = data.size.double()
        variance = (squares - total**2 / count).clamp(min=0.0) / (count - 1)
        pays = (data.size > 1) & (total / count > self.standard_errors * (variance / count).sqrt())
        deployed: Params = tree.where(pays, self.inner.personalize(task, broadcast, client, data), initial)
        return deployed


def _root(loss: Tensor) -> Tensor:
    """A loss need not be positive."""
    return loss.sign() * loss.abs().sqrt()
