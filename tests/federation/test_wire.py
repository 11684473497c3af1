"""Trees as named arrays and scalars, and what is refused of a message."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from apiece import Params, tree
from apiece.errors import ApieceError
from apiece.federation.wire import Message, Terms, WireError, pack, structure, unpack
from apiece.models import build

CPU = torch.device("cpu")


class Sent(NamedTuple):
    params: Params
    coin: bool
    stage: str
    count: int
    pair: tuple[Tensor, Tensor]
    nothing: tuple[()] = ()


def sent() -> Sent:
    params = Params({"b.weight": torch.arange(6.0).reshape(2, 3), "a": torch.tensor(2.5)})
    mask = torch.tensor([True, False])
    return Sent(params, True, "first", 3, (mask, torch.tensor([2**40], dtype=torch.int64)))


def test_a_message_is_paths_arrays_and_scalars() -> None:
    message = pack(broadcast=sent(), weight=torch.tensor(1.0))
    assert {path: (array.dtype.name, array.shape) for path, array in message.arrays.items()} == {
        "broadcast/params/a": ("float32", ()),
        "broadcast/params/b.weight": ("float32", (2, 3)),
        "broadcast/pair/0": ("bool", (2,)),
        "broadcast/pair/1": ("int64", (1,)),
        "weight": ("float32", ()),
    }
    assert message.scalars == {"broadcast/coin": True, "broadcast/stage": "first", "broadcast/count": 3}
    assert message.nbytes == 4 + 24 + 2 + 8 + 4


def test_what_is_packed_can_be_unpacked_by_its_structure() -> None:
    template = tree.map(lambda leaf: torch.zeros_like(leaf) if isinstance(leaf, Tensor) else leaf, sent())
    template = template._replace(coin=False, stage="", count=0)
    found = unpack(pack(broadcast=sent()), "broadcast", template, CPU)
    assert tree.same_structure(found, sent())
    for mine, theirs in zip(tree.leaves(found), tree.leaves(sent()), strict=True):
        assert torch.equal(mine, theirs) if isinstance(theirs, Tensor) else mine == theirs
    assert type(found) is Sent
    assert isinstance(found.params, Params)


@pytest.mark.parametrize(
    ("array", "why"),
    [
        (np.zeros((3, 2), np.float32), "float32(3, 2), not float32(2, 3)"),
        (np.zeros((2, 3), np.float64), "float64(2, 3), not float32(2, 3)"),
        (np.zeros((2, 3), ">f4"), "not float32"),
        (np.array([["a"] * 3] * 2), "not float32"),
        (np.zeros(6, np.float32), "float32(6,), not"),
    ],
)
def test_another_shape_or_type_is_refused(array: Any, why: str) -> None:
    message = pack(u=sent())
    with pytest.raises(WireError, match=r"u/params/b\.weight is ") as told:
        unpack(Message({**message.arrays, "u/params/b.weight": array}, message.scalars), "u", sent(), CPU)
    assert why in str(told.value)


@pytest.mark.parametrize(("name", "value"), [("coin", 1), ("count", True), ("count", 3.0), ("stage", 3)])
def test_a_scalar_of_another_type_is_refused(name: str, value: Any) -> None:
    message = pack(u=sent())
    with pytest.raises(WireError, match=f"u/{name} is not a"):
        unpack(Message(message.arrays, {**message.scalars, f"u/{name}": value}), "u", sent(), CPU)


def test_other_names_are_refused() -> None:
    message = pack(u=sent())
    missing = {path: array for path, array in message.arrays.items() if path != "u/params/a"}
    with pytest.raises(WireError, match=r"1 missing \['u/params/a'\], 0 extra"):
        unpack(Message(missing, message.scalars), "u", sent(), CPU)
    with pytest.raises(WireError, match=r"0 missing \[\], 1 extra \['u/more'\]"):
        unpack(Message({**message.arrays, "u/more": np.zeros(1)}, message.scalars), "u", sent(), CPU)
    # A number where an array is due, and the other way round.
    with pytest.raises(WireError, match="u/params/a is not an array"):
        unpack(Message(missing, {**message.scalars, "u/params/a": 2.5}), "u", sent(), CPU)


def test_other_trees_of_the_message_are_none_of_its_business() -> None:
    message = pack(update=torch.zeros(2), updated=torch.zeros(3))
    assert unpack(message, "update", torch.zeros(2), CPU).shape == (2,)


def terms(**changes: Any) -> Terms:
    given = Terms(
        "run-1", "fedec", {"alpha": 0.5}, "mlp(hidden=4)", "none", (5,), ("a", "ä"), 0.25, -(2**62), 2**61
    )
    return given._replace(**changes)


def test_terms_read_as_they_were_written() -> None:
    assert Terms.read(terms().text()) == terms()


@pytest.mark.parametrize("run", ["../other", "a/b", "", "A", "x" * 65, ".."])
def test_a_run_cannot_name_a_folder_elsewhere(run: str) -> None:
    with pytest.raises(WireError, match="no proper id"):
        Terms.read(terms(run=run).text())


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"run": "a"}', "no json"])
def test_terms_that_cannot_be_read_are_refused(text: str) -> None:
    with pytest.raises(WireError, match="another version"):
        Terms.read(text)


@pytest.mark.parametrize("changes", [{"method": "/tmp/mine.py:Mine"}, {"model": "elastic(mine.py:net)"}])
def test_a_file_of_one_machine_is_refused(changes: dict[str, str]) -> None:
    with pytest.raises(ApieceError, match="module:name"):
        terms(**changes).build(CPU)


@pytest.mark.parametrize(
    "name", ["fedavg", "fedec", "apfl_ewc", "scaffold", "admm_fedmeta", "l2gd", "feddyn"]
)
def test_the_structure_is_that_of_any_broadcast(name: str) -> None:
    """The client's, of made-up params, is that of what the server sends in a later round."""
    from apiece import catalog
    from apiece.method import Round

    method, task = catalog.build(name, {}), build("mlp(hidden=4)", (5,), 3)
    start = task.init(3)
    late = method.broadcast(method.init(task, start, 9), Round(7, 123, 4, 10, 100))
    template = structure(method, task, task.init(0))
    assert tree.same_structure(template, late)
    unpack(pack(broadcast=late), "broadcast", template, CPU)
