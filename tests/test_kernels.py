"""Triton kernels against PyTorch's own layers: on a CUDA device or, where there is none, interpreted."""

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from apiece import Method, Recipe, kernels, random
from apiece.engines.base import Engine
from apiece.engines.lowering import Direct, Pooled
from apiece.engines.sequential import Sequential
from apiece.engines.vectorized import Vectorized
from apiece.kernels import Geometry
from apiece.methods.fedavg import FedAvg
from apiece.methods.maml import MAML
from apiece.params import Params
from tests.worlds import CPU, federation, servers

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
runs = pytest.mark.skipif(
    not kernels.available or not (torch.cuda.is_available() or INTERPRETED),
    reason="nothing to run kernels on",
)

# images of a client, height, width, channels, outputs, kernel, stride, padding
SHAPES = [
    (3, 12, 11, 1, 6, (5, 5), (1, 1), (2, 2)),
    (2, 32, 32, 3, 64, (5, 5), (1, 1), (0, 0)),
    (2, 9, 8, 3, 5, (3, 2), (2, 1), (1, 0)),
    (4, 7, 7, 15, 20, (3, 3), (1, 1), (1, 1)),
    (4, 7, 7, 16, 20, (3, 3), (1, 1), (1, 1)),
    (2, 8, 8, 40, 70, (3, 3), (2, 2), (0, 0)),
]
CLIENTS = 3


@pytest.fixture(autouse=True)
def full_precision() -> None:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs.to(ours), rtol=1e-4, atol=1e-4 * float(theirs.abs().max()))


@runs
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_convolutions(shape: tuple) -> None:  # type: ignore[type-arg]
    """In double precision by PyTorch, client by client."""
    images, H, W, C, O, kernel, stride, padding = shape  # noqa: E741
    torch.manual_seed(0)
    x, w = torch.randn(CLIENTS, images, H, W, C), torch.randn(CLIENTS, *kernel, C, O)
    bias = torch.randn(CLIENTS, O)
    given = [t.double().requires_grad_() for t in (x, w)]
    y = torch.stack(
        [
            F.conv2d(
                given[0][k].permute(0, 3, 1, 2),
                given[1][k].permute(3, 2, 0, 1),
                bias[k].double(),
                stride=stride,
                padding=padding,
            ).permute(0, 2, 3, 1)
            for k in range(CLIENTS)
        ]
    )
    dy = torch.randn(y.shape)
    by_x, by_w = torch.autograd.grad(y, given, dy.double())
    g = Geometry(images, H, W, C, *y.shape[2:], kernel, stride, padding)
    x, w, bias, dy = (t.to(DEVICE) for t in (x, w, bias, dy))
    close(kernels.conv(x, w, bias, g), y.detach())
    close(kernels.conv_to_input(dy, w, g), by_x)
    close(kernels.conv_to_weight(x, dy, g), by_w)


@runs
def test_a_tensor_may_stand_for_all_clients() -> None:
    images, H, W, C, O, kernel, stride, padding = SHAPES[0]  # noqa: E741
    x, w = torch.randn(images, H, W, C, device=DEVICE), torch.randn(CLIENTS, *kernel, C, O, device=DEVICE)
    g = Geometry(images, H, W, C, H, W, O, kernel, stride, padding)
    bias = torch.zeros(O, device=DEVICE)
    shared = kernels.conv(x.expand(CLIENTS, *x.shape), w, bias.expand(CLIENTS, O), g)
    for k in range(CLIENTS):
        close(shared[k], kernels.conv(x[None], w[k][None], bias[None], g)[0])


@runs
def test_pooling() -> None:
    """Of several equally large entries the first; rows and columns over are left out."""
    x = torch.randint(0, 4, (3, 7, 6, 5)).float()
    x.requires_grad_()
    y = F.max_pool2d(x.permute(0, 3, 1, 2), 2).permute(0, 2, 3, 1)
    dy = torch.randn(y.shape)
    (dx,) = torch.autograd.grad(y, x, dy)
    ours, index = kernels.pool(x.detach().to(DEVICE), 2)
    assert torch.equal(ours.cpu(), y.detach())
    assert torch.equal(kernels.unpool(dy.to(DEVICE), index, (7, 6), 2).cpu(), dx)


@runs
def test_random_numbers() -> None:
    keys = torch.tensor([0, 1, -5, 2**62], device=DEVICE)
    ours = kernels.uniform(keys, 3000).cpu()
    for key, numbers in zip(keys.cpu(), ours, strict=True):
        assert torch.equal(numbers, random.uniform(key, (3000,)))


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Linear(5, 36),
        nn.Unflatten(1, (1, 6, 6)),
        nn.Conv2d(1, 3, 3),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(12, 3),
    )


def by_kernels() -> nn.Module:
    net = convolutional()
    net[2].__class__, net[3].__class__ = Direct, Pooled  # type: ignore[index]
    return net


@runs
def test_layers_of_many_clients_and_their_second_derivatives() -> None:
    layers = [make().to(DEVICE) for make in (by_kernels, convolutional)]
    x = torch.randn(CLIENTS, 4, 5, device=DEVICE)
    w = {name: torch.randn(CLIENTS, *p.shape, device=DEVICE) for name, p in layers[0].named_parameters()}

    def derivatives(module: nn.Module) -> list[Tensor]:
        def value(w: dict[str, Tensor], x: Tensor) -> Tensor:
            return functional_call(module, w, (x,)).sin().sum()

        def steepness(w: dict[str, Tensor], x: Tensor) -> Tensor:
            return sum((g.square().sum() for g in grad(value)(w, x).values()), torch.zeros((), device=DEVICE))

        return [*vmap(grad(value))(w, x).values(), *vmap(grad(steepness))(w, x).values()]

    for ours, theirs in zip(*map(derivatives, layers), strict=True):
        close(ours, theirs)


@pytest.mark.skipif(not kernels.available or not INTERPRETED, reason="engines of a GPU are checked elsewhere")
@pytest.mark.parametrize(
    "method",
    [
        FedAvg(local=Recipe(lr=0.1, batch_size=2, epochs=2)),
        MAML(local=Recipe(lr=0.1, batch_size=2, epochs=1)),
    ],
    ids=lambda method: type(method).__name__,
)
def test_ragged_clients(method: Method) -> None:
    """Steps narrowed to those who have a batch give what each client alone gives by PyTorch's layers."""

    def trained(engine: Engine, net: Callable[[], nn.Module]) -> Params:
        training, server = federation(method, engine, (9, 4, 2, 3), 3, net)
        *_, last = servers(training, server, 2)
        return last.params

    ours, theirs = trained(Vectorized(CPU, 8), by_kernels), trained(Sequential(CPU, 1), convolutional)
    for name in theirs:
        torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.skipif(
    not kernels.available or torch.cuda.is_available() or INTERPRETED,
    reason="runs where it stands, or nowhere",
)
def test_interpreted() -> None:
    """Triton reads the variable when the kernels are defined, so in a process of its own."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0", __file__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "passed" in done.stdout
    assert "skipped" not in done.stdout.splitlines()[-1] or " 1 skipped" in done.stdout.splitlines()[-1]
