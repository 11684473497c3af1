"""Triton kernels: what PyTorch would do in many passes over the memory of a CUDA device, in one.

Everything here has an equal in plain PyTorch (random.uniform, torch.conv2d); only the speed differs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

try:
    import triton
    import triton.language as tl
except ImportError:  # PyTorch without CUDA comes without it
    triton = None

available = triton is not None


class Geometry(NamedTuple):
    """A convolution of (H, W, C) images with channels last to (height, width, O)."""

    images: int  # of one client
    H: int
    W: int
    C: int
    height: int
    width: int
    O: int  # noqa: E741
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]


def _power(size: int, least: int, most: int) -> int:
    """The power of two that holds `size`, between `least` and `most`."""
    return min(max(least, 1 << (size - 1).bit_length()), most)


def _real(tensor: Tensor) -> bool:
    """Shapes are worked out on tensors without memory."""
    return not isinstance(tensor, FakeTensor)


def precision() -> str:
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"


if available:

    @triton.jit
    def _mix(z):
        z = z + 0x9E3779B97F4A7C15
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB
        return z ^ (z >> 31)

    @triton.jit
    def _uniform(keys, out, count, BLOCK: tl.constexpr):
        client = tl.program_id(1).to(tl.int64)
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        key = tl.load(keys + client).to(tl.uint64, bitcast=True)
        hashed = _mix(key ^ _mix(at.to(tl.uint64)))
        value = (hashed >> 40).to(tl.float32) * 5.9604644775390625e-08  # 2^-24
        tl.store(out + client * count + at, value, mask=at < count)

    FEW = tl.constexpr(16)  # channels: a product of fewer would be mostly zeros

    @triton.jit
    def _windows(
        x, m, k, rows, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, HO: tl.constexpr,
        WO: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
        PH: tl.constexpr, PW: tl.constexpr,
    ):  # fmt: skip
        """Entries k of the windows around outputs m, zeros where there are none."""
        image, h, v = m // (HO * WO), m // WO % HO, m % WO
        tap, c = k // C, k % C
        down = (h * SH - PH)[:, None] + (tap // KW)[None, :]
        across = (v * SW - PW)[:, None] + (tap % KW)[None, :]
        inside = (m < rows)[:, None] & (k < KH * KW * C)[None, :]
        inside = inside & (down >= 0) & (down < H) & (across >= 0) & (across < W)
        place = ((image * H)[:, None] + down) * W + across
        return tl.load(x + place * C + c[None, :], mask=inside, other=0.0)

    # Another number of images or clients is no other kernel to compile. But how many entries an image has is
    # known, so that they are read and written several at once.
    @triton.jit(do_not_specialize=["images"])
    def _conv(
        x,
        w,
        bias,
        y,
        x_client,
        w_client,
        bias_client,
        images,
        H: tl.constexpr,
        W: tl.constexpr,
        C: tl.constexpr,
        HO: tl.constexpr,
        WO: tl.constexpr,
        O: tl.constexpr,  # noqa: E741
        KH: tl.constexpr,
        KW: tl.constexpr,
        SH: tl.constexpr,
        SW: tl.constexpr,
        PH: tl.constexpr,
        PW: tl.constexpr,
        PRECISION: tl.constexpr,
        BM: tl.constexpr,
        BN: tl.constexpr,
        BK: tl.constexpr,
    ):
        """y[image, h, v] = Σ over i, j, c of x[image, h·S + i − P, v·S + j − P, c] · w[i, j, c] + bias."""
        rows = images * (HO * WO)
        client = tl.program_id(2).to(tl.int64)
        m = tl.program_id(0) * BM + tl.arange(0, BM)
        o = tl.program_id(1) * BN + tl.arange(0, BN)
        total = tl.zeros((BM, BN), dtype=tl.float32)
        if C < FEW:  # a window's entries side by side, whichever tap and channel they are of
            for begin in range(0, KH * KW * C, BK):
                k = begin + tl.arange(0, BK)
                a = _windows(x + client * x_client, m, k, rows, H, W, C, HO, WO, KH, KW, SH, SW, PH, PW)
                b = tl.load(
                    w + client * w_client + k[:, None] * O + o[None, :],
                    mask=(k < KH * KW * C)[:, None] & (o < O)[None, :],
                    other=0.0,
                )
                total = tl.dot(a, b, total, input_precision=PRECISION)
        else:
            image, h, v = m // (HO * WO), m // WO % HO, m % WO
            for tap in tl.static_range(KH * KW):
                down, across = h * SH + tap // KW - PH, v * SW + tap % KW - PW
                inside = (m < rows) & (down >= 0) & (down < H) & (across >= 0) & (across < W)
                place = ((image * H + down) * W + across) * C
                for begin in range(0, C, BK):
                    c = begin + tl.arange(0, BK)
                    a = tl.load(
                        x + client * x_client + place[:, None] + c[None, :],
                        mask=inside[:, None] & (c < C)[None, :],
                        other=0.0,
                    )
                    b = tl.load(
                        w + client * w_client + (tap * C + c)[:, None] * O + o[None, :],
                        mask=(c < C)[:, None] & (o < O)[None, :],
                        other=0.0,
                    )
                    total = tl.dot(a, b, total, input_precision=PRECISION)
        total += tl.load(bias + client * bias_client + o, mask=o < O, other=0.0)[None, :]
        place = client * rows * O + m[:, None] * O + o[None, :]
        tl.store(y + place, total, mask=(m < rows)[:, None] & (o < O)[None, :])

    @triton.jit(do_not_specialize=["images"])
    def _conv_to_input(
        dy,
        w,
        dx,
        dy_client,
        w_client,
        images,
        H: tl.constexpr,
        W: tl.constexpr,
        C: tl.constexpr,
        HO: tl.constexpr,
        WO: tl.constexpr,
        O: tl.constexpr,  # noqa: E741
        KH: tl.constexpr,
        KW: tl.constexpr,
        SH: tl.constexpr,
        SW: tl.constexpr,
        PH: tl.constexpr,
        PW: tl.constexpr,
        PRECISION: tl.constexpr,
        BM: tl.constexpr,
        BN: tl.constexpr,
        BK: tl.constexpr,
    ):
        """dx[image, h, v, c] = Σ over the taps and o that read it of dy[image, h', v', o] · w[tap, c, o]."""
        rows = images * (H * W)
        client = tl.program_id(2).to(tl.int64)
        m = tl.program_id(0) * BM + tl.arange(0, BM)
        c = tl.program_id(1) * BN + tl.arange(0, BN)
        image, h, v = m // (H * W), m // W % H, m % W
        total = tl.zeros((BM, BN), dtype=tl.float32)
        for tap in tl.static_range(KH * KW):
            down, across = h + PH - tap // KW, v + PW - tap % KW
            inside = (m < rows) & (down >= 0) & (across >= 0) & (down % SH == 0) & (across % SW == 0)
            down, across = down // SH, across // SW
            inside = inside & (down < HO) & (across < WO)
            place = ((image * HO + down) * WO + across) * O
            for begin in range(0, O, BK):
                o = begin + tl.arange(0, BK)
                a = tl.load(
                    dy + client * dy_client + place[:, None] + o[None, :],
                    mask=inside[:, None] & (o < O)[None, :],
                    other=0.0,
                )
                b = tl.load(
                    w + client * w_client + (tap * C + c)[None, :] * O + o[:, None],
                    mask=(c < C)[None, :] & (o < O)[:, None],
                    other=0.0,
                )
                total = tl.dot(a, b, total, input_precision=PRECISION)
        place = client * rows * C + m[:, None] * C + c[None, :]
        tl.store(dx + place, total, mask=(m < rows)[:, None] & (c < C)[None, :])

    @triton.jit(do_not_specialize=["images"])
    def _conv_to_weight(
        x,
        dy,
        dw,
        x_client,
        dy_client,
        images,
        H: tl.constexpr,
        W: tl.constexpr,
        C: tl.constexpr,
        HO: tl.constexpr,
        WO: tl.constexpr,
        O: tl.constexpr,  # noqa: E741
        KH: tl.constexpr,
        KW: tl.constexpr,
        SH: tl.constexpr,
        SW: tl.constexpr,
        PH: tl.constexpr,
        PW: tl.constexpr,
        PRECISION: tl.constexpr,
        BC: tl.constexpr,
        BO: tl.constexpr,
        BM: tl.constexpr,
    ):
        """dw[tap, c, o] = Σ over image, h, v of x[image, h·S + i − P, v·S + j − P, c] · dy[image, h, v, o]"""
        rows = images * (HO * WO)
        client, tap = tl.program_id(2).to(tl.int64), tl.program_id(0)
        blocks: tl.constexpr = (O + BO - 1) // BO
        c = tl.program_id(1) // blocks * BC + tl.arange(0, BC)
        o = tl.program_id(1) % blocks * BO + tl.arange(0, BO)
        total = tl.zeros((BC, BO), dtype=tl.float32)
        for begin in range(0, rows, BM):
            m = begin + tl.arange(0, BM)
            image, h, v = m // (HO * WO), m // WO % HO, m % WO
            down, across = h * SH + tap // KW - PH, v * SW + tap % KW - PW
            inside = (m < rows) & (down >= 0) & (down < H) & (across >= 0) & (across < W)
            place = ((image * H + down) * W + across) * C
            a = tl.load(
                x + client * x_client + place[None, :] + c[:, None],
                mask=inside[None, :] & (c < C)[:, None],
                other=0.0,
            )
            b = tl.load(
                dy + client * dy_client + m[:, None] * O + o[None, :],
                mask=(m < rows)[:, None] & (o < O)[None, :],
                other=0.0,
            )
            total = tl.dot(a, b, total, input_precision=PRECISION)
        place = client * KH * KW * C * O + (tap * C + c)[:, None] * O + o[None, :]
        tl.store(dw + place, total, mask=(c < C)[:, None] & (o < O)[None, :])

    @triton.jit(do_not_specialize=["images", "parts"])
    def _few_to_weight(
        x,
        dy,
        dw,
        x_client,
        dy_client,
        parts,
        images,
        H: tl.constexpr,
        W: tl.constexpr,
        C: tl.constexpr,
        HO: tl.constexpr,
        WO: tl.constexpr,
        O: tl.constexpr,  # noqa: E741
        KH: tl.constexpr,
        KW: tl.constexpr,
        SH: tl.constexpr,
        SW: tl.constexpr,
        PH: tl.constexpr,
        PW: tl.constexpr,
        PRECISION: tl.constexpr,
        BK: tl.constexpr,
        BO: tl.constexpr,
        BM: tl.constexpr,
    ):
        """The same for few channels: dw[k, o] of a part of the outputs, k the entries of a window."""
        rows = images * (HO * WO)
        client, part = tl.program_id(2).to(tl.int64), tl.program_id(1)
        blocks: tl.constexpr = (O + BO - 1) // BO
        size: tl.constexpr = KH * KW * C
        k = tl.program_id(0) // blocks * BK + tl.arange(0, BK)
        o = tl.program_id(0) % blocks * BO + tl.arange(0, BO)
        total = tl.zeros((BK, BO), dtype=tl.float32)
        for begin in range(part * BM, rows, parts * BM):
            m = begin + tl.arange(0, BM)
            a = _windows(x + client * x_client, m, k, rows, H, W, C, HO, WO, KH, KW, SH, SW, PH, PW)
            b = tl.load(
                dy + client * dy_client + m[:, None] * O + o[None, :],
                mask=(m < rows)[:, None] & (o < O)[None, :],
                other=0.0,
            )
            total = tl.dot(tl.trans(a), b, total, input_precision=PRECISION)
        place = (client * parts + part) * size * O + k[:, None] * O + o[None, :]
        tl.store(dw + place, total, mask=(k < size)[:, None] & (o < O)[None, :])

    @triton.jit(do_not_specialize=["images"])
    def _pool(
        x, y, index, image, down, across, channel, images, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr,
        K: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        """The largest entry of each K × K window, and which it is: the first of several, NaN before all."""
        count = images.to(tl.int64) * (H * W * C)
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        c, v, h, b = at % C, at // C % W, at // (C * W) % H, at // (C * W * H)
        start = x + b * image + h * K * down + v * K * across + c * channel
        best = tl.load(start, mask=at < count, other=0.0)
        which = tl.zeros((BLOCK,), dtype=tl.int32)
        for tap in tl.static_range(1, K * K):
            value = tl.load(start + (tap // K) * down + (tap % K) * across, mask=at < count, other=0.0)
            better = (value > best) | (value != value)  # noqa: PLR0124
            best, which = tl.where(better, value, best), tl.where(better, tap, which)
        tl.store(y + at, best, mask=at < count)
        tl.store(index + at, which.to(tl.int8), mask=at < count)

    @triton.jit(do_not_specialize=["images"])
    def _unpool(
        dy, index, dx, image, down, across, channel, images, H: tl.constexpr, W: tl.constexpr,
        C: tl.constexpr, HP: tl.constexpr, WP: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        """dx: what lies at each window's chosen entry is dy, all else is zero."""
        count = images.to(tl.int64) * (H * W * C)
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        c, v, h, b = at % C, at // C % W, at // (C * W) % H, at // (C * W * H)
        inside = (at < count) & (h // K < HP) & (v // K < WP)
        place = ((b * HP + h // K) * WP + v // K) * C + c
        which = tl.load(index + place, mask=inside, other=-1)
        start = dy + b * image + (h // K) * down + (v // K) * across + c * channel
        mine = inside & (which == h % K * K + v % K)
        tl.store(dx + at, tl.load(start, mask=mine, other=0.0), mask=at < count)


def uniform(keys: Tensor, count: int) -> Tensor:
    """(clients,) keys → (clients, count) numbers: those of `random.uniform`."""
    out = torch.empty((len(keys), count), device=keys.device)
    if out.numel() and _real(out):
        block = 1024
        _uniform[triton.cdiv(count, block), len(keys)](keys.contiguous(), out, count, block)
    return out


def _few(g: Geometry) -> bool:
    few: bool = FEW.value > g.C
    return few


def _tall(rows: int, most: int) -> int:
    """Rows of a program. Of a client's alone: another number of clients is no other kernel to compile, which
    could not be done while a graph is recorded.
    """
    tall = most
    while tall > 64 and rows < 8 * tall:
        tall //= 2
    return tall


def _sizes(g: Geometry) -> tuple[Any, ...]:
    return (g.H, g.W, g.C, g.height, g.width, g.O, *g.kernel, *g.stride, *g.padding, precision())


def conv(x: Tensor, w: Tensor, bias: Tensor, g: Geometry) -> Tensor:
    """Clients × ((images, H, W, C), (kh, kw, C, O), (O,) → (images, height, width, O))."""
    clients, rows = len(x), g.images * g.height * g.width
    y = x.new_empty((clients, g.images, g.height, g.width, g.O))
    bn, bk = _power(g.O, 16, 64), 32 if _few(g) else _power(g.C, 16, 32)
    bm = _tall(rows, 256)
    grid = triton.cdiv(rows, bm), triton.cdiv(g.O, bn), clients
    if _real(y):
        strides = (x.stride(0), w.stride(0), bias.stride(0))
        _conv[grid](x, w, bias, y, *strides, g.images, *_sizes(g), bm, bn, bk)
    return y


def conv_to_input(dy: Tensor, w: Tensor, g: Geometry) -> Tensor:
    clients, rows = len(dy), g.images * g.H * g.W
    dx = dy.new_empty((clients, g.images, g.H, g.W, g.C))
    bn, bk = _power(g.C, 16, 64), _power(g.O, 16, 32)
    bm = _tall(rows, 128)
    grid = triton.cdiv(rows, bm), triton.cdiv(g.C, bn), clients
    if _real(dx):
        _conv_to_input[grid](dy, w, dx, dy.stride(0), w.stride(0), g.images, *_sizes(g), bm, bn, bk)
    return dx


def conv_to_weight(x: Tensor, dy: Tensor, g: Geometry) -> Tensor:
    clients, taps = len(x), g.kernel[0] * g.kernel[1]
    if _few(g):
        return _of_few(x, dy, g)
    dw = x.new_empty((clients, *g.kernel, g.C, g.O))
    bc, bo, bm = _power(g.C, 16, 64), _power(g.O, 16, 64), 64
    grid = taps, triton.cdiv(g.C, bc) * triton.cdiv(g.O, bo), clients
    if _real(dw):
        _conv_to_weight[grid](x, dy, dw, x.stride(0), dy.stride(0), g.images, *_sizes(g), bc, bo, bm)
    return dw


def _of_few(x: Tensor, dy: Tensor, g: Geometry) -> Tensor:
    clients, rows, entries = len(x), g.images * g.height * g.width, g.kernel[0] * g.kernel[1] * g.C
    bk, bo, bm = 32, _power(g.O, 16, 64), 64
    tiles = triton.cdiv(entries, bk) * triton.cdiv(g.O, bo)
    parts = min(32, triton.cdiv(rows, 8 * bm))  # each program is to have some rows to add up
    dw = x.new_empty((clients, parts, *g.kernel, g.C, g.O))
    if _real(dw):
        grid = tiles, parts, clients
        _few_to_weight[grid](x, dy, dw, x.stride(0), dy.stride(0), parts, g.images, *_sizes(g), bk, bo, bm)
    return dw[:, 0] if parts == 1 else dw.sum(1)


def pool(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """(images, H, W, C) → the largest entries of size × size windows and their places in them."""
    images, H, W, C = x.shape
    y = x.new_empty((images, H // size, W // size, C))
    index = torch.empty(y.shape, dtype=torch.int8, device=x.device)
    if y.numel() and _real(y):
        block = 1024
        grid = (triton.cdiv(y.numel(), block),)
        _pool[grid](x, y, index, *x.stride(), *y.shape, size, block)
    return y, index


def unpool(dy: Tensor, index: Tensor, shape: tuple[int, ...], size: int) -> Tensor:
    """(images, H / size, W / size, C) and the places → (images, *shape, C)."""
    dx = dy.new_empty((len(dy), *shape, dy.shape[3]))
    if dx.numel() and _real(dx):
        block = 1024
        grid = (triton.cdiv(dx.numel(), block),)
        _unpool[grid](dy, index, dx, *dy.stride(), *dx.shape, *dy.shape[1:3], size, block)
    return dx
