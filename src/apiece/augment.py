"""Augmentation: other views of a batch's images, in training alone. A view is a hash of the batch's key."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from apiece import random
from apiece.errors import ApieceError
from apiece.random import Key
from apiece.tree import Tree

Augment = Callable[[Tree, Key], Tree]

MOST = 4  # pixels that an image is moved by


def crop_flip(x: Tree, key: Key) -> Tensor:
    """Images moved by up to four pixels each way, their edges repeated, and every other one mirrored."""
    if not isinstance(x, Tensor) or x.ndim != 4:
        raise ApieceError("--augment crop_flip is for images: channels × height × width")
    count, _, height, width = x.shape
    down, across, mirrored = random.uniform(key, (count, 3)).unbind(-1)
    rows = _moved(down, height)
    columns = _moved(across, width)
    columns = torch.where(mirrored[:, None] < 0.5, width - 1 - columns, columns)
    moved = x.gather(2, rows[:, None, :, None].expand(x.shape))
    return moved.gather(3, columns[:, None, None, :].expand(x.shape))


def _moved(draw: Tensor, size: int) -> Tensor:
    """Of each image, which row or column of it comes to stand where."""
    by = (draw * (2 * MOST + 1)).long() - MOST
    return (torch.arange(size, device=draw.device) + by[:, None]).clamp(0, size - 1)


AUGMENTATIONS: dict[str, Augment | None] = {"none": None, "crop_flip": crop_flip}
