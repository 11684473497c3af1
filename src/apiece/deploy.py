"""After a run: the model of one client, and a personalized model for a client never met."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from apiece import checkpoint, random, tree
from apiece import data as datasets
from apiece import folder as files
from apiece.data.federated import Examples, Federated, federate
from apiece.engines.base import Federation
from apiece.errors import ApieceError
from apiece.evaluate import models
from apiece.method import Server
from apiece.params import Params
from apiece.session import Session, reopen
from apiece.store import Store


class Deployed(NamedTuple):
    """A model that was written, and its loss and accuracy figures where they are known."""

    client: str
    round: int
    examples: int
    loss_before: float  # on the client's own training examples
    loss_after: float


def export(folder: Path, client: str, output: Path) -> Deployed:
    """Write the personalized model of one of the run's clients, named by id or by name."""
    session, server, round = _latest(folder)
    return _write(session, session.federation, server, round, _find(session.federation.data, client), output)


def personalize(folder: Path, path: Path, output: Path) -> Deployed:
    """Write a model personalized on the data of a client that was not part of the run."""
    session, server, round = _latest(folder)
    data = session.federation.data
    column = session.experiment.label_column
    examples = datasets.from_path(path, client_column=None, label_column=column, label_names=data.label_names)
    _same_shape(examples, data)
    rows = np.arange(len(examples.y))
    alone = federate(examples, [rows], [path.stem], key=0, test=0.0, unseen=0.0).to(session.engine.device)
    store = Store(session.federation.store.template, 1, session.engine.device, None, mapped=False)
    root = random.fold(session.federation.root, "newcomer")
    federation = replace(session.federation, data=alone, store=store, root=root)
    return _write(session, federation, server, round, 0, output)


def _latest(folder: Path) -> tuple[Session, Server, int]:
    session = reopen(folder)
    found = checkpoint.read(
        folder / "checkpoint", session.experiment.id, session.server, session.engine.device
    )
    if found is None:
        raise ApieceError(f"{folder} has no checkpoint yet: let it run, or continue it with: apiece resume {folder}")
    session.federation.store.open(found.round, writable=False)
    return session, found.server, found.round


def _find(data: Federated, client: str) -> int:
    if client in data.names:
        return data.names.index(client)
    if client.isdigit() and int(client) < data.population:
        return int(client)
    raise ApieceError(f"no client {client!r}: clients are 0 to {data.population - 1}" + _named(data))


def _named(data: Federated) -> str:
    plain = data.names == tuple(str(i) for i in range(data.population))
    return "" if plain else f", or by name: {', '.join(data.names[:5])}, …"


def _same_shape(examples: Examples, data: Federated) -> None:
    shape = tuple(np.asarray(examples.x).shape[1:])
    if shape != data.input_shape:
        raise ApieceError(f"the newcomer's examples have shape {shape}, the run's have {data.input_shape}")


def _write(
    session: Session, federation: Federation, server: Server, round: int, client: int, output: Path
) -> Deployed:
    broadcast = session.training.broadcast(server, round)
    initial, personalized = models(session.engine, federation, broadcast, [client], round)[0]
    task = federation.task.for_clients()
    rows, even = federation.rows(federation.data.train, [client], [client], 0)
    batch = federation.shard(tree.take(rows, 0), even).all()
    losses = [float(task.loss(params, batch)) for params in (initial, personalized)]
    facts: dict[str, Any] = {
        "run": session.experiment.id,
        "method": session.experiment.method,
        "model": session.experiment.model,
        "client": federation.data.names[client],
        "round": str(round),
        "labels": ",".join(federation.data.label_names),
    }
    files.write_tensors(output, dict(personalized), facts)
    return Deployed(
        federation.data.names[client], round, int(federation.data.train.sizes[client]), losses[0], losses[1]
    )
