"""LeNet-5: LeCun, Bottou, Bengio, Haffner, "Gradient-Based Learning Applied to Document Recognition", 1998,
with ReLU, max-pooling and dense layers throughout."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from apiece.models.cnn import image_shape


def lenet(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """5x5 convolutions of 6 and 16 channels, dense layers of 120 and 84 units; ReLU and max-pooling."""
    incoming, height, width = image = image_shape(input_shape, least=12)
    return nn.Sequential(
        OrderedDict(
            rows=nn.Flatten(),
            image=nn.Unflatten(1, image),
            conv1=nn.Conv2d(incoming, 6, 5, padding=2),
            relu1=nn.ReLU(),
            pool1=nn.MaxPool2d(2),
            conv2=nn.Conv2d(6, 16, 5),
            relu2=nn.ReLU(),
            pool2=nn.MaxPool2d(2),
            flatten=nn.Flatten(),
            dense1=nn.Linear(16 * ((height // 2 - 4) // 2) * ((width // 2 - 4) // 2), 120),
            relu3=nn.ReLU(),
            dense2=nn.Linear(120, 84),
            relu4=nn.ReLU(),
            head=nn.Linear(84, classes),
        )
    )
