"""The convolutional network of TensorFlow Federated's EMNIST examples, used by Jiang et al. 2019."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from apiece.models.cnn import image_shape
from apiece.task import Dropout


def tff_cnn(input_shape: tuple[int, ...], classes: int, dropout: bool = True) -> nn.Module:
    """Two 3x3 convolutions, max-pooling, a dense layer: 1,206,590 parameters for 28x28 images, 62 classes."""
    incoming, height, width = image = image_shape(input_shape, least=6)
    network = nn.Sequential(
        OrderedDict(
            rows=nn.Flatten(),
            image=nn.Unflatten(1, image),
            conv1=nn.Conv2d(incoming, 32, 3),
            relu1=nn.ReLU(),
            conv2=nn.Conv2d(32, 64, 3),
            pool=nn.MaxPool2d(2),  # before ReLU: the same numbers, of which ReLU sees a quarter
            relu2=nn.ReLU(),
            dropout1=Dropout(0.25 if dropout else 0.0),
            flatten=nn.Flatten(),
            dense=nn.Linear(64 * ((height - 4) // 2) * ((width - 4) // 2), 128),
            relu3=nn.ReLU(),
            dropout2=Dropout(0.5 if dropout else 0.0),
            head=nn.Linear(128, classes),
        )
    )
    for layer in network.children():
        if isinstance(layer, nn.Conv2d | nn.Linear):  # as Keras begins
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
    return network
