"""The shape of a method's messages without running it: names, shapes and dtypes from fake tensors."""

from __future__ import annotations

import sys
import sysconfig
import traceback
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from apiece import tree
from apiece.errors import ApieceError
from apiece.method import Broadcast, Method, Reply, inner_methods
from apiece.params import Params
from apiece.random import as_key
from apiece.shard import Batch, Rows, Shard
from apiece.task import Task
from apiece.tree import Tree

_INSTALLED = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))


class Spec(NamedTuple):
    """Trees of empty `meta` tensors: what a client sends and what it keeps."""

    update: Tree
    state: Tree
    metrics: Tree

    @property
    def bytes_up(self) -> int:
        return tree.nbytes(self.update)


class OneBatch(Shard):
    """A loop's carry keeps its shape, so one batch tells all."""

    def batches(self, batch_size: int, epochs: int = 1, steps: int = 0) -> Iterator[Batch]:
        return islice(super().batches(batch_size, epochs, steps), 1)


def spec(method: Method, task: Task, broadcast: Broadcast, start: Params, x: Tree, y: Tree) -> Spec:
    """What `client_update` would reply to `broadcast`; `x` and `y` are resident arrays of examples."""
    _start_autograd()
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def fake(leaf: object) -> object:
        return mode.from_tensor(leaf) if isinstance(leaf, Tensor) else leaf

    def outline(leaf: object) -> Tensor:
        if not isinstance(leaf, Tensor):
            raise TypeError(f"a reply must hold tensors only, found {leaf!r}")
        return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")

    device = task.device
    key = as_key(0, device)
    rows = Rows(torch.zeros(1, dtype=torch.int64, device=device), as_key(1, device), key, key)
    x, y, rows, key, broadcast, start = tree.map(fake, (x, y, rows, key, broadcast, start))
    try:
        with mode, torch.no_grad():
            client = method.init_client(task.for_clients(), broadcast, start, key)
            reply = method.client_update(task.for_clients(), broadcast, client, OneBatch(x, y, rows, True))
    except DataDependentOutputException as error:
        raise ApieceError(_value_asked(error, method, task)) from error
    except Exception as error:
        error.add_note(f"while the shape of {type(method).__name__}'s reply was worked out on fake tensors")
        raise
    if not isinstance(reply, Reply):
        found = "None" if reply is None else type(reply).__name__
        raise ApieceError(f"method {type(method).__name__}: client_update must return a Reply, not {found}")
    keep_form(method, client, reply.state)
    return Spec(*tree.map(outline, (reply.update, client, dict(reply.metrics))))


def _start_autograd() -> None:
    """It starts a thread for each GPU at its first gradient, and with threads no process can be forked. Of a
    PyTorch built for CUDA fake tensors pretend eight GPUs: then it would count those.
    """
    with torch.enable_grad():
        one = torch.ones((), requires_grad=True)
        torch.autograd.grad(one * one, one)


def _value_asked(error: Exception, method: Method, task: Task) -> str:
    """Who asks for the value of a tensor, the task's model or else the method, and what to do."""
    frames = traceback.walk_tb(error.__traceback__)
    in_model = any(frame.f_locals.get("self") is task.module for frame, _ in frames)
    kind, culprit, instead = ("model", task.module, "torch") if in_model else ("method", method, "tree")
    where = place(error, method)
    return (
        f"{kind} {type(culprit).__name__}: a Python `if`, float() or .item() on a tensor: it differs by "
        f"client; use {instead}.where, or keep it a tensor" + (f" ({where})" if where else "")
    )


def place(error: Exception, method: Method) -> str:
    """`my_method.py:14 in client_update`: the deepest frame of the method, its inner ones, a model or other
    files that are neither installed nor this package's.
    """
    own = _modules(method)
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        code = frame.f_code  # a dataclass's own methods stand in no file
        told = frame.f_globals.get("__name__") in own or not _of_library(frame)
        if told and not code.co_filename.startswith("<"):
            return f"{Path(code.co_filename).name}:{line} in {code.co_name}"
    return ""


def _of_library(frame: FrameType) -> bool:
    module, file = frame.f_globals.get("__name__", ""), frame.f_code.co_filename
    if module.startswith("apiece."):
        return not module.startswith("apiece.models.")
    return module.partition(".")[0] in {"torch", *sys.stdlib_module_names} or file.startswith(_INSTALLED)


def keep_form(method: Method, before: Tree, after: Tree) -> None:
    """A client's state is made of the same things as its first, in every round."""
    if not tree.same_structure(before, after):
        raise ApieceError(
            f"method {type(method).__name__}: a client's state keeps its form: init_client makes "
            f"{_form(before)}, the state in client_update's Reply is {_form(after)}"
        )


def _form(state: Tree) -> str:
    """In words."""
    parts = ", ".join(tree.flatten(state))
    return f"a {type(state).__name__} of {parts}" if parts else "()"


def _modules(method: Method) -> set[str]:
    """Where a method and its inner ones are written; the module of Method itself is nobody's own."""
    mine = {cls.__module__ for cls in type(method).__mro__ if issubclass(cls, Method)}
    return mine.union(*map(_modules, inner_methods(method).values())) - {Method.__module__}


class Shapes:
    """The specs of one method's replies, by the static fields of the broadcast they answer."""

    def __init__(self, method: Method, task: Task, start: Params, x: Tree, y: Tree) -> None:
        self._make = partial(spec, method, task, start=start, x=x, y=y)
        self._known: dict[tuple[str, ...], Spec] = {}

    def of(self, broadcast: Broadcast) -> Spec:
        static = tuple(repr(leaf) for leaf in tree.leaves(broadcast) if not isinstance(leaf, Tensor))
        if static not in self._known:
            self._known[static] = self._make(broadcast)
        return self._known[static]
