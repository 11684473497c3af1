"""The gradient of a client alone is that of many at once."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.func import vmap

from apiece import tree
from apiece.local import grad
from apiece.models import build
from apiece.params import Params
from apiece.random import as_key
from apiece.shard import Batch
from apiece.task import Task


def batch(shape: tuple[int, ...], n: int = 7) -> Batch:
    x, y = torch.randn(n, *shape), torch.arange(n) % 3
    return Batch(x, y, torch.ones(n), None, as_key(3, torch.device("cpu")))


@pytest.mark.parametrize(
    "model", ["lenet", "tff_cnn", "cnn(norm=True)", "admm_cnn(channels=(4, 5, 6))", "mlp"]
)
def test_alone_and_under_vmap_gradients_agree(model: str) -> None:
    """Alone, images have their channels last and autograd is plain; under vmap neither is so."""
    task = build(model, (3, 12, 12), 3)
    params, some = task.init(1), batch((3, 12, 12))
    with torch.no_grad():
        alone = grad(task.objective)(params, some)
    first = tree.map(lambda leaf: leaf[None], (params, some.x))
    many = vmap(lambda p, x: torch.func.grad(task.objective)(p, some._replace(x=x)))(*first)
    for name, g in alone.items():
        torch.testing.assert_close(g, many[name][0], atol=1e-6, rtol=1e-4)
        assert g.is_contiguous()


def test_images_of_a_client_alone_have_their_channels_last() -> None:
    task = build("cnn(channels=(4, 5))", (3, 12, 12), 3)
    seen: list[bool] = []
    for layer in task.module.modules():
        if isinstance(layer, nn.Conv2d):
            layer.register_forward_hook(
                lambda layer, inputs, y: seen.append(y.is_contiguous(memory_format=torch.channels_last))
            )
    with torch.no_grad():
        grad(task.objective)(task.init(0), batch((3, 12, 12)))
    assert seen == [True, True]


class Viewing(nn.Module):
    """As many write it: rows of an image by `view`, which asks for PyTorch's usual layout."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 3), nn.Linear(400, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.conv(input=x).view(x.size(0), -1))


def test_models_of_ones_own_keep_their_layout() -> None:
    task = Task(Viewing)
    with torch.no_grad():
        assert set(grad(task.objective)(task.init(0), batch((3, 12, 12)))) == set(task.init(0))


def test_gradients_of_gradients() -> None:
    """f = Σ w³: the gradient of ½‖∇f‖² = ½ Σ (3w²)² is Σ 18 w³."""
    w = Params({"w": torch.tensor([1.0, -2.0])})

    def half_norm(at: Params) -> torch.Tensor:
        return grad(lambda p: (p["w"] ** 3).sum())(at).sqnorm() / 2

    with torch.no_grad():
        found = grad(half_norm)(w)
    assert found["w"].tolist() == [18.0, -144.0]


def test_what_does_not_matter_has_no_gradient() -> None:
    w = Params({"a": torch.ones(2), "b": torch.ones(3)})
    with torch.no_grad():
        partly = grad(lambda p: p["a"].sum())(w)
        none = grad(lambda p: torch.ones(()))(w)
    assert (partly["a"].tolist(), partly["b"].tolist()) == ([1.0, 1.0], [0.0] * 3)
    assert (none["a"].tolist(), none["b"].tolist()) == ([0.0] * 2, [0.0] * 3)
