"""CUDA graphs where there is no GPU.

A recording computes as it goes, for PyTorch cannot do without. Afterwards what it has written to is as it
was before, and what it has made is NaN: only a replay, the same operations on the same memory, makes numbers
of it. What a GPU cannot record is refused. Streams do nothing here, and kernels of our own are not used: that
lanes do not disturb each other takes a GPU to see.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map


class _Operation(NamedTuple):
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    made: list[tuple[int, Tensor]]  # which of its results are new, and where they lie


class Graph(TorchDispatchMode):
    """In place of `torch.cuda.CUDAGraph`."""

    def __init__(self) -> None:
        super().__init__()
        self._operations: list[_Operation] = []
        self._made: dict[int, Tensor] = {}
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def capture_begin(self, pool: object = None, capture_error_mode: str = "global") -> None:
        self.__enter__()

    def capture_end(self) -> None:
        self.__exit__(None, None, None)
        for place, before in self._before.values():
            place.copy_(before)
        for tensor in self._made.values():
            if tensor.is_floating_point():
                tensor.new_empty(0).set_(tensor.untyped_storage()).fill_(torch.nan)

    def replay(self) -> None:
        with torch.no_grad(), temporarily_clear_interpreter_stack():
            for func, args, kwargs, made in self._operations:
                found = tree_leaves(func(*args, **kwargs))
                for at, place in made:
                    place.copy_(found[at])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not _recordable(func, args):
            raise RuntimeError(f"a GPU could not record {func}")
        for tensor in _written(func, args, kwargs):
            place = tensor.untyped_storage()
            if place._cdata not in self._made and place._cdata not in self._before:
                self._before[place._cdata] = place, place.clone()
        given = tree_map(_alias, (args, kwargs))  # a tensor's shape may be changed in place
        result = func(*args, **kwargs)
        theirs = {_place(tensor) for tensor in _tensors(given)}
        made = [(at, _alias(t)) for at, t in enumerate(tree_leaves(result)) if _is_new(t, theirs)]
        for _, tensor in made:
            self._made.setdefault(_place(tensor), tensor)
        if torch.Tag.inplace_view not in func.tags:
            self._operations.append(_Operation(func, *given, made))
        return result


def _recordable(func: Any, args: Any) -> bool:
    """Neither is a number read by the host nor does one of the host's become a tensor; sizes are known."""
    if func in (
        torch.ops.aten.index.Tensor,
        torch.ops.aten.index_put.default,
        torch.ops.aten.index_put_.default,
    ):
        return not any(index is not None and index.dtype is torch.bool for index in args[1])
    unknown = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
    return func is not torch.ops.aten.lift_fresh.default and not any(tag in func.tags for tag in unknown)


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    named = {spec.name: value for spec, value in zip(func._schema.arguments, args, strict=False)} | kwargs
    specs = [spec for spec in func._schema.arguments if spec.alias_info and spec.alias_info.is_write]
    return _tensors([named[spec.name] for spec in specs if spec.name in named])


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _alias(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def _place(tensor: Tensor) -> int:
    place: int = tensor.untyped_storage()._cdata
    return place


def _is_new(leaf: Any, theirs: set[int]) -> bool:
    if not isinstance(leaf, Tensor) or leaf._is_zerotensor():  # zeros without memory
        return False
    return leaf.numel() > 0 and _place(leaf) not in theirs


class _Stream:
    def __init__(self, device: torch.device | None = None) -> None:
        pass

    def wait_stream(self, stream: _Stream) -> None:
        pass

    def wait_event(self, event: object) -> None:
        pass

    def record_event(self) -> object:
        return object()


def pretend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the CPU be a GPU to what records and replays."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "Stream", _Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: _Stream())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr("torch.cuda.graphs._graph_pool_handle", lambda: (0, 0))
    monkeypatch.setattr("torch.cuda._POOL_HANDLE", lambda pool: pool)
    for module in ("shard", "engines.base", "engines.narrowing"):
        monkeypatch.setattr(f"apiece.{module}.on_host", lambda tensor: False)
