import math
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

from apiece import Params, tree
from apiece.method import Model


class Pair(NamedTuple):
    left: Any
    right: Any


leaves = st.integers(1, 3).map(lambda n: torch.arange(n, dtype=torch.float32))
names = st.text("abc.", min_size=1, max_size=4)
trees = st.recursive(
    leaves | st.dictionaries(names, leaves, max_size=3).map(Params),
    lambda inner: st.builds(Pair, inner, inner) | st.lists(inner, max_size=3).map(tuple),
    max_leaves=6,
)


@given(trees)
def test_restore_inverts_flatten(value: Any) -> None:
    flat = tree.flatten(value)
    again = tree.restore(value, flat)
    assert tree.same_structure(value, again)
    assert all(a is b for a, b in zip(tree.leaves(value), tree.leaves(again), strict=True))
    assert len(flat) == len(tree.leaves(value))


@given(trees, st.booleans())
def test_map_and_leaves_are_those_of_pytorch(value: Any, listed: bool) -> None:
    value = [value, {"a": value}, None, 3] if listed else value
    assert tree.leaves(value) == pytree.tree_leaves(value)
    seen: list[tuple[Any, Any]] = []
    mapped = tree.map(lambda a, b: seen.append((a, b)) or len(seen), value, value)
    assert [a for a, _ in seen] == [b for _, b in seen] == pytree.tree_leaves(value)
    assert pytree.tree_leaves(mapped) == list(range(1, 1 + len(seen)))
    assert tree.same_structure(mapped, value)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((torch.ones(1),), (torch.ones(1), torch.ones(1))),
        (Pair(torch.ones(1), torch.ones(1)), (torch.ones(1), torch.ones(1))),
        (Params({"a": torch.ones(1)}), Params({"b": torch.ones(1)})),
        (Params({"a": torch.ones(1)}), (torch.ones(1),)),
    ],
)
def test_trees_of_other_structure_are_refused(a: Any, b: Any) -> None:
    for one, other in ((a, b), (b, a)):
        with pytest.raises(ValueError, match=r"trees differ|shorter|longer"):
            tree.map(torch.add, one, other)


@given(trees, st.integers(1, 4))
def test_stack_then_take(value: Any, copies: int) -> None:
    stacked = tree.stack([tree.map(lambda leaf, i=i: leaf + i, value) for i in range(copies)])
    for i in range(copies):
        for got, leaf in zip(tree.leaves(tree.take(stacked, i)), tree.leaves(value), strict=True):
            assert torch.equal(got, leaf + i)


@given(trees)
def test_nbytes(value: Any) -> None:
    assert tree.nbytes(value) == 4 * sum(leaf.numel() for leaf in tree.leaves(value))


def test_paths() -> None:
    value = Pair(Params({"fc.weight": torch.ones(1)}), (torch.ones(1), True))
    assert list(tree.flatten(value)) == ["left/fc.weight", "right/0", "right/1"]


def test_restore_names_what_is_missing_and_unexpected() -> None:
    with pytest.raises(KeyError, match=r"missing \['left'\], unexpected \['middle'\]"):
        tree.restore(Pair(torch.ones(1), torch.ones(1)), {"right": torch.ones(1), "middle": torch.ones(1)})


def test_where_chooses_whole_trees_and_refuses_static_choices() -> None:
    a, b = Pair(torch.ones(2), "x"), Pair(torch.zeros(2), "x")
    assert tree.where(torch.tensor(True), a, b).left.tolist() == [1.0, 1.0]
    assert tree.where(torch.tensor(False), a, b).left.tolist() == [0.0, 0.0]
    with pytest.raises(TypeError, match="static leaf"):
        tree.where(torch.tensor(True), a, b._replace(right="y"))


@pytest.mark.parametrize("value", [1.0, 3e38, math.nan, math.inf, -math.inf])
def test_finite(value: float) -> None:
    """Two large numbers are finite, though their sum is not; nothing is finite, too."""
    leaf = Pair(
        torch.tensor([3e38, value]), (torch.arange(3), torch.ones(0), torch.ones(2, dtype=torch.double))
    )
    assert bool(tree.finite(leaf, torch.device("cpu"))) is math.isfinite(value)
    assert bool(tree.finite((), torch.device("cpu")))


def test_signatures_tell_structure_shapes_and_values_apart() -> None:
    """Of trees that one program computes alike they are equal, of all others not."""
    one = Model(Params({"a": torch.ones(2), "b": torch.zeros(3)}))
    assert tree.signature(one) == tree.signature(tree.map(lambda t: t + 1, one))
    others = [
        Model(Params({"a": torch.ones(2), "c": torch.zeros(3)})),
        Model(Params({"a": torch.ones(3), "b": torch.zeros(3)})),
        Model(Params({"a": torch.ones(2), "b": torch.zeros(3).long()})),
        (Params({"a": torch.ones(2), "b": torch.zeros(3)}),),
        {"a": torch.ones(2), "b": torch.zeros(3)},
        {"a": torch.ones(2), "c": torch.zeros(3)},
        ((), torch.ones(2), True),
        (torch.ones(2), (), True),
        (torch.ones(2), (), False),
    ]
    found = [tree.signature(other) for other in (one, *others)]
    assert len(set(found)) == len(found)
