"""Deep Interest Network (Zhou et al. 2018) for MovieLens-1M, in the sizes of FedPA.

Embeddings: user 15, gender 2, age 3, occupation 5, zip 15, item 15; the films of the history share the
item's. Each film h of the history is weighed against the film t in question by a network of (h, t, h − t, h
⊙ t) with 36 hidden units; the weighted sum of the history, t and the profile go through layers of 32 and 16
units to one logit z. Outputs are the scores (0, z) of the two classes: their softmax and cross-entropy are
the logistic function and the binary cross-entropy of z, and methods that compare distributions over classes
work as well.

Departures: ReLU instead of Dice, which needs statistics of the batch; no mini-batch aware regularization; h
− t and h ⊙ t stand for the outer product. What FedPA does not say is as in the paper: 36 units, weights
that are not normalized.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from apiece.data.movielens import AGES, GENDERS, ITEMS, OCCUPATIONS, USERS, ZIPS

PROFILE = {  # how many there are, and the width of their embedding
    "user": (USERS + 1, 15),
    "gender": (len(GENDERS), 2),
    "age": (len(AGES), 3),
    "occupation": (OCCUPATIONS, 5),
    "zip": (ZIPS, 15),
}
ITEM = (ITEMS + 1, 15)  # 0 is no film


class DIN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        width = ITEM[1]
        self.profile = nn.ModuleDict({name: _embedding(*size) for name, size in PROFILE.items()})
        self.item = _embedding(*ITEM)
        self.attention = nn.Sequential(nn.Linear(4 * width, 36), nn.ReLU(), nn.Linear(36, 1))
        inputs = sum(size for _, size in PROFILE.values()) + 2 * width
        self.body = nn.Sequential(nn.Linear(inputs, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU())
        self.head = nn.Linear(16, 1)

    def forward(self, x: Mapping[str, Tensor]) -> Tensor:
        profile = [table(x[name].long()) for name, table in self.profile.items()]
        target, history = self.item(x["item"].long()), self.item(x["history"].long())
        against = target[:, None].expand_as(history)
        pairs = torch.cat([history, against, history - against, history * against], -1)
        weight = self.attention(pairs) * (x["history"] != 0).to(history.dtype)[..., None]
        interest = (weight * history).sum(1)
        logit = self.head(self.body(torch.cat([*profile, target, interest], -1)))
        return torch.cat([torch.zeros_like(logit), logit], -1)


def _embedding(count: int, width: int) -> nn.Embedding:
    table = nn.Embedding(count, width)
    nn.init.normal_(table.weight, std=0.1)
    return table


def din() -> nn.Module:
    return DIN()
