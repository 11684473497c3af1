"""Views of images against every view there is, by plain indexing."""

from collections import Counter

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import vmap

from apiece import ApieceError, Experiment, run
from apiece.augment import MOST, crop_flip
from apiece.params import Params
from apiece.random import as_key, fold
from apiece.shard import Batch
from apiece.task import Task


def views(image: np.ndarray) -> dict[tuple[int, int, bool], np.ndarray]:
    """By (down, across, mirrored): padded with its edges, cut out, turned."""
    padded = np.pad(image, ((0, 0), (MOST, MOST), (MOST, MOST)), mode="edge")
    _, height, width = image.shape
    found = {}
    for down in range(-MOST, MOST + 1):
        for across in range(-MOST, MOST + 1):
            cut = padded[:, MOST + down :, MOST + across :][:, :height, :width]
            found[down, across, False], found[down, across, True] = cut, cut[:, :, ::-1]
    return found


def test_every_view_is_one_and_all_are_drawn() -> None:
    """81 moves, mirrored or not: of 8,000 draws none is missing (each is expected 49 times)."""
    image = np.random.default_rng(0).normal(size=(3, 9, 11)).astype(np.float32)
    known = {view.tobytes(): name for name, view in views(image).items()}
    batch = torch.from_numpy(image).expand(8000, -1, -1, -1)
    seen = Counter(known[view.numpy().tobytes()] for view in crop_flip(batch, as_key(5)))
    assert len(seen) == 2 * (2 * MOST + 1) ** 2
    assert max(seen.values()) < 49 + 6 * 7


def test_under_vmap_it_is_the_loop() -> None:
    x, keys = torch.randn(4, 5, 1, 8, 8), torch.tensor([1, 2, 3, 4])
    together = vmap(crop_flip)(x, keys)
    assert torch.equal(together, torch.stack([crop_flip(*one) for one in zip(x, keys, strict=True)]))


def test_training_alone_sees_views_and_penalties_the_same_ones() -> None:
    """A model that gives its images back: what the objective scores is what the penalty is shown."""
    shown = []

    def penalty(params: Params, batch: Batch, outputs: torch.Tensor) -> torch.Tensor:
        shown.append((batch.x, outputs))
        return torch.zeros(())

    task = Task(nn.Identity, losses=lambda outputs, y: outputs.flatten(1).sum(-1), augment=crop_flip)
    batch = Batch(torch.rand(6, 1, 8, 8), torch.zeros(6), torch.ones(6), None, as_key(3))
    task.penalized(penalty).objective(Params({}), batch)
    (x, outputs), view = shown[0], crop_flip(batch.x, fold(batch.key, "augment"))
    assert torch.equal(x, outputs)
    assert torch.equal(x, view)
    assert not torch.equal(view, batch.x)
    assert task.loss(Params({}), batch) == batch.x.flatten(1).sum(-1).mean()


def test_what_is_no_image_is_refused() -> None:
    with pytest.raises(ApieceError, match="crop_flip is for images"):
        run(Experiment(augment="crop_flip", rounds=1, engine="sequential"))
    with pytest.raises(ApieceError, match="unknown augment 'flip'"):
        Experiment(augment="flip")
