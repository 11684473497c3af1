"""Trees: nested NamedTuples, tuples and Params whose leaves are tensors.

The one place that knows PyTorch's pytree module. A leaf that is not a tensor (a bool, a string, a small
int) is *static*: part of the program, not of the data.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

Tree = Any

_registered: dict[type, tuple[Callable[[Any], tuple[list[Any], Any]], Callable[[Any, Any], Any]]] = {}


def register(
    kind: type,
    flatten: Callable[[Any], tuple[list[Any], Any]],
    unflatten: Callable[[Any, Any], Any],
    flatten_with_keys_fn: Callable[[Any], tuple[list[tuple[Any, Any]], Any]],
) -> None:
    """Make a class a node of trees, here and for torch.func: `flatten` gives (children, what else it is)."""
    pytree.register_pytree_node(kind, flatten, unflatten, flatten_with_keys_fn=flatten_with_keys_fn)
    _registered[kind] = flatten, unflatten


# The usual nodes are gone through here: PyTorch's functions, in Python too, take several times as long, which
# is felt where a client's whole training takes milliseconds.


def map(fn: Callable[..., Any], tree: Tree, *rest: Tree) -> Tree:
    """Apply `fn` to corresponding leaves."""
    if isinstance(tree, Tensor):
        return fn(tree, *rest)
    kind = type(tree)
    if (isinstance(tree, tuple) or kind in _registered) and any(type(other) is not kind for other in rest):
        raise ValueError(f"trees differ: {', '.join(type(one).__name__ for one in (tree, *rest))}")
    if isinstance(tree, tuple):
        found = [map(fn, *parts) for parts in zip(tree, *rest, strict=True)]
        return kind(*found) if hasattr(kind, "_fields") else kind(found)
    if kind in _registered:
        flatten, unflatten = _registered[kind]
        each, what = zip(*(flatten(one) for one in (tree, *rest)), strict=True)
        if any(other != what[0] for other in what):
            raise ValueError(f"trees differ in a {kind.__name__}: {what}")
        return unflatten([map(fn, *parts) for parts in zip(*each, strict=True)], what[0])
    return pytree.tree_map(fn, tree, *rest) if kind in pytree.SUPPORTED_NODES else fn(tree, *rest)


def leaves(tree: Tree) -> list[Any]:
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, tuple):
        return [leaf for part in tree for leaf in leaves(part)]
    if type(tree) in _registered:
        flatten, _ = _registered[type(tree)]
        return [leaf for part in flatten(tree)[0] for leaf in leaves(part)]
    return pytree.tree_leaves(tree)


def tensors(tree: Tree) -> list[Tensor]:
    return [leaf for leaf in leaves(tree) if isinstance(leaf, Tensor)]


def same_structure(a: Tree, b: Tree) -> bool:
    return pytree.tree_structure(a) == pytree.tree_structure(b)


def signature(tree: Tree) -> Hashable:
    """Structure, shapes and types of the tensors, values of all else: what a program of them is fixed to."""
    if isinstance(tree, Tensor):
        return tree.shape, tree.dtype
    kind = type(tree)
    if isinstance(tree, tuple):
        return kind, *(signature(part) for part in tree)
    if kind in _registered:
        parts, what = _registered[kind][0](tree)
        return kind, what, *(signature(part) for part in parts)
    if kind in pytree.SUPPORTED_NODES:
        parts, structure = pytree.tree_flatten(tree)
        return repr(structure), *(signature(part) for part in parts)
    found: Hashable = tree
    return found


def flatten(tree: Tree) -> dict[str, Any]:
    """path → leaf, paths as `params/fc1.weight`: what is written to disk and sent over the wire."""
    pairs, _ = pytree.tree_flatten_with_path(tree)
    return {"/".join(_name(entry) for entry in path): leaf for path, leaf in pairs}


def _name(entry: Any) -> str:
    for attribute in ("name", "key", "idx"):
        value = getattr(entry, attribute, None)
        if value is not None:
            return str(value)
    raise TypeError(f"unknown kind of tree path: {entry!r}")


def restore(template: Tree, values: Mapping[str, Any]) -> Tree:
    """The inverse of `flatten`: `template` gives the structure, `values` the leaves."""
    names = list(flatten(template))
    missing, extra = sorted(set(names) - set(values)), sorted(set(values) - set(names))
    if missing or extra:
        raise KeyError(f"leaves differ: missing {missing or 'none'}, unexpected {extra or 'none'}")
    return pytree.tree_unflatten([values[name] for name in names], pytree.tree_structure(template))


def where(condition: Tensor, a: Tree, b: Tree) -> Tree:
    """`a` where the 0-d `condition` holds, else `b`; static leaves must agree."""

    def choose(x: Any, y: Any) -> Any:
        if isinstance(x, Tensor):
            return torch.where(condition, x, y)
        if x != y:
            raise TypeError(f"a static leaf cannot depend on data: {x!r} or {y!r}")
        return x

    return map(choose, a, b)


def contiguous(tree: Tree) -> Tree:
    return map(lambda leaf: leaf.contiguous() if isinstance(leaf, Tensor) else leaf, tree)


def clone(tree: Tree) -> Tree:
    """The same values in tensors of their own; leaves that are no tensors stay."""
    return map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, tree)


def zeros(tree: Tree) -> Tree:
    return map(torch.zeros_like, tree)


def stack(trees: list[Tree]) -> Tree:
    return map(lambda *leaf: torch.stack(leaf), *trees)


def concat(trees: list[Tree]) -> Tree:
    return map(lambda *leaf: torch.cat(leaf), *trees)


def take(tree: Tree, index: int | slice | Tensor) -> Tree:
    """Entry (or entries) `index` along the first axis of every leaf."""
    return map(lambda leaf: leaf[index], tree)


def to(tree: Tree, device: torch.device | str) -> Tree:
    return map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, tree)


def nbytes(tree: Tree) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in tensors(tree))


def finite(tree: Tree, device: torch.device) -> Tensor:
    """0-d bool: no floating leaf holds a NaN or an infinity, for one of its extremes would be it."""
    leaves = [leaf for leaf in tensors(tree) if leaf.is_floating_point() and leaf.numel()]
    if not leaves:
        return torch.ones((), dtype=torch.bool, device=device)
    return (
        torch.stack([extreme for leaf in leaves for extreme in (leaf.amax(), leaf.amin())]).isfinite().all()
    )
