"""Partitions: which rows each client gets, as a function of the labels, the spec and a key.

A spec is a name and its parameters: `natural`, `iid`, `dirichlet:0.5`, `dirichlet:0.1:10`, `classes:2` or
`power:1.5`.

Departures:
- dirichlet (Hsu et al. 2019; Li et al. 2022): the shares of the clients are drawn class by class, as Li et
  al. write it; their code also stops giving to a client that already has n / clients rows, this does not.
- classes (FedRep, FedEC): FedEC lets a client draw one class twice; here its classes differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from apiece import random
from apiece.data.federated import Examples, Ints, generator
from apiece.errors import ApieceError, unknown

Number = int | float

_ATTEMPTS = 1000


def deal(spec: str, examples: Examples, clients: int, key: int) -> tuple[list[Ints], list[str]]:
    """(the rows of each client, the clients' names). `natural` takes the data's clients, not `clients`."""
    name, parameters = _parse(spec)
    if name not in _DEALERS:
        return _natural(examples)
    count = len(examples.y)
    if clients < 1:
        raise ApieceError(f"there must be at least 1 client, got {clients}")
    if clients > count:
        raise ApieceError(f"{count} examples cannot be dealt to {clients} clients: ask for fewer clients")
    parts = _DEALERS[name](examples.y, clients, random.fold(key, "partition", name), *parameters)
    return [np.sort(part) for part in parts], [str(client) for client in range(clients)]


def _natural(examples: Examples) -> tuple[list[Ints], list[str]]:
    if examples.client is None:
        others = ", ".join(_form(name) for name in _DEALERS)
        raise ApieceError(f"the data has no clients of its own for 'natural': choose one of {others}")
    ids, inverse, sizes = np.unique(examples.client, return_inverse=True, return_counts=True)
    parts = np.split(np.argsort(inverse, kind="stable"), np.cumsum(sizes)[:-1])
    rows = dict(zip((str(name) for name in ids), parts, strict=True))
    names = list(rows) if examples.client_names is None else list(examples.client_names)
    return [rows.get(name, np.zeros(0, dtype=np.int64)) for name in names], names


def _iid(y: Ints, clients: int, key: int) -> list[Ints]:
    return list(np.array_split(generator(key).permutation(len(y)), clients))


def _dirichlet(y: Ints, clients: int, key: int, alpha: float, least: int) -> list[Ints]:
    """For each class, shares of the clients ~ Dirichlet(alpha), redrawn until all have `least` rows."""
    by_class = _rows_by_class(y, generator(random.fold(key, "order")))
    sizes = np.array([len(rows) for rows in by_class])
    if clients * least > len(y):
        raise ApieceError(f"{len(y)} examples cannot give {clients} clients {least} each: lower MIN")
    for attempt in range(_ATTEMPTS):
        draw = generator(random.fold(key, "shares", attempt))
        shares = draw.dirichlet(np.full(clients, alpha), size=len(sizes))
        cuts = np.rint(np.cumsum(shares, axis=1)[:, :-1] * sizes[:, None]).astype(np.int64)
        counts = np.diff(cuts, axis=1, prepend=0, append=sizes[:, None]).sum(axis=0)
        if counts.min() >= least:
            pieces = [np.split(rows, cut) for rows, cut in zip(by_class, cuts, strict=True)]
            return [np.concatenate(client) for client in zip(*pieces, strict=True)]
    raise ApieceError(
        f"dirichlet:{alpha:g}:{least}: none of {_ATTEMPTS} draws gave each of {clients} clients that many of "
        f"{len(y)} examples: lower MIN (0 always works), raise ALPHA or ask for fewer clients"
    )


def _classes(y: Ints, clients: int, key: int, per_client: int) -> list[Ints]:
    """Every class is cut into equal pieces, and each client gets pieces of `per_client` different classes."""
    draw = generator(key)
    by_class = _rows_by_class(y, draw)
    sizes = np.array([len(rows) for rows in by_class])
    if per_client > len(sizes):
        raise ApieceError(f"classes:{per_client} asks for more classes than the {len(sizes)} in the data")
    if clients * per_client < len(sizes):
        raise ApieceError(
            f"{clients} clients with {per_client} of {len(sizes)} classes each would leave classes undealt: "
            f"ask for more clients or more classes per client"
        )
    pieces = _pieces(sizes, clients, clients * per_client)
    held = _holders(pieces, clients, draw)
    parts: list[list[Ints]] = [[] for _ in range(clients)]
    for label, rows in enumerate(by_class):
        holders = draw.permutation(np.flatnonzero(held[:, label]))
        for client, piece in zip(holders, np.array_split(rows, len(holders)), strict=True):
            parts[client].append(piece)
    return [np.concatenate(part) for part in parts]


def _pieces(sizes: Ints, clients: int, wanted: int) -> Ints:
    """How many pieces each class is cut into: as equal as its size allows, the odd ones from larger classes.

    A class has no more pieces than examples, so none is empty, nor than clients, so their classes can differ.
    """
    most = np.minimum(sizes, clients)
    pieces = np.zeros_like(sizes)
    wanted = min(wanted, int(most.sum()))
    while wanted > 0:
        open_classes = np.flatnonzero(pieces < most)
        larger_first = open_classes[np.argsort(-sizes[open_classes], kind="stable")]
        pieces[larger_first[:wanted]] += 1
        wanted -= min(wanted, len(open_classes))
    return pieces


def _holders(pieces: Ints, clients: int, draw: np.random.Generator) -> NDArray[np.bool_]:
    """(clients, classes): who gets a piece of what. Pieces per client are equal up to 1.

    Each client takes one piece of each of the classes with most pieces left, ties at random. A class with as
    many pieces as there are clients left is always among them, so none is left over at the end.
    """
    left = pieces.copy()
    held = np.zeros((clients, len(pieces)), dtype=bool)
    for client in range(clients):
        take = -(-int(left.sum()) // (clients - client))
        chosen = np.lexsort((draw.random(len(left)), -left))[:take]
        held[client, chosen] = True
        left[chosen] -= 1
    return held


def _power(y: Ints, clients: int, key: int, sigma: float) -> list[Ints]:
    """One row each, and the others in proportion to lognormal(0, sigma) draws; rows at random."""
    draw = generator(key)
    logs = sigma * draw.standard_normal(clients)
    weights = np.exp(logs - logs.max())
    ideal = (len(y) - clients) * (weights / weights.sum())
    sizes = np.floor(ideal).astype(np.int64)
    rest = len(y) - clients - int(sizes.sum())
    sizes[np.argsort(sizes - ideal, kind="stable")[:rest]] += 1
    return np.split(draw.permutation(len(y)), np.cumsum(sizes + 1)[:-1])


def _rows_by_class(y: Ints, draw: np.random.Generator) -> list[Ints]:
    """The rows of each class that occurs, in random order."""
    return [draw.permutation(np.flatnonzero(y == label)) for label in np.unique(y)]


class _Parameter(NamedTuple):
    name: str
    type: type[Number]
    least: Number
    default: Number | None = None

    def read(self, text: str, spec: str) -> Number:
        try:
            value = self.type(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and value >= self.least):
            kind = "a whole number" if self.type is int else "a number"
            raise ApieceError(
                f"{self.name} in partition {spec!r} must be {kind} >= {self.least:g}, got {text!r}"
            )
        return value


_PARAMETERS: dict[str, tuple[_Parameter, ...]] = {
    "natural": (),
    "iid": (),
    "dirichlet": (_Parameter("ALPHA", float, 1e-9), _Parameter("MIN", int, 0, default=2)),
    "classes": (_Parameter("K", int, 1),),
    "power": (_Parameter("SIGMA", float, 0.0),),
}

# (y, clients, key, *parameters) → the rows of each client
_DEALERS: dict[str, Callable[..., list[Ints]]] = {
    "iid": _iid,
    "dirichlet": _dirichlet,
    "classes": _classes,
    "power": _power,
}


def _form(name: str) -> str:
    """How a spec is written: dirichlet:ALPHA[:MIN]."""
    return name + "".join(f":{p.name}" if p.default is None else f"[:{p.name}]" for p in _PARAMETERS[name])


def _parse(spec: str) -> tuple[str, list[Number]]:
    name, *texts = spec.split(":")
    if name not in _PARAMETERS:
        raise unknown("partition", name, _PARAMETERS)
    parameters = _PARAMETERS[name]
    values = [p.read(text, spec) for p, text in zip(parameters, texts, strict=False)]
    defaults = [p.default for p in parameters[len(texts) :] if p.default is not None]
    if len(texts) > len(parameters) or len(values) + len(defaults) < len(parameters):
        raise ApieceError(f"partition {spec!r} has a wrong number of parameters: write {_form(name)}")
    return name, values + defaults
