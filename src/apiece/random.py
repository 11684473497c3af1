"""Randomness as a function: every draw is a hash of a key, so nothing depends on what was drawn before.

A key is an int on the host or a 0-d int64 tensor inside a client function; both are mixed by splitmix64
and give the same numbers. Descend by purpose: `fold(seed, "round", 3, "client", 7)`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from apiece import kernels

Key = Tensor

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def _signed(z: int) -> int:
    return z - (1 << 64) if z >> 63 else z


_SIGNED_GAMMA = _signed(_GAMMA)
_SIGNED_MULTIPLIERS = tuple(_signed(m) for m in _MULTIPLIERS)


def _mix_int(z: int) -> int:
    z = (z + _GAMMA) & _MASK
    z = ((z ^ (z >> 30)) * _MULTIPLIERS[0]) & _MASK
    z = ((z ^ (z >> 27)) * _MULTIPLIERS[1]) & _MASK
    return _signed(z ^ (z >> 31))


def _shift_right(z: Tensor, by: int) -> Tensor:
    """Logical shift: int64's own shift copies the sign bit."""
    return (z >> by) & ((1 << (64 - by)) - 1)


def _mix_tensor(z: Tensor) -> Tensor:
    z = z + _SIGNED_GAMMA
    z = (z ^ _shift_right(z, 30)) * _SIGNED_MULTIPLIERS[0]
    z = (z ^ _shift_right(z, 27)) * _SIGNED_MULTIPLIERS[1]
    return z ^ _shift_right(z, 31)


@overload
def _mix(z: int) -> int: ...
@overload
def _mix(z: Tensor) -> Tensor: ...
def _mix(z: int | Tensor) -> int | Tensor:
    return _mix_tensor(z) if isinstance(z, Tensor) else _mix_int(z)


def _number(data: int | str | Tensor) -> int | Tensor:
    if isinstance(data, str):
        digest = hashlib.blake2b(data.encode(), digest_size=8).digest()
        return _signed(int.from_bytes(digest, "big"))
    return data


@overload
def fold(key: int, *data: int | str) -> int: ...  # type: ignore[overload-overlap]
@overload
def fold(key: int | Tensor, *data: int | str | Tensor) -> Tensor: ...
def fold(key: int | Tensor, *data: int | str | Tensor) -> int | Tensor:
    """The key of `data` below `key`: each purpose, round, client, epoch or batch has its own."""
    for item in data:
        key = _mix(key ^ _mix(_number(item)))
    return key


def fold_all(key: int, numbers: Sequence[int]) -> NDArray[np.int64]:
    """`fold(key, number)` of many numbers, on the host."""

    def mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
        z = z + np.uint64(_GAMMA)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(_MULTIPLIERS[0])
        z = (z ^ (z >> np.uint64(27))) * np.uint64(_MULTIPLIERS[1])
        return z ^ (z >> np.uint64(31))

    each = np.asarray(numbers, dtype=np.int64).view(np.uint64)
    return mix(np.uint64(key & _MASK) ^ mix(each)).view(np.int64)


def as_key(key: int, device: torch.device | str = "cpu") -> Key:
    return torch.full((), key, dtype=torch.int64, device=device)


def bits(key: Key, shape: Sequence[int]) -> Tensor:
    """Independent int64 hashes. The first n rows do not depend on how many rows are asked for."""
    counter = torch.arange(math.prod(shape), device=key.device)
    return fold(key, counter).reshape(tuple(shape))


def rank(key: Key, n: int) -> Tensor:
    """n hashes in [0, 2^63): sorting by them is a permutation."""
    return _shift_right(bits(key, (n,)), 1)


def uniform(key: Key, shape: Sequence[int]) -> Tensor:
    """float32 in [0, 1)."""
    if key.is_cuda and kernels.available:
        numbers: Tensor = _Uniform.apply(key, tuple(shape))
        return numbers
    return _shift_right(bits(key, shape), 40).float() * 2.0**-24


class _Uniform(torch.autograd.Function):
    """The same numbers from one kernel."""

    @staticmethod
    def forward(key: Tensor, shape: tuple[int, ...]) -> Tensor:
        return kernels.uniform(key.reshape(-1), math.prod(shape)).reshape(*key.shape, *shape)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def vmap(info: Any, dims: Any, key: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, int]:
        return _Uniform.apply(key.movedim(dims[0], 0), shape), 0


def choose(key: int, count: int, population: int) -> list[int]:
    """`count` different numbers below `population`, sorted; time and memory O(count) (Floyd's algorithm)."""
    if not 0 <= count <= population:
        raise ValueError(f"cannot choose {count} of {population}")
    chosen: set[int] = set()
    for top in range(population - count, population):
        draw = (fold(key, top) & _MASK) % (top + 1)
        chosen.add(top if draw in chosen else draw)
    return sorted(chosen)
