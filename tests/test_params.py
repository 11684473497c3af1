import pytest
import torch
from torch.func import grad, vmap

from apiece import Params, tree


def point(a: float, b: float) -> Params:
    return Params({"b.weight": torch.tensor([b]), "a.weight": torch.tensor([a, 2 * a])})


def test_arithmetic_by_hand() -> None:
    w, g = point(1.0, 3.0), point(10.0, -1.0)
    out = (w - 0.5 * g) / 2 + w * g
    # a: ([1, 2] − [5, 10]) / 2 + [10, 40] = [8, 36];  b: (3 + 0.5) / 2 − 3 = −1.25
    assert out["a.weight"].tolist() == [8.0, 36.0]
    assert out["b.weight"].tolist() == [-1.25]
    assert (-w)["b.weight"].item() == -3.0
    assert (w + 1.0)["a.weight"].tolist() == [2.0, 3.0]


def test_dot_and_sqnorm() -> None:
    assert point(1.0, 3.0).dot(point(10.0, -1.0)).item() == 10 + 40 - 3
    assert point(1.0, 3.0).sqnorm().item() == 1 + 4 + 9
    assert Params({}).sqnorm().item() == 0


def test_names_are_sorted_whatever_the_order_given() -> None:
    assert list(point(1.0, 2.0)) == ["a.weight", "b.weight"]
    assert [leaf.numel() for leaf in tree.leaves(point(1.0, 2.0))] == [2, 1]


def test_operators_name_what_differs() -> None:
    with pytest.raises(ValueError, match=r"only left \['b.weight'\], only right \['c'\]"):
        point(1.0, 2.0) - Params({"a.weight": torch.zeros(2), "c": torch.zeros(1)})


def test_split_goes_by_module_names_not_by_letters() -> None:
    w = Params({"fc1.weight": torch.ones(1), "fc10.weight": torch.ones(2), "fc1.bias": torch.ones(3)})
    head, body = w.split(("fc1",))
    assert list(head) == ["fc1.bias", "fc1.weight"]
    assert list(body) == ["fc10.weight"]
    assert list(body | head) == list(w)


def test_merge_takes_the_right_hand_side() -> None:
    assert (point(1.0, 2.0) | Params({"b.weight": torch.tensor([7.0])}))["b.weight"].item() == 7.0


def test_grad_and_vmap_keep_params() -> None:
    g = grad(lambda w: w.sqnorm())(point(1.0, 3.0))
    assert isinstance(g, Params)
    assert g["a.weight"].tolist() == [2.0, 4.0]
    both = tree.stack([point(1.0, 3.0), point(2.0, 0.0)])
    assert vmap(lambda w: w.sqnorm())(both).tolist() == [14.0, 20.0]


def test_equality_is_refused() -> None:
    with pytest.raises(TypeError, match=r"torch\.equal"):
        point(1.0, 2.0) == point(1.0, 2.0)  # noqa: B015
