"""The convolutional networks of ADMM-FedMeta's experiments, Yue et al. 2021, as their code has them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from torch import nn

from apiece.errors import ApieceError, unknown
from apiece.models.cnn import image_shape

_ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {"elu": nn.ELU, "leaky_relu": lambda: nn.LeakyReLU(0.2)}


def admm_cnn(
    input_shape: tuple[int, ...],
    classes: int,
    channels: Sequence[int] = (32, 64),
    activation: str = "elu",
) -> nn.Module:
    """3x3 convolutions, each activated and pooled in windows of 3 at steps of 2, and one score per class.

    The largest number of a window is taken; after the last of three or more convolutions, the mean.
    """
    if any(size < 1 for size in channels):
        raise ApieceError(f"admm_cnn needs channels of at least 1, got {channels}")
    if activation not in _ACTIVATIONS:
        raise unknown("activation", activation, _ACTIVATIONS)
    incoming, height, width = image = image_shape(input_shape)
    layers: OrderedDict[str, nn.Module] = OrderedDict(rows=nn.Flatten(), image=nn.Unflatten(1, image))
    for i, outgoing in enumerate(channels, 1):
        layers[f"conv{i}"] = nn.Conv2d(incoming, outgoing, kernel_size=3, padding=1)
        layers[f"{activation}{i}"] = _ACTIVATIONS[activation]()
        layers[f"pool{i}"] = _pool((height, width), average=2 < i == len(channels))
        incoming, height, width = outgoing, -(-height // 2), -(-width // 2)
    layers["flatten"] = nn.Flatten()
    layers["head"] = nn.Linear(incoming * height * width, classes)
    network = nn.Sequential(layers)
    for layer in network.children():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.trunc_normal_(layer.weight, std=0.1, a=-0.2, b=0.2)
            nn.init.constant_(layer.bias, 0.1)  # type: ignore[arg-type]
    return network


def _pool(image: tuple[int, int], average: bool) -> nn.Module:
    """TensorFlow's SAME: ⌈n/2⌉ windows over n pixels, centred, the odd pixel outside at the end."""
    outside = (image[0] % 2, image[1] % 2)
    if average:
        return nn.AvgPool2d(3, 2, outside, ceil_mode=True, count_include_pad=False)
    return nn.MaxPool2d(3, 2, outside, ceil_mode=True)
