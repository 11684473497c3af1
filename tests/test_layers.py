from collections import OrderedDict

import pytest
import torch
from torch import nn

from apiece.errors import ApieceError
from apiece.layers import LAST_LINEAR, NORMALIZATION, PartlyShared, fit, prefixes
from apiece.optim import Recipe
from apiece.params import Params
from apiece.random import as_key
from apiece.shard import Rows, Shard
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


def test_layers_without_parameters_are_not_found() -> None:
    bare = nn.LayerNorm(6, elementwise_affine=False)
    task = Task(lambda: nn.Sequential(nn.Linear(4, 6), bare, nn.RMSNorm(6), nn.Linear(6, 3)))
    assert prefixes(task, (NORMALIZATION,)) == ("2",)


def test_a_model_that_is_one_layer_has_no_layer_to_name() -> None:
    """Its parameters can be named."""
    task = Task(lambda: nn.Linear(4, 3))
    with pytest.raises(ApieceError, match=r"no last linear layer: .* out of weight, bias"):
        prefixes(task, (LAST_LINEAR,))
    assert prefixes(task, ("bias",)) == ("bias",)


# A part of a model


def shard() -> Shard:
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(8, 4, generator=draw), torch.arange(8) % 3
    return Shard(x, y, Rows(torch.arange(8), torch.tensor(8), as_key(1), as_key(2)), True)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_part_is_trained_for_a_rest_that_stays(optimizer: str) -> None:
    """Of nothing, nothing is left; of everything, the model; of one layer, one step of that layer alone."""
    recipe = Recipe(optimizer, 0.1, 0.0, 0.0, 0.9, 0.999, 1e-8, batch_size=0, epochs=1, steps=0)
    w, nothing = TASK.init(0), Params({})
    head, body = w.split(("out",))
    assert len(fit(TASK, nothing, w, shard(), recipe)) == 0
    whole = fit(TASK, w, nothing, shard(), recipe)
    alone = fit(TASK, head, body, shard(), recipe)
    assert set(alone) == set(head)
    for name in head:
        torch.testing.assert_close(alone[name], whole[name])
        assert not torch.equal(alone[name], head[name])


def test_what_partly_shared_methods_have_in_common_is_no_method() -> None:
    with pytest.raises(TypeError, match="abstract"):
        PartlyShared()  # type: ignore[abstract]
