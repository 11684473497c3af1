"""Large products by oneDNN against the same in double precision, by PyTorch."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import grad, jvp, vmap

from apiece import products
from apiece.descent import Descent, Linear
from apiece.params import Params

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="PyTorch without oneDNN")

ROWS, IN, OUT = 24, 640, 576
assert ROWS * IN * OUT >= products.LARGE


class Counted:
    """The op itself, and how often it was called."""

    def __init__(self) -> None:
        self.calls, self._op = 0, products._computed

    def __call__(self, x: Tensor, w: Tensor) -> Tensor:
        self.calls += 1
        return self._op(x, w)


@pytest.fixture(autouse=True)
def onednn(monkeypatch: pytest.MonkeyPatch) -> Counted:
    """On any CPU, for what is to be right is not which is faster."""
    counted = Counted()
    monkeypatch.setattr(products, "AHEAD", True)
    monkeypatch.setattr(products, "_computed", counted)
    return counted


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def close(found: Tensor, expected: Tensor) -> None:
    assert found.dtype is torch.float32
    assert float((found.double() - expected).norm() / expected.norm()) < 2e-6


X, W, B = drawn(ROWS, IN), drawn(OUT, IN, seed=1), drawn(OUT, seed=2)


def test_a_product(onednn: Counted) -> None:
    close(products.product(X, W), X.double() @ W.double().T)
    close(products.linear(X, W, B), X.double() @ W.double().T + B.double())
    close(products.linear(X, W, None), X.double() @ W.double().T)
    assert onednn.calls == 3


def test_of_matrices_that_lie_otherwise(onednn: Counted) -> None:
    """Transposed, every second row, and one row for all."""
    for x, w in (
        (drawn(IN, ROWS).mT, W),
        (X, drawn(IN, OUT).mT),
        (drawn(2 * ROWS, IN)[::2], W),
        (drawn(1, IN).expand(ROWS, -1), W),
    ):
        close(products.product(x, w), x.double() @ w.double().T)
    assert onednn.calls == 4


def first_and_second(of: Callable[[Tensor, Tensor], Tensor], x: Tensor, w: Tensor) -> list[Tensor]:
    """Gradients of Σ tanh(x wᵀ / 10), and those of the sum of their squares."""
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    once = torch.autograd.grad((of(x, w) / 10).tanh().sum(), (x, w), create_graph=True)
    return [*once, *torch.autograd.grad(sum(g.square().sum() for g in once), (x, w))]  # type: ignore[arg-type]


def test_its_derivatives(onednn: Counted) -> None:
    expected = first_and_second(lambda x, w: x @ w.T, X.double(), W.double())
    for found, right in zip(first_and_second(products.product, X, W), expected, strict=True):
        close(found.detach(), right.detach())
    assert onednn.calls >= 6  # forward, by either, and again by each of these


def test_its_derivatives_by_transformations(onednn: Counted) -> None:
    def value(of: Callable[[Tensor, Tensor], Tensor], w: Tensor, x: Tensor) -> Tensor:
        return (of(x, w) / 10).tanh().sum()

    def curved(of: Callable[[Tensor, Tensor], Tensor], w: Tensor, x: Tensor) -> Tensor:
        """∇ of ‖∇‖² by w, where the inner gradient is by x: neither level follows the other's."""
        return grad(lambda w: grad(lambda x: value(of, w, x))(x).square().sum())(w)

    for of in (lambda of, w, x: grad(lambda w: value(of, w, x))(w), curved):
        found, before = of(products.product, W, X), onednn.calls
        assert before
        close(found, of(lambda x, w: x @ w.T, W.double(), X.double()))


def test_elsewhere_pytorch_computes_it(onednn: Counted) -> None:
    """Small, in double precision, of many clients, with tangents, with autocast."""
    assert torch.equal(products.product(X[:4], W), X[:4] @ W.T)
    products.product(X.double(), W.double())
    many = vmap(products.product)(X[None].expand(3, -1, -1), W[None].expand(3, -1, -1))
    torch.testing.assert_close(many, (X @ W.T).expand(3, -1, -1), rtol=1e-4, atol=1e-4)
    _, tangent = jvp(lambda w: products.product(X, w), (W,), (W,))
    torch.testing.assert_close(tangent, X @ W.T)
    with torch.autocast("cpu", torch.bfloat16):
        assert products.product(X, W).dtype is torch.bfloat16
    assert onednn.calls == 0


def test_shapes_without_numbers() -> None:
    with FakeTensorMode() as mode:
        found = products.product(mode.from_tensor(X), mode.from_tensor(W))
    assert found.shape == (ROWS, OUT)


@torch.no_grad()
def test_a_step_of_descent(onednn: Counted) -> None:
    """Two steps of two layers, against autograd in double precision."""
    wide, narrow = drawn(IN, OUT, seed=3) / 25, drawn(OUT, seed=4)

    def loss(first: Tensor, second: Tensor, x: Tensor) -> Tensor:
        return (torch.tanh(x @ first.T / 25) @ second.T).square().mean()

    expected = [W.double(), wide.double()]
    for _ in range(2):
        with torch.enable_grad():
            held = [w.clone().requires_grad_() for w in expected]
            by = torch.autograd.grad(loss(held[0], held[1], X.double()), held)
        expected = [w - 0.5 * g for w, g in zip(expected, by, strict=True)]

    first, second = Linear(IN, OUT), Linear(OUT, IN, bias=False)

    def objective(w: Params) -> Tensor:
        hidden = torch.tanh(torch.func.functional_call(first, {"weight": w["a"], "bias": w["c"]}, (X / 25,)))
        return torch.func.functional_call(second, {"weight": w["b"]}, (hidden,)).square().mean()

    start = Params({"a": W, "b": wide, "c": 0 * narrow})
    descent = Descent(0.5, start)
    w = start
    for _ in range(2):
        w = descent.step(objective, w)
        w = w | Params({"c": 0 * narrow})
    close(w["a"], expected[0])
    close(w["b"], expected[1])
    assert onednn.calls
