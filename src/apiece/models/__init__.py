"""Models by name: `build("mlp(hidden=(64, 32), dropout=0.2)", (1, 28, 28), 10, "cpu")`.

A name is one of MODELS, with options or without, or a factory of one's own: `package.module:factory` or
`path/to/file.py:factory`, called with those of `input_shape` and `classes` that it accepts.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from apiece.errors import ApieceError, unknown
from apiece.importing import import_object
from apiece.measures import RANKING, RANKING_POOLED, text_accuracy, text_losses
from apiece.models.validate import fix
from apiece.task import ACCURACY, Losses, Metric, Pooled, Task, cross_entropy, hinge

__all__ = ["MODELS", "Entry", "build", "fix"]


class Entry(NamedTuple):
    description: str
    factory: str  # imported when it is first built
    losses: Losses = cross_entropy
    measures: Mapping[str, Metric] = ACCURACY
    pooled: Mapping[str, Pooled] = {}


MODELS: Mapping[str, Entry] = {
    "logistic": Entry("multinomial logistic regression", "apiece.models.linear:logistic"),
    "svm": Entry("linear support vector machine: hinge loss", "apiece.models.linear:svm", hinge),
    "mlp": Entry("ReLU layers; options hidden=(128,), dropout=0.0, norm=False", "apiece.models.mlp:mlp"),
    "cnn": Entry(
        "3x3 convolutions; options channels=(16, 32), dense=64, norm=False", "apiece.models.cnn:cnn"
    ),
    "lenet": Entry(
        "LeNet-5; options channels=(6, 16), kernel=5, padding=2, dense=(120, 84), dropout=0.0",
        "apiece.models.lenet:lenet",
    ),
    "tff_cnn": Entry(
        "the CNN of TFF's EMNIST examples; option dropout=True", "apiece.models.tff_cnn:tff_cnn"
    ),
    "admm_cnn": Entry(
        "ADMM-FedMeta's convolutional networks; options channels=(32, 64), activation='elu'",
        "apiece.models.admm_cnn:admm_cnn",
    ),
    "din": Entry(
        "Deep Interest Network, for movielens: AUC, hit ratio and NDCG",
        "apiece.models.din:din",
        measures=RANKING,
        pooled=RANKING_POOLED,
    ),
    "lstm": Entry(
        "characters of shakespeare, each from those before; options embedding=8, hidden=256, layers=2",
        "apiece.models.lstm:lstm",
        text_losses,
        {"accuracy": text_accuracy},
    ),
}


def build(name: str, input_shape: Sequence[int], classes: int, device: torch.device | str = "cpu") -> Task:
    """The task of training model `name` to tell `classes` classes apart."""
    device, shape = torch.device(device), tuple(input_shape)
    registered = re.fullmatch(r"(\w+)\s*(\(.*\))?", name.strip(), re.DOTALL)
    if registered is None and ":" in name:
        return Task(_Factory(name, shape, classes), device=device)
    label = registered[1] if registered else name
    if label not in MODELS:
        raise unknown("model", label, MODELS)
    entry = MODELS[label]
    options = _options(name, registered[2]) if registered and registered[2] else {}
    known = _parameters(import_object(entry.factory, "model")) - {"input_shape", "classes"}
    for option in options:
        if option not in known:
            raise unknown(f"option of model {label!r}", option, known)
    try:
        factory = _Factory(entry.factory, shape, classes, tuple(options.items()))
        return Task(factory, entry.losses, entry.measures, entry.pooled, device, channels_last=True)
    except (TypeError, ValueError) as error:
        raise ApieceError(f"cannot build model {name!r}: {error}") from error


def _options(name: str, text: str) -> dict[str, Any]:
    """`(hidden=(64, 32), dropout=0.2)` as a dictionary."""
    wrong = ApieceError(
        f"cannot read the options of model {name!r}: write name(key=value, ...), values literals"
    )
    try:
        call = ast.parse(f"options{text}", mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
            raise wrong
        options = [(keyword.arg, ast.literal_eval(keyword.value)) for keyword in call.keywords]
    except (SyntaxError, ValueError) as error:
        raise wrong from error
    named = {key: value for key, value in options if key is not None}
    if len(named) < len(options):
        raise wrong
    return named


def _parameters(factory: Any) -> set[str]:
    return set(inspect.signature(factory).parameters)


@dataclass(frozen=True)
class _Factory:
    """A model's name and numbers; imported when called, so that it travels to other processes as text."""

    spec: str
    input_shape: tuple[int, ...]
    classes: int
    options: tuple[tuple[str, Any], ...] = ()

    def __call__(self) -> nn.Module:
        factory = import_object(self.spec, "model")
        if isinstance(factory, nn.Module) or not callable(factory):
            raise ApieceError(
                f"model {self.spec!r} is {_described(factory)}, not a factory: "
                "write a function that returns a fresh model"
            )
        model = factory(**self._accepted(factory), **dict(self.options))
        if not isinstance(model, nn.Module):
            raise ApieceError(
                f"model factory {self.spec!r} must return a torch.nn.Module, got {_described(model)}"
            )
        return model

    def _accepted(self, factory: Any) -> dict[str, Any]:
        signature = inspect.signature(factory)
        offered = {"input_shape": self.input_shape, "classes": self.classes}
        if not any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values()):
            offered = {name: value for name, value in offered.items() if name in signature.parameters}
        try:
            signature.bind(**offered, **dict(self.options))
        except TypeError as error:
            raise ApieceError(
                f"model factory {self.spec!r} gets input_shape and classes, where it accepts them: {error}"
            ) from error
        return offered


def _described(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
