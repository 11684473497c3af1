"""Layers of a model by name: which part of the params is a head, or stays with the client."""

from __future__ import annotations

from torch import nn

from apiece.errors import ApieceError, unknown
from apiece.task import Task

LAST_LINEAR = "last linear layer"
NORMALIZATION = "normalization layers"

_NORMALIZING = (nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


def prefixes(task: Task, names: tuple[str, ...]) -> tuple[str, ...]:
    """The modules `names` stand for, as prefixes for `Params.split`; two names are found by looking.

    `()` is no layer at all: `Params.split(())` leaves everything in the rest.
    """
    found: list[str] = []
    for name in names:
        if name == LAST_LINEAR:
            found += _modules(task, (nn.Linear,), name)[-1:]
        elif name == NORMALIZATION:
            found += _modules(task, _NORMALIZING, name)
        else:
            found.append(_known(task, name))
    return tuple(found)


def _modules(task: Task, kinds: tuple[type[nn.Module], ...], name: str) -> list[str]:
    found = [path for path, module in task.module.named_modules() if isinstance(module, kinds)]
    if not found:
        raise ApieceError(
            f"the model has no {name}: name its modules, one of {', '.join(_with_params(task))}"
        )
    return found


def _known(task: Task, name: str) -> str:
    parameters = [path for path, _ in task.module.named_parameters()]
    if not any(path == name or path.startswith(name + ".") for path in parameters):
        raise unknown("layer", name, [*_with_params(task), LAST_LINEAR, NORMALIZATION])
    return name


def _with_params(task: Task) -> list[str]:
    """The modules that hold parameters, at any depth."""
    return [path for path, m in task.module.named_modules() if path and any(True for _ in m.parameters())]
