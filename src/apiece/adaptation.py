"""Adaptation curves: how a client's score grows with personalization epochs and with its examples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from apiece import folder as files
from apiece import random
from apiece.data.federated import Federated, Ragged, generator, resident
from apiece.evaluate import evaluate, summarize
from apiece.method import Method, Server, inner_methods
from apiece.prepare import Session

EPOCHS = (0, 1, 2, 5, 10, 20, 50)
EXAMPLES = (1, 2, 5, 10, 20, 50, 100)
COLUMNS = ("along", "amount", "clients", "personalized_mean", "personalized_std", "personalized_worst10")


class Point(NamedTuple):
    """The clients' personalized scores at one amount of epochs or of examples."""

    along: str  # epochs or examples
    amount: int
    clients: int
    mean: float
    std: float
    worst10: float


def curves(
    session: Session,
    server: Server,
    round: int,
    epochs: Sequence[int] = EPOCHS,
    examples: Sequence[int] = EXAMPLES,
) -> list[Point]:
    """Both curves on the unseen clients (on the seen ones if there are no others).

    Along epochs every client uses all its training examples; along examples the method's own personal recipe,
    on the first of them in an order of its own, or on all if it has fewer.
    """
    data = resident(session.federation.data, "an adaptation curve")
    ids = (data.unseen_ids if len(data.unseen_ids) else data.seen_ids).tolist()
    broadcast = session.training.broadcast(server, round)

    def point(along: str, amount: int, method: Method, data: Federated) -> Point:
        federation = replace(session.federation, method=method, data=data)
        scores = evaluate(session.engine, federation, broadcast, ids, round)[federation.task.headline]
        group = summarize(scores, np.ones(len(ids), dtype=bool), data.sizes(ids)[1])
        assert group is not None
        figures = (group.personalized, group.personalized_std, group.personalized_worst10)
        return Point(along, amount, group.scored, *figures)

    method = session.federation.method
    key = random.fold(session.federation.root, "few")
    return [
        *(point("epochs", amount, with_personal_epochs(method, amount), data) for amount in epochs),
        *(point("examples", amount, method, _few(data, amount, key)) for amount in examples),
    ]


def with_personal_epochs(method: Method, epochs: int) -> Method:
    """The method, personalizing for that many epochs; wrapped methods too."""
    changes: dict[str, Any] = {
        name: with_personal_epochs(inner, epochs) for name, inner in inner_methods(method).items()
    }
    if any(f.name == "personal" for f in fields(method)):  # type: ignore[arg-type]
        changes["personal"] = method.personal._replace(epochs=epochs, steps=0)
    return replace(method, **changes)  # type: ignore[type-var]


def _few(data: Federated, amount: int, key: int) -> Federated:
    parts = [
        np.sort(generator(random.fold(key, client)).permutation(data.train[client])[:amount])
        for client in range(data.population)
    ]
    return replace(data, train=Ragged.of(parts))


def write(folder: Path, points: Sequence[Point]) -> None:
    files.write_csv(folder / "adaptation.csv", COLUMNS, points)
