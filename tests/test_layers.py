from collections import OrderedDict

import pytest
from torch import nn

from apiece.errors import ApieceError
from apiece.layers import LAST_LINEAR, NORMALIZATION, prefixes
from apiece.task import Task


def net() -> nn.Module:
    body = nn.Sequential(OrderedDict(fc=nn.Linear(4, 6), norm=nn.GroupNorm(2, 6)))
    return nn.Sequential(OrderedDict(body=body, last=nn.LayerNorm(6), out=nn.Linear(6, 3)))


TASK = Task(net)


def test_the_last_linear_layer_is_found_and_splits_the_params() -> None:
    assert prefixes(TASK, (LAST_LINEAR,)) == ("out",)
    head, body = TASK.init(0).split(prefixes(TASK, (LAST_LINEAR,)))
    assert list(head) == ["out.bias", "out.weight"]
    assert set(head) | set(body) == {name for name, _ in net().named_parameters()}


def test_normalization_layers_are_found_at_any_depth() -> None:
    assert prefixes(TASK, (NORMALIZATION,)) == ("body.norm", "last")


def test_names_may_be_modules_of_any_depth_or_single_parameters() -> None:
    assert prefixes(TASK, ("body", "out.bias")) == ("body", "out.bias")
    head, _ = TASK.init(0).split(("body",))
    assert list(head) == ["body.fc.bias", "body.fc.weight", "body.norm.bias", "body.norm.weight"]


def test_no_name_is_no_layer() -> None:
    head, body = TASK.init(0).split(prefixes(TASK, ()))
    assert (len(head), len(body)) == (0, 8)


def test_an_unknown_layer_is_named_with_those_there_are() -> None:
    with pytest.raises(ApieceError, match="did you mean 'out'"):
        prefixes(TASK, ("uot",))
    with pytest.raises(ApieceError, match="the model has no normalization layers"):
        prefixes(Task(lambda: nn.Sequential(nn.Linear(2, 2))), (NORMALIZATION,))


def test_a_prefix_is_a_whole_name() -> None:
    with pytest.raises(ApieceError, match="layer"):
        prefixes(TASK, ("bod",))
