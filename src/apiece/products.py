"""Products of matrices on a CPU.

PyTorch has MKL compute them, which on AMD's CPUs reaches half of what their vector units can do. oneDNN, by
which it computes convolutions, takes half to two thirds of the time for large ones.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C._functorch import TransformType
from torch.autograd import forward_ad

from apiece.batched import levels, on_host

LARGE = 1 << 23  # multiplications: of smaller products a step with oneDNN takes as long, or longer


def _of_amd() -> bool:
    """Linux tells whose CPU it is."""
    try:
        return "AuthenticAMD" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


AHEAD = (
    torch.backends.mkl.is_available()
    and torch.backends.mkldnn.is_available()
    and torch.backends.cpu.get_cpu_capability() == "AVX512"
    and _of_amd()
)


def _fits(x: Tensor, w: Tensor) -> bool:
    """Is oneDNN asked for x wᵀ?"""
    return (
        AHEAD
        and x.dim() == 2
        and x.shape[0] * w.numel() >= LARGE
        and x.dtype is w.dtype is torch.float32
        and on_host(x)
        and TransformType.Vmap not in levels()
        and forward_ad._current_level < 0
        and not torch.is_autocast_enabled("cpu")
    )


def _computed(x: Tensor, w: Tensor) -> Tensor:
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, w, None, "none", [], "")
    return y


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, w: Tensor) -> Tensor:
        return _computed(x, w)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (x, w), (by_x, by_w) = ctx.saved_tensors, ctx.needs_input_grad
        return product(dy, w.mT) if by_x else None, product(dy.mT, x.mT) if by_w else None


def _followed(x: Tensor, w: Tensor) -> Tensor:
    """By oneDNN; autograd is told of it where it would follow, for to tell it takes time."""
    follows = torch.is_grad_enabled() and (x.requires_grad or w.requires_grad)
    y: Tensor = _Product.apply(x, w) if follows or levels() else _computed(x, w)
    return y


def product(x: Tensor, w: Tensor) -> Tensor:
    """x wᵀ of (B, in), (out, in)."""
    return _followed(x, w) if _fits(x, w) else x @ w.mT


def linear(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    """x wᵀ + bias of (…, in), (out, in), (out,)."""
    if not _fits(x, w):
        return F.linear(x, w, bias)
    y = _followed(x, w)
    return y if bias is None else y + bias
