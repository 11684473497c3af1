"""After a run: the model of one client, and a personalized model for a client never met."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from apiece import checkpoint, tree
from apiece import data as datasets
from apiece import folder as files
from apiece.data.federated import Clients, Examples, federate
from apiece.engines.base import Federation
from apiece.errors import ApieceError
from apiece.evaluate import models
from apiece.method import Server
from apiece.models import build
from apiece.params import Params
from apiece.prepare import Session
from apiece.session import reopen
from apiece.task import Task


class Deployed(NamedTuple):
    """A model that was written, and its loss on the client's own training examples (NaN: it has none)."""

    client: str
    round: int
    examples: int
    loss_initial: float
    loss_personalized: float


class Exported(NamedTuple):
    """A model that was written, to be used: called with examples, it gives a score per class of each."""

    task: Task
    params: Params
    label_names: tuple[str, ...]  # of the scores, in their order

    def __repr__(self) -> str:
        numbers = sum(param.numel() for param in self.params.values())
        return f"<a model of {numbers:,} parameters for {', '.join(self.label_names)}>"

    def __call__(self, x: Any) -> Tensor:
        kind = next(iter(self.params.values())).dtype

        def fitting(leaf: Any) -> Tensor:
            tensor = torch.as_tensor(leaf)
            return tensor.to(kind) if tensor.is_floating_point() else tensor

        with torch.no_grad():
            return self.task.predict(self.params, tree.map(fitting, x))


def load(path: str | Path) -> Exported:
    """What `apiece export` or `apiece personalize` wrote."""
    try:
        with safe_open(path, "pt") as file:
            facts = file.metadata() or {}
            params = Params({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ApieceError(f"cannot read a model from {path}: {error}") from error
    if "model" not in facts:
        raise ApieceError(f"{path} does not say which model it is: only exported ones do (apiece export)")
    shape, names = json.loads(facts["input_shape"]), json.loads(facts["label_names"])
    return Exported(build(facts["model"], shape, int(facts["classes"])), params, tuple(names))


def export(folder: Path, client: str, output: Path) -> Deployed:
    """Write the personalized model of one of the run's clients, named by id or by name."""
    session, server, round = latest(folder)
    return _write(session, session.federation, server, round, _find(session.federation.data, client), output)


def personalize(folder: Path, path: Path, output: Path) -> Deployed:
    """Write a model personalized on the data of a client that was not part of the run."""
    session, server, round = latest(folder)
    data = session.federation.data
    described = session.experiment
    examples = datasets.from_path(
        path, described.client_column, described.label_column, data.label_names, alone=True
    )
    examples = _fitted(examples, data)
    rows = np.arange(len(examples.y))
    alone = federate(examples, [rows], [path.stem], key=0, test=0.0, unseen=0.0).to(session.engine.device)
    return _write(session, session.federation.newcomers(alone, "newcomer"), server, round, 0, output)


def latest(folder: Path) -> tuple[Session, Server, int]:
    session = reopen(folder)
    found = checkpoint.read(
        folder / "checkpoint", session.experiment.id, session.server, session.engine.device
    )
    if found is None:
        raise ApieceError(
            f"{folder} has no checkpoint yet: let it run, or continue it with: apiece resume {folder}"
        )
    session.federation.store.open(found.round, writable=False)
    return session, found.server, found.round


def _find(data: Clients, client: str) -> int:
    """A client by its name or its id; `name:7` and `id:7` say which where the two differ."""
    kind, colon, rest = client.partition(":")
    if not (colon and kind in ("name", "id")):
        kind, rest = "", client
    named = [data.names.index(rest)] if kind != "id" and rest in data.names else []
    numbered = [int(rest)] if kind != "name" and rest.isdecimal() and int(rest) < data.population else []
    found = {*named, *numbered}
    if len(found) == 1:
        return found.pop()
    if found:
        raise ApieceError(
            f"client {rest!r} may be the client of that name, id {named[0]}, or the client of that id, "
            f"named {data.names[numbered[0]]!r}: write name:{rest} or id:{rest}"
        )
    some = ", ".join(data.names[:5]) + (", …" if data.population > 5 else "")
    raise ApieceError(f"no client {client!r}: ids are 0 to {data.population - 1}, names are {some}")


def _fitted(examples: Examples, data: Clients) -> Examples:
    """With the run's features in the run's order; by their names, where both have names."""
    theirs, ours = examples.features, data.features
    if theirs and ours and sorted(theirs) != sorted(ours):
        raise ApieceError(
            f"the newcomer's feature columns are {', '.join(theirs)}, the run's are {', '.join(ours)}: "
            f"give the same features"
        )
    if theirs and ours:
        order = [theirs.index(name) for name in ours]
        return replace(examples, x=examples.x[:, order], features=ours)
    shape = tuple(examples.x.shape[1:])
    if shape != data.input_shape:
        raise ApieceError(
            f"the newcomer's examples have shape {shape}, the run's have {data.input_shape}: "
            f"give the same features"
        )
    return examples


def _write(
    session: Session, federation: Federation, server: Server, round: int, client: int, output: Path
) -> Deployed:
    data, name = federation.data, federation.data.names[client]
    broadcast = session.training.broadcast(server, round)
    pair = models(session.engine, federation, broadcast, [client], round)[0]
    task = federation.task.for_clients()
    alone = data.take([client])
    held = replace(federation, data=alone)
    rows, even = held.rows(alone.train, [0], [client], 0)
    batch = held.shard(tree.take(rows, 0), even).all()
    examples = int(alone.train.sizes[0])
    losses = [float(task.loss(params, batch)) if examples else math.nan for params in pair]
    facts = {
        "run": session.experiment.id,
        "method": session.experiment.method,
        "client": name,
        "round": str(round),
        "model": session.experiment.model,
        "input_shape": json.dumps(data.input_shape),
        "classes": str(data.classes),
        "label_names": json.dumps(data.label_names),
    }
    files.write_tensors(output, dict(pair[1]), facts)
    return Deployed(name, round, examples, *losses)
