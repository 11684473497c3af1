"""What the rounds of apiece are compared with. Each does the same work, written as its own manual would.

`plain` runs by turns with apiece, on a GPU in the same process; the others, where they are installed, after
that in a process of their own: `python -m benchmarks.peers WORK.json ANSWER.json`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from apiece import models, random
from apiece.data.federated import Examples, Federated, federate
from apiece.task import Dropout

SHAPE = (1, 28, 28)
SEED = 0


@dataclass(frozen=True)
class Work:
    """A round of FedAvg with SGD: `cohort` of the clients, each with its own number of random examples."""

    model: str
    sizes: tuple[int, ...]
    cohort: int
    batch: int
    epochs: int = 1
    classes: int = 62
    lr: float = 0.05

    def data(self) -> Federated:
        draw = np.random.default_rng(SEED)
        x = draw.normal(size=(sum(self.sizes), *SHAPE)).astype(np.float32)
        y = draw.integers(0, self.classes, len(x))
        parts = [np.arange(a, b) for a, b in pairwise(np.cumsum((0, *self.sizes)))]
        labels, names = ([str(i) for i in range(n)] for n in (self.classes, len(self.sizes)))
        examples = Examples(x, y, self.classes, tuple(labels))
        return federate(examples, parts, names, key=SEED, test=0.0, unseen=0.0)

    def network(self) -> nn.Module:
        """The model as a plain module with PyTorch's own dropout, as a run of apiece with seed 0 begins.

        ReLU before pooling, as it is usually written; apiece's models have it behind, where it costs less.
        """
        task = models.build(self.model, SHAPE, self.classes)
        module = nn.Sequential(OrderedDict(_relu_first(task.factory())))
        for name, layer in module.named_children():
            if isinstance(layer, Dropout):
                setattr(module, name, nn.Dropout(layer.p))
        module.load_state_dict(dict(task.init(random.fold(SEED, "apiece", "params"))))
        return module


def _relu_first(network: nn.Module) -> list[tuple[str, nn.Module]]:
    """The layers in turn, ReLU before the pooling that it stands behind."""
    layers = list(network.named_children())
    for i, ((_, pool), (_, relu)) in enumerate(pairwise(layers)):
        if isinstance(pool, nn.MaxPool2d) and isinstance(relu, nn.ReLU):
            layers[i : i + 2] = reversed(layers[i : i + 2])
    return layers


class Done(NamedTuple):
    """A round that is over."""

    examples: int  # trained on
    params: Mapping[str, Tensor]  # the server's


def distance(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> float:
    """How far the server has moved: about equal for all that do the same work."""
    squares = [(after[name].cpu() - p.cpu()).double().square().sum() for name, p in before.items()]
    return float(torch.stack(squares).sum().sqrt())
