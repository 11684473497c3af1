"""LeNet-5: LeCun, Bottou, Bengio, Haffner, "Gradient-Based Learning Applied to Document Recognition", 1998,
with ReLU, max-pooling and dense layers throughout; and the networks that papers have made of it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from torch import nn

from apiece.errors import ApieceError
from apiece.models.cnn import image_shape
from apiece.task import Dropout


def lenet(
    input_shape: tuple[int, ...],
    classes: int,
    channels: Sequence[int] = (6, 16),
    kernel: int = 5,
    padding: int = 2,
    dense: Sequence[int] = (120, 84),
    dropout: float = 0.0,
) -> nn.Module:
    """Convolutions, each with ReLU and max-pooling, and dense layers with ReLU.

    `padding` is the first convolution's, the others have none; `dropout` stands before the last layer.
    """
    incoming, height, width = image = image_shape(input_shape)
    layers: OrderedDict[str, nn.Module] = OrderedDict(rows=nn.Flatten(), image=nn.Unflatten(1, image))
    for i, outgoing in enumerate(channels, 1):
        layers[f"conv{i}"] = nn.Conv2d(incoming, outgoing, kernel, padding=padding)
        layers[f"pool{i}"] = nn.MaxPool2d(2)  # before ReLU: the same numbers, of which ReLU sees a quarter
        layers[f"relu{i}"] = nn.ReLU()
        height, width = ((side + 2 * padding - kernel + 1) // 2 for side in (height, width))
        incoming, padding = outgoing, 0
    if min(height, width) < 1:
        raise ApieceError(
            f"lenet: {len(channels)} convolutions of {kernel}x{kernel} leave nothing of "
            f"{image[1]}x{image[2]} pixels"
        )
    layers["flatten"] = nn.Flatten()
    incoming *= height * width
    for i, outgoing in enumerate(dense, 1):
        layers[f"dense{i}"] = nn.Linear(incoming, outgoing)
        layers[f"relu{len(channels) + i}"] = nn.ReLU()
        incoming = outgoing
    if dropout:
        layers["dropout"] = Dropout(dropout)
    layers["head"] = nn.Linear(incoming, classes)
    return nn.Sequential(layers)
