"""Unfolded convolutions against PyTorch's own."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, vmap

from apiece import Task
from apiece.engines.lowering import lowered, ways
from tests.worlds import CPU

SHAPES = [
    {"kernel_size": 3},
    {"kernel_size": 5, "padding": 2},
    {"kernel_size": (3, 2), "stride": (2, 1), "padding": (0, 1)},
    {"kernel_size": 3, "stride": 2, "bias": False},
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_gradients_and_second_derivatives_are_those_of_the_layer(shape: dict[str, object]) -> None:
    layer = nn.Sequential(nn.Conv2d(3, 4, **shape)).double()  # type: ignore[arg-type]
    other = lowered(Task(lambda: layer), {"0": "windows"}).module
    images = torch.randn(5, 2, 3, 9, 8, dtype=torch.double)  # 5 clients, 2 images each
    weights = {name: torch.randn(5, *p.shape, dtype=torch.double) for name, p in layer.named_parameters()}

    def derivatives(module: nn.Module) -> list[torch.Tensor]:
        def value(w: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
            return functional_call(module, w, (x,)).sin().sum()

        def steepness(w: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
            by_w, by_x = grad(value, argnums=(0, 1))(w, x)
            return sum(g.square().sum() for g in by_w.values()) + by_x.square().sum()

        return [
            vmap(value)(weights, images),
            *vmap(grad(value))(weights, images).values(),
            vmap(grad(value, argnums=1))(weights, images),
            *vmap(grad(steepness))(weights, images).values(),
        ]

    for ours, theirs in zip(derivatives(other), derivatives(layer), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_weights_shared_by_all_clients_and_no_clients_at_all() -> None:
    layer = nn.Sequential(nn.Conv2d(2, 3, 3))
    other = lowered(Task(lambda: layer), {"0": "windows"}).module
    images = torch.randn(4, 6, 2, 7, 7)
    weights = dict(layer.named_parameters())
    expected = F.conv2d(images.flatten(0, 1), layer[0].weight, layer[0].bias).unflatten(0, (4, 6))
    shared = vmap(lambda x: functional_call(other, weights, (x,)))(images)
    torch.testing.assert_close(shared, expected)
    torch.testing.assert_close(functional_call(other, weights, (images[0],)), expected[0])


def test_what_is_no_plain_layer_is_left_alone() -> None:
    assert ways(nn.Conv2d(1, 1, 3), CPU) == ["library", "windows"]
    assert ways(nn.MaxPool2d(2), CPU) == ["library"]
    for layer in (
        nn.Linear(1, 1),
        nn.Conv2d(2, 2, 3, groups=2),
        nn.Conv2d(1, 1, 3, dilation=2),
        nn.Conv2d(1, 1, 3, padding="same"),
        nn.Conv2d(1, 1, 3, padding=1, padding_mode="reflect"),
        nn.MaxPool2d(3, stride=2),
        nn.MaxPool2d(2, padding=1),
        nn.MaxPool2d((2, 3)),
        nn.MaxPool2d(2, ceil_mode=True),
    ):
        assert ways(layer, CPU) == []
    task = Task(lambda: nn.Sequential(nn.Conv2d(1, 1, 3)))
    assert lowered(task, {}) is task
    assert type(lowered(task, {"0": "windows"}).module[0]) is not nn.Conv2d  # type: ignore[index]
    assert type(task.module[0]) is nn.Conv2d  # type: ignore[index]
