"""Guarded: safe personalization, the problem that Jiang et al. 2019 ("Improving Federated Learning
Personalization via Model Agnostic Meta Learning") name and leave open: some clients are better off with the
initial model.

Each client tries personalization on all but one of a few slices of its training data, which are the same in
every round, and has that slice judge it; each slice in turn, so that every example judges a model that was
not personalized on it. The loss must fall on more than a `share` of the examples. A client that passes
deploys the model personalized on its whole shard, any other one, or one with less than two examples, its
initial model. No test data is touched. Rounds train on all slices: one kept out of them costs more accuracy
than the guard saves (docs/digits.md).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from apiece import tree
from apiece.errors import ApieceError
from apiece.method import Broadcast, Client, Method, Reply, Wrapper
from apiece.params import Params
from apiece.shard import Shard
from apiece.task import Task, by_example


@dataclass(frozen=True)
class Guarded(Wrapper):
    """The inner method; a client for too few of whose examples it pays keeps its initial model."""

    paper = "this library"
    kind = "personalized"

    inner: Method
    folds: int = 5  # slices of a client's training examples
    share: float = 0.7  # of the examples: on more of them the loss must fall

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.folds < 2:
            raise ApieceError(f"folds must be 2 or more, got {self.folds}")
        if not 0.0 <= self.share < 1.0:
            raise ApieceError(f"share must lie in [0, 1), got {self.share}")

    def client_update(self, task: Task, broadcast: Broadcast, client: Client, data: Shard) -> Reply:
        return self.inner.client_update(task, broadcast, client, data)

    def personalize(self, task: Task, broadcast: Broadcast, client: Client, data: Shard) -> Params:
        initial = self.inner.initial(task, broadcast, client)
        better = torch.zeros_like(data.size)
        for rest, judges in data.folds(self.folds):
            trial, batch = self.inner.personalize(task, broadcast, client, rest), judges.all()
            was, is_now = (task.losses(task.predict(w, batch.x), batch.y) for w in (initial, trial))
            better = better + (by_example(was - is_now, batch.weight) > 0).sum()
        pays = (data.size > 1) & (better > self.share * data.size.double() + 1e-9)
        deployed: Params = tree.where(pays, self.inner.personalize(task, broadcast, client, data), initial)
        return deployed
