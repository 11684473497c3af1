"""Params: a point in parameter space, as named tensors with vector arithmetic."""

from __future__ import annotations

import operator
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from apiece import tree

Scalar = Tensor | float | int


class Params(Mapping[str, Tensor]):
    """Named tensors that add, subtract and scale like one vector: `w - lr * g`.

    Immutable, ordered by name, one pytree: `torch.func.grad` of a function of Params returns Params.
    """

    __slots__ = ("_tensors",)

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = {name: tensors[name] for name in sorted(tensors)}

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    # Mapping's own views look every name up again.
    def keys(self) -> KeysView[str]:
        return self._tensors.keys()

    def values(self) -> ValuesView[Tensor]:
        return self._tensors.values()

    def items(self) -> ItemsView[str, Tensor]:
        return self._tensors.items()

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name}: {tuple(t.shape)}" for name, t in self.items())
        return f"Params({shapes})"

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        raise TypeError("compare Params with torch.equal on their tensors")

    def map(self, fn: Callable[..., Tensor], *others: Params) -> Params:
        """`fn` of corresponding tensors."""
        for other in others:
            self._same_names(other)
        each = zip(self.values(), *(other.values() for other in others), strict=True)
        return _named(self, (fn(*tensors) for tensors in each))

    def _same_names(self, other: Params) -> None:
        if self.keys() != other.keys():
            left, right = sorted(set(self) - set(other)), sorted(set(other) - set(self))
            raise ValueError(f"Params differ in names: only left {left}, only right {right}")

    def _apply(self, op: Callable[[Any, Any], Any], other: Params | Scalar) -> Params:
        if isinstance(other, Params):
            return self.map(op, other)
        return self.map(lambda t: op(t, other))

    def __add__(self, other: Params | Scalar) -> Params:
        return self._apply(operator.add, other)

    def __sub__(self, other: Params | Scalar) -> Params:
        return self._apply(operator.sub, other)

    def __mul__(self, other: Params | Scalar) -> Params:
        return self._apply(operator.mul, other)

    def __truediv__(self, other: Params | Scalar) -> Params:
        return self._apply(operator.truediv, other)

    def __rmul__(self, other: Scalar) -> Params:
        return self * other

    def __neg__(self) -> Params:
        return self.map(torch.neg)

    def __or__(self, other: Params) -> Params:
        """Both sets of tensors; where a name stands in both, `other`'s."""
        return Params({**self, **other})

    def zeros(self) -> Params:
        return self.map(torch.zeros_like)

    def dot(self, other: Params) -> Tensor:
        self._same_names(other)
        products = [(t * other[name]).sum() for name, t in self.items()]
        return torch.stack(products).sum() if products else torch.zeros(())

    def sqnorm(self) -> Tensor:
        return self.dot(self)

    def split(self, prefixes: tuple[str, ...]) -> tuple[Params, Params]:
        """(the tensors of the modules named by `prefixes`, the rest): `head, body = w.split(("fc3",))`."""
        chosen = {n for n in self for p in prefixes if n == p or n.startswith(p + ".")}
        return (
            Params({n: t for n, t in self.items() if n in chosen}),
            Params({n: t for n, t in self.items() if n not in chosen}),
        )


def _named(names: Iterable[str], tensors: Iterable[Tensor]) -> Params:
    """Params of names that are in order."""
    params = Params.__new__(Params)
    params._tensors = dict(zip(names, tensors, strict=True))
    return params


def _flatten(params: Params) -> tuple[list[Tensor], tuple[str, ...]]:
    return list(params.values()), tuple(params)


def _flatten_with_keys(params: Params) -> tuple[list[tuple[Any, Tensor]], tuple[str, ...]]:
    return [(pytree.MappingKey(name), t) for name, t in params.items()], tuple(params)


tree.register(
    Params,
    _flatten,
    lambda values, names: _named(names, values),
    flatten_with_keys_fn=_flatten_with_keys,
)
