"""Measures of tasks other than telling classes apart: ranking, and text predicted character by character.

Ranking. A client's test examples are candidates: those of class 1 were chosen, those of class 0 were not. A
candidate's score is the difference of the two outputs. The rank of a chosen one counts from 1, among it and
the candidates that were not chosen; of those with the same score it takes the middle place, so that a model
that scores all alike gets the AUC 0.5 and no hit.

Text. An example is a sequence; y[n, i] is the character to predict at place i, −1 behind a shorter sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from apiece.shard import Batch
from apiece.task import Metric, Pooled, cross_entropy


def _ranks(outputs: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(each example's rank were it chosen, 1 where it was, how many were not)."""
    score = outputs[..., 1] - outputs[..., 0]
    chosen, other = (weight > 0) & (y == 1), (weight > 0) & (y == 0)
    others = torch.where(other, score, torch.inf).sort().values
    not_above, below = (torch.searchsorted(others, score, right=right) for right in (True, False))
    count = other.sum()
    return 1 + count - (not_above + below) / 2, chosen.float(), count


def auc(outputs: Tensor, batch: Batch) -> Tensor:
    """The share of pairs (chosen, not chosen) that are in the right order, equal scores half; NaN of none."""
    rank, chosen, count = _ranks(outputs, batch.y, batch.weight)
    return ((1 + count - rank) * chosen).sum() / (chosen.sum() * count)


def hit(outputs: Tensor, batch: Batch, k: int) -> Tensor:
    """The share of the chosen whose rank is at most k."""
    rank, chosen, _ = _ranks(outputs, batch.y, batch.weight)
    return ((rank <= k) * chosen).sum() / chosen.sum()


def ndcg(outputs: Tensor, batch: Batch, k: int) -> Tensor:
    """1 / log2(rank + 1) if the rank is at most k, else 0; mean over the chosen."""
    rank, chosen, _ = _ranks(outputs, batch.y, batch.weight)
    return ((rank <= k) / torch.log2(rank + 1) * chosen).sum() / chosen.sum()


def pooled_auc(outputs: Tensor, y: Tensor) -> Tensor:
    """AUC over all pairs of many clients' examples, those of different clients too."""
    rank, chosen, count = _ranks(outputs.double(), y, torch.ones_like(y, dtype=torch.float64))
    return ((1 + count - rank).double() * chosen).sum() / (chosen.sum().double() * count)


RANKING: Mapping[str, Metric] = {
    "AUC": auc,
    "Hit@5": partial(hit, k=5),
    "Hit@10": partial(hit, k=10),
    "NDCG@5": partial(ndcg, k=5),
    "NDCG@10": partial(ndcg, k=10),
}
RANKING_POOLED: Mapping[str, Pooled] = {"AUC": pooled_auc}


def text_losses(outputs: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy of each sequence, mean over its characters."""
    real = (y >= 0).to(outputs.dtype)
    return (cross_entropy(outputs, y.clamp(min=0)) * real).sum(-1) / real.sum(-1).clamp(min=1.0)


def text_accuracy(outputs: Tensor, batch: Batch) -> Tensor:
    """The share of characters predicted right, over those of all sequences; NaN of none."""
    real = (batch.y >= 0) & (batch.weight[..., None] > 0)
    share: Tensor = ((outputs.argmax(-1) == batch.y) & real).sum() / real.sum()
    return share
