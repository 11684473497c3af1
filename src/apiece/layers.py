"""Layers of a model by name, and what methods share that keep some of them with the client."""

from __future__ import annotations

from abc import abstractmethod
from typing import NamedTuple

from torch import Tensor, nn

from apiece.errors import ApieceError, unknown
from apiece.local import sgd
from apiece.method import Method, Model, Reply, Round
from apiece.optim import Recipe
from apiece.params import Params
from apiece.shard import Batch, Shard
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
    found = [path for path, module in _with_params(task).items() if isinstance(module, kinds)]
    if not found:
        raise ApieceError(
            f'the model has no {name}: take one that has, such as --model "mlp(norm=True)", or name layers '
            f"of this one, out of {', '.join(_choices(task))}"
        )
    return found


def _known(task: Task, name: str) -> str:
    if not any(path == name or path.startswith(name + ".") for path in _parameters(task)):
        raise unknown("layer", name, [*_choices(task), LAST_LINEAR, NORMALIZATION])
    return name


def _with_params(task: Task) -> dict[str, nn.Module]:
    """The modules that hold parameters, at any depth."""
    return {path: m for path, m in task.module.named_modules() if path and any(True for _ in m.parameters())}


def _parameters(task: Task) -> list[str]:
    return [path for path, _ in task.module.named_parameters()]


def _choices(task: Task) -> list[str]:
    """What there is to name; a model that is one layer has its parameters only."""
    return list(_with_params(task)) or _parameters(task)


class Own(NamedTuple):
    """What stays with a client."""

    private: Params


class PartlyShared(Method):
    """Some layers stay with each client, the mean of the others is shared. Abstract.

    Every client's first private layers are those of the common start.
    """

    @abstractmethod
    def split(self, task: Task, params: Params) -> tuple[Params, Params]:
        """(what stays with the client, what is shared)."""

    def init(self, task: Task, params: Params, key: int) -> Model:
        _, shared = self.split(task, params)
        if not shared:
            raise ApieceError(
                f"{type(self).__name__} would share nothing: all layers of this model stay with the client. "
                f"Take a model with more layers, such as --model mlp, or name other layers to keep, out of "
                f"{', '.join(_choices(task))}"
            )
        return Model(shared)

    def init_client(self, task: Task, broadcast: Model, start: Params, key: Tensor) -> Own:
        private, _ = self.split(task, start)
        return Own(private)

    def broadcast(self, server: Model, round: Round) -> Model:
        return server

    def reply(self, task: Task, broadcast: Model, w: Params, weight: Tensor) -> Reply:
        """Of a client that has trained the whole model to `w`."""
        private, shared = self.split(task, w)
        return Reply(shared - broadcast.params, Own(private), weight, model=w)

    def server_update(self, task: Task, server: Model, update: Params, round: Round) -> Model:
        return Model(server.params + update)

    def initial(self, task: Task, broadcast: Model, client: Own) -> Params:
        return broadcast.params | client.private


def fit(task: Task, part: Params, rest: Params, data: Shard, recipe: Recipe) -> Params:
    """`part` of a model trained while the `rest` stays as it is."""

    def objective(part: Params, batch: Batch) -> Tensor:
        return task.objective(rest | part, batch)

    return sgd(objective, part, data, recipe) if part else part
