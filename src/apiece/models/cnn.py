"""A small convolutional network."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence

from torch import nn

from apiece.errors import ApieceError


def cnn(
    input_shape: tuple[int, ...],
    classes: int,
    channels: Sequence[int] = (16, 32),
    dense: int = 64,
    norm: bool = False,
) -> nn.Module:
    """3x3 convolutions, each with ReLU and 2x2 max-pooling, then a dense layer and one score per class.

    `dense=0` leaves the dense layer out. With `norm`, a GroupNorm of one group stands before each ReLU.
    """
    if any(size < 1 for size in channels) or dense < 0:
        raise ApieceError(
            f"cnn needs channels of at least 1 and dense of at least 0, got {channels} and {dense}"
        )
    incoming, height, width = image = image_shape(input_shape)
    pooling = 2 ** len(channels)
    if min(height, width) < pooling:
        raise ApieceError(
            f"cnn halves the image {len(channels)} times: it needs at least {pooling}x{pooling} pixels, "
            f"got {height}x{width}"
        )
    layers: OrderedDict[str, nn.Module] = OrderedDict(rows=nn.Flatten(), image=nn.Unflatten(1, image))
    for i, outgoing in enumerate(channels, 1):
        layers[f"conv{i}"] = nn.Conv2d(incoming, outgoing, kernel_size=3, padding=1)
        if norm:
            layers[f"norm{i}"] = nn.GroupNorm(1, outgoing)
        layers[f"pool{i}"] = nn.MaxPool2d(2)  # before ReLU: the same numbers, of which ReLU sees a quarter
        layers[f"relu{i}"] = nn.ReLU()
        incoming = outgoing
    layers["flatten"] = nn.Flatten()
    features = incoming * (height // pooling) * (width // pooling)
    if dense:
        layers["dense"] = nn.Linear(features, dense)
        if norm:
            layers["norm"] = nn.GroupNorm(1, dense)
        layers["relu"] = nn.ReLU()
    layers["head"] = nn.Linear(dense or features, classes)
    return nn.Sequential(layers)


def image_shape(input_shape: tuple[int, ...], least: int = 1) -> tuple[int, int, int]:
    """(channels, height, width) of inputs of shape (C, H, W), (H, W) or (side²,); `least` pixels each way."""
    match input_shape:
        case (channels, height, width):
            pass
        case (height, width):
            channels = 1
        case (pixels,) if math.isqrt(pixels) ** 2 == pixels:
            channels, height, width = 1, math.isqrt(pixels), math.isqrt(pixels)
        case _:
            raise ApieceError(
                f"the model needs images: inputs of shape (channels, height, width) or (height, width), or a "
                f"flat square such as 64 for 8x8; got {input_shape}. For other inputs use mlp"
            )
    if min(height, width) < least:
        raise ApieceError(f"the model needs at least {least}x{least} pixels, got {height}x{width}")
    return channels, height, width
