"""Partitions: which rows each client gets, as a function of the labels, the spec and a key.

A spec is a name and its parameters: `natural`, `iid`, `dirichlet:0.1:10`, `classes:2`, `pieces:2`,
`power:2:2:5`, `lognormal:4:1:3:5`, `uniform:2:10:20` or `cycle:2:10:20`.

Departures:
- dirichlet (Hsu et al. 2019; Li et al. 2022): the shares of the clients are drawn class by class, as Li et
  al. write it; their code also stops giving to a client that already has n / clients rows, this does not.
- classes: a client's classes differ. FedRep's and FedEC's clients may draw a class twice: that is pieces.
- power with classes (FedProx's MNIST): their script rounds sizes down and passes over what does not fit,
  which leaves about 1 % undealt; this deals every row. Which classes a client has is drawn, theirs are
  neighbours.
- lognormal (FedProx's and FedRep's letters): their scripts begin each class anew for almost every client, so
  that clients share images, one's test examples being another's training examples. Here no row is dealt
  twice; a class with too few rows for its clients is shared out in proportion to what they would have got.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from apiece import random
from apiece.data.federated import Examples, Ints, generator
from apiece.errors import ApieceError, unknown

Number = int | float

_ATTEMPTS = 1000


def deal(
    spec: str, examples: Examples, clients: int, key: int, own_test: bool = False
) -> tuple[list[Ints], list[str]]:
    """(the rows of each client, the clients' names). `natural` takes the data's clients, not `clients`.

    own_test: the training examples of the data's own split are dealt, and its test examples after them: of
    each class a client gets the share of the test examples that it got of the training examples.
    """
    name, parameters = _parse(spec)
    key = random.fold(key, "partition", name)
    if name not in _DEALERS:
        return _natural(examples, key, int(*parameters))
    # An example of several labels, a text, is of no class: all are of one.
    y = examples.y if examples.y.ndim == 1 else np.zeros(len(examples.y), dtype=np.int64)
    test = examples.test if own_test else None
    train = np.arange(len(y)) if test is None else np.flatnonzero(~test)
    if clients < 1:
        raise ApieceError(f"there must be at least 1 client, got {clients}")
    if clients > len(train):
        raise ApieceError(
            f"{len(train)} examples cannot be dealt to {clients} clients: ask for fewer clients"
        )
    parts = [train[part] for part in _DEALERS[name](y[train], clients, key, *parameters)]
    if test is not None:
        after = _alike(parts, y, test, random.fold(key, "own test"))
        parts = [np.concatenate(pair) for pair in zip(parts, after, strict=True)]
    return [np.sort(part) for part in parts], [str(client) for client in range(clients)]


def _alike(parts: list[Ints], y: Ints, test: NDArray[np.bool_], key: int) -> list[Ints]:
    """The rows of `test`, of each class in the proportions of the training examples in `parts`."""
    totals = np.bincount(y[~test])
    held = np.array([np.bincount(y[part], minlength=len(totals)) for part in parts])
    upto, draw = np.cumsum(held, axis=0), generator(key)
    mine: list[list[Ints]] = [[] for _ in parts]
    for label in np.flatnonzero(totals):
        rows = draw.permutation(np.flatnonzero(test & (y == label)))
        # To the nearest, in whole numbers: 250 of 5000 are 50 of 1000, whatever floats make of it.
        ends = (2 * upto[:, label] * len(rows) + totals[label]) // (2 * totals[label])
        for client in np.flatnonzero(held[:, label]):
            mine[client].append(rows[ends[client - 1] if client else 0 : ends[client]])
    return [np.concatenate([*some, y[:0]]) for some in mine]


def _natural(examples: Examples, key: int, most: int) -> tuple[list[Ints], list[str]]:
    if examples.client is None:
        others = ", ".join(_form(name) for name in _DEALERS)
        raise ApieceError(f"the data has no clients of its own for 'natural': choose one of {others}")
    ids, inverse, sizes = np.unique(examples.client, return_inverse=True, return_counts=True)
    parts = np.split(np.argsort(inverse, kind="stable"), np.cumsum(sizes)[:-1])
    rows = dict(zip((str(name) for name in ids), parts, strict=True))
    names = list(rows) if examples.client_names is None else list(examples.client_names)
    if 0 < most < len(names):
        names = [names[client] for client in random.choose(random.fold(key, "some"), most, len(names))]
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
        raise _undealt(clients, per_client, len(sizes))
    parts: list[list[Ints]] = [[] for _ in range(clients)]
    for rows, holders in _held(by_class, sizes, clients, per_client, draw):
        for client, piece in zip(holders, np.array_split(rows, len(holders)), strict=True):
            parts[client].append(piece)
    return [np.concatenate(part) for part in parts]


def _any_pieces(y: Ints, clients: int, key: int, per_client: int) -> list[Ints]:
    """Every class is cut into equal pieces, and a client gets `per_client` of them, whatever their class."""
    draw = generator(key)
    by_class = _rows_by_class(y, draw)
    wanted = clients * per_client
    if wanted < len(by_class):
        raise _undealt(clients, per_client, len(by_class))
    counts = _pieces(np.array([len(rows) for rows in by_class]), wanted, wanted)
    if counts.sum() < wanted:
        raise ApieceError(f"{len(y)} examples cannot be cut into {wanted} pieces: ask for fewer")
    pieces = [p for rows, n in zip(by_class, counts, strict=True) for p in np.array_split(rows, n)]
    order = draw.permutation(wanted).reshape(clients, per_client)
    return [np.concatenate([pieces[piece] for piece in mine]) for mine in order]


def _held(
    by_class: list[Ints], most: Ints, clients: int, per_client: int, draw: np.random.Generator
) -> list[tuple[Ints, Ints]]:
    """(a class's rows, the clients that get some of them) of every class; of no class more than `most`."""
    held = _holders(_pieces(most, clients, clients * per_client), clients, draw)
    return [(rows, draw.permutation(np.flatnonzero(held[:, label]))) for label, rows in enumerate(by_class)]


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


def _power(y: Ints, clients: int, key: int, sigma: float, per_client: int, floor: int) -> list[Ints]:
    """`floor` rows each, and the others in proportion to lognormal(0, sigma) draws; rows at random.

    With `per_client` classes each: `floor` rows of each of them, and the others of every class likewise.
    """
    if clients * max(per_client, 1) * floor > len(y):
        raise ApieceError(f"{len(y)} examples cannot give {clients} clients {floor} each: lower FLOOR")
    draw = generator(key)

    def sizes(count: int, total: int) -> Ints:
        logs = sigma * draw.standard_normal(count)
        return _apportioned(total - floor * count, np.exp(logs - logs.max()), floor)

    if per_client == 0:
        whole = sizes(clients, len(y))
        return np.split(draw.permutation(len(y)), np.cumsum(whole)[:-1])
    by_class = _rows_by_class(y, draw)
    if clients * per_client < len(by_class):
        raise _undealt(clients, per_client, len(by_class))
    return _of_classes(by_class, clients, per_client, floor, draw, lambda who, total: sizes(len(who), total))


def _lognormal(
    y: Ints, clients: int, key: int, mean: float, sigma: float, per_client: int, more: int
) -> list[Ints]:
    """lognormal(mean, sigma) + `more` rows each, equally many of each of its classes, two at least."""
    draw = generator(key)
    sizes = np.exp(mean + sigma * draw.standard_normal(clients)) + more
    each = np.maximum(sizes // per_client, _PAIR).astype(np.int64)

    def served(who: Ints, total: int) -> Ints:
        wanted: Ints = each[who]
        if wanted.sum() <= total:
            return wanted
        return _apportioned(total - _PAIR * len(who), wanted - _PAIR, _PAIR)

    return _of_classes(_rows_by_class(y, draw), clients, per_client, _PAIR, draw, served)


def _uniform(y: Ints, clients: int, key: int, per_client: int, low: int, high: int) -> list[Ints]:
    """Of each of its classes, `low` to `high` rows, each number as likely."""
    draw = generator(key)
    by_class = _rows_by_class(y, draw)
    return _of_classes(by_class, clients, per_client, high, draw, _between(low, high, draw))


def _cycle(y: Ints, clients: int, key: int, per_client: int, low: int, high: int) -> list[Ints]:
    """The next `per_client` classes in turn, after the last the first again; `low` to `high` rows of each."""
    draw = generator(key)
    sizes = _between(low, high, draw)
    by_class = _rows_by_class(y, draw)
    turns = np.arange(clients * per_client) % len(by_class)
    held = [(rows, np.flatnonzero(turns == label) // per_client) for label, rows in enumerate(by_class)]
    if per_client > len(by_class) or any(len(rows) < high * len(holders) for rows, holders in held):
        raise _too_few(by_class, clients, per_client, high)
    return _dealt(held, clients, sizes)


Sizes = Callable[[Ints, int], Ints]  # (the clients that get rows of a class, how many there are) → each one's


def _between(low: int, high: int, draw: np.random.Generator) -> Sizes:
    if low > high:
        raise ApieceError(f"LOW must not exceed HIGH: {low} rows of a class at least, {high} at most")
    return lambda who, total: draw.integers(low, high + 1, len(who))


_PAIR = 2  # one example of a class to train on, one to test on


def _of_classes(
    by_class: list[Ints],
    clients: int,
    per_client: int,
    least: int,
    draw: np.random.Generator,
    sizes: Sizes,
) -> list[Ints]:
    """`sizes`: how many of a class's rows its clients get; it has `least` for each. The rest is undealt."""
    if per_client > len(by_class):
        raise ApieceError(f"{per_client} classes per client are more than the {len(by_class)} in the data")
    most = np.array([len(rows) // max(least, 1) for rows in by_class])
    if np.minimum(most, clients).sum() < clients * per_client:
        raise _too_few(by_class, clients, per_client, least)
    return _dealt(_held(by_class, most, clients, per_client, draw), clients, sizes)


def _too_few(by_class: list[Ints], clients: int, per_client: int, least: int) -> ApieceError:
    return ApieceError(
        f"{sum(map(len, by_class))} examples of {len(by_class)} classes cannot give {clients} clients "
        f"{least} of each of {per_client} classes: ask for fewer clients, classes or examples"
    )


def _dealt(held: list[tuple[Ints, Ints]], clients: int, sizes: Sizes) -> list[Ints]:
    parts: list[list[Ints]] = [[] for _ in range(clients)]
    for rows, holders in held:
        pieces = np.split(rows, np.cumsum(sizes(holders, len(rows)))) if len(holders) else []
        for client, piece in zip(holders, pieces, strict=False):  # behind the last is what is left
            parts[client].append(piece)
    return [np.concatenate(part) for part in parts]


def _apportioned(total: int, weights: NDArray[Any], each: int) -> Ints:
    """`each`, and `total` in proportion to the weights, in whole numbers: up for the largest remainders."""
    ideal = total * (weights / weights.sum())
    sizes: Ints = np.floor(ideal).astype(np.int64)
    sizes[np.argsort(sizes - ideal, kind="stable")[: total - int(sizes.sum())]] += 1
    return sizes + each


def _undealt(clients: int, per_client: int, classes: int) -> ApieceError:
    return ApieceError(
        f"{clients} clients with {per_client} of {classes} classes each would leave classes undealt: "
        f"ask for more clients or more classes per client"
    )


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
            bound = f" >= {self.least:g}" if math.isfinite(self.least) else ""
            raise ApieceError(f"{self.name} in partition {spec!r} must be {kind}{bound}, got {text!r}")
        return value


_PARAMETERS: dict[str, tuple[_Parameter, ...]] = {
    "natural": (_Parameter("MOST", int, 1, default=0),),
    "iid": (),
    "dirichlet": (_Parameter("ALPHA", float, 1e-9), _Parameter("MIN", int, 0, default=2)),
    "classes": (_Parameter("K", int, 1),),
    "pieces": (_Parameter("K", int, 1),),
    "power": (
        _Parameter("SIGMA", float, 0.0),
        _Parameter("K", int, 0, default=0),
        _Parameter("FLOOR", int, 0, default=1),
    ),
    "lognormal": (
        _Parameter("MEAN", float, -math.inf),
        _Parameter("SIGMA", float, 0.0),
        _Parameter("K", int, 1),
        _Parameter("MORE", int, 0, default=0),
    ),
    "uniform": (_Parameter("K", int, 1), _Parameter("LOW", int, 1), _Parameter("HIGH", int, 1)),
    "cycle": (_Parameter("K", int, 1), _Parameter("LOW", int, 1), _Parameter("HIGH", int, 1)),
}

# (y, clients, key, *parameters) → the rows of each client
_DEALERS: dict[str, Callable[..., list[Ints]]] = {
    "iid": _iid,
    "dirichlet": _dirichlet,
    "classes": _classes,
    "pieces": _any_pieces,
    "power": _power,
    "lognormal": _lognormal,
    "uniform": _uniform,
    "cycle": _cycle,
}


def _form(name: str) -> str:
    """How a spec is written: dirichlet:ALPHA[:MIN]."""
    needed = [p.name for p in _PARAMETERS[name] if p.default is None]
    left_out = [p.name for p in _PARAMETERS[name] if p.default is not None]
    return ":".join([name, *needed]) + "".join(f"[:{each}" for each in left_out) + "]" * len(left_out)


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
