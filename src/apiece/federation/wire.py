"""The wire: named arrays and scalars. Structure is never sent, for both sides know it from the method."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from apiece import catalog, models, tree
from apiece.augment import AUGMENTATIONS
from apiece.errors import ApieceError, unknown
from apiece.method import Broadcast, Method, Round
from apiece.params import Params
from apiece.task import Task
from apiece.tree import Tree

Scalar = bool | int | float | str

JOIN, TRAIN, SCORE = "join", "train", "score"  # what a client can be asked for
NO_START = "it does not have the start params"


class WireError(Exception):
    """What came over the wire is not what was asked for; says why, without showing any of it."""


class Message(NamedTuple):
    """A request or a reply."""

    arrays: Mapping[str, NDArray[Any]]
    scalars: Mapping[str, Scalar]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())


def pack(**trees: Tree) -> Message:
    """Trees as one message, each leaf under its path: tensors are arrays, static leaves are scalars."""
    leaves = {
        _path(name, path): leaf for name, whole in trees.items() for path, leaf in tree.flatten(whole).items()
    }
    arrays = {path: leaf.detach().cpu().numpy() for path, leaf in leaves.items() if isinstance(leaf, Tensor)}
    return Message(arrays, {path: leaf for path, leaf in leaves.items() if path not in arrays})


def unpack(message: Message, name: str, template: Tree, device: torch.device) -> Tree:
    """The tree that was packed under `name`; it must have the names, shapes and types of `template`."""
    wanted = {_path(name, path): leaf for path, leaf in tree.flatten(template).items()}
    given = {path for part in message for path in part if path == name or path.startswith(f"{name}/")}
    missing, extra = sorted(wanted.keys() - given), sorted(given - wanted.keys())
    if missing or extra:
        raise WireError(f"names differ: {len(missing)} missing {missing[:3]}, {len(extra)} extra {extra[:3]}")
    values = [_leaf(message, path, leaf, device) for path, leaf in wanted.items()]
    return tree.restore(template, dict(zip(tree.flatten(template), values, strict=True)))


def _path(name: str, path: str) -> str:
    return f"{name}/{path}" if path else name


def _leaf(message: Message, path: str, like: Any, device: torch.device) -> Any:
    if not isinstance(like, Tensor):
        value = message.scalars.get(path)
        if type(value) is not type(like):
            raise WireError(f"{path} is not a {type(like).__name__}")
        return value
    if path not in message.arrays:
        raise WireError(f"{path} is not an array")
    array, dtype = message.arrays[path], torch.empty(0, dtype=like.dtype).numpy().dtype
    if array.dtype != dtype or array.shape != tuple(like.shape):
        raise WireError(f"{path} is {array.dtype}{array.shape}, not {dtype}{tuple(like.shape)}")
    return torch.from_numpy(np.array(array)).to(device)


class Terms(NamedTuple):
    """What the server tells its clients of the run: what to compute, and how data and keys are to be read."""

    run: str
    method: str
    settings: Mapping[str, Any]
    model: str
    augment: str
    input_shape: tuple[int, ...]
    label_names: tuple[str, ...]
    test: float  # share of each client's examples held out
    deal: int  # key of the splits into train and test
    root: int  # key of the run's seed

    def text(self) -> str:
        return json.dumps(self._asdict())

    @staticmethod
    def read(text: Scalar) -> Terms:
        try:
            terms = Terms(**json.loads(str(text)))
        except (TypeError, ValueError) as error:
            raise WireError("the terms of the run cannot be read: is this another version?") from error
        if not re.fullmatch(r"[0-9a-z-]{1,64}", str(terms.run)):  # it names a folder
            raise WireError("the run has no proper id")
        return terms._replace(input_shape=tuple(terms.input_shape), label_names=tuple(terms.label_names))

    def build(self, device: torch.device) -> tuple[Method, Task]:
        """The method and the task, from names that mean the same on every machine."""
        for kind, name in (("method", self.method), ("model", self.model)):
            if ".py:" in name:
                raise ApieceError(
                    f"{kind} {name!r} is a file of one machine: in a federation name it as module:name, with "
                    f"the module installed, or in the folder where the command is started, on every machine"
                )
        task = models.build(self.model, self.input_shape, len(self.label_names), device)
        if self.augment not in AUGMENTATIONS:
            raise unknown("augment", self.augment, AUGMENTATIONS)
        return catalog.build(self.method, self.settings), replace(task, augment=AUGMENTATIONS[self.augment])


def structure(method: Method, task: Task, start: Params) -> Broadcast:
    """A broadcast of the method, for its structure."""
    server = method.init(replace(task, prior=start), start, 0)
    return method.broadcast(server, Round(index=0, key=0, cohort_size=1, population=1, examples=1))
