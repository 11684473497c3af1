"""Data: built-in datasets, your own files, and how they are dealt out to clients."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from apiece import tree
from apiece.data import digits, own, synthetic
from apiece.data.federated import Clients, Examples, Federated, Ints, federate, resident
from apiece.data.lazy import Source, lazily
from apiece.data.own import from_arrays, from_path, save
from apiece.data.partition import deal
from apiece.errors import ApieceError, unknown

__all__ = [
    "DATASETS",
    "Examples",
    "Federated",
    "deal",
    "federate",
    "from_arrays",
    "from_path",
    "load",
    "partition_table",
    "prepare",
    "save",
]

DATASETS = {
    "digits": "8 × 8 images of handwritten digits, 1,797 examples, 10 classes; no clients of its own",
    "synthetic": "Synthetic(α, β) of FedProx: 60 features, 10 classes, own clients; or synthetic(0.5,0.5)",
    "population": "the same family, each client made when it takes part: any number of clients; "
    "or population(0.5,0.5,100), of at most 100 examples",
}


class _BuiltIn(NamedTuple):
    load: Callable[..., Examples]  # (clients, key, **options)
    parameters: tuple[str, ...] = ()  # the options that may stand behind the name, in parentheses
    options: tuple[str, ...] = ()
    source: Callable[..., Source] | None = None  # (key, **options), where not all clients need be in memory


_BUILT_IN = {
    "digits": _BuiltIn(lambda clients, key: digits.load()),
    "synthetic": _BuiltIn(synthetic.load, ("alpha", "beta"), ("alpha", "beta", "most")),
    "population": _BuiltIn(
        lambda clients, **given: synthetic.Population(**given).examples(clients),
        ("alpha", "beta", "most"),
        ("alpha", "beta", "most"),
        synthetic.Population,
    ),
}


def load(
    name: str,
    *,
    clients: int,
    key: int,
    client_column: str = "client",
    label_column: str = "label",
    options: Mapping[str, float] | None = None,
) -> Examples:
    """A dataset of DATASETS, or the file or folder at the path `name`; `digits[0-4]` keeps those classes.

    `clients` and `key` make the data that is generated; the columns are those of .csv and .parquet files.
    """
    some = re.fullmatch(r"(.+)\[([\d,\- ]+)\]", name)
    if some is not None:
        whole = load(
            some[1],
            clients=clients,
            key=key,
            client_column=client_column,
            label_column=label_column,
            options=options,
        )
        return _only(whole, some[2])
    called = _called(name)
    if called is not None and called[0] in DATASETS:
        given = _given(*called, options or {})
        return _BUILT_IN[called[0]].load(clients=clients, key=key, **given)
    if called is not None and not (name and Path(name).exists()):
        raise unknown("dataset", called[0], DATASETS)
    if options:
        raise ApieceError(f"{name} takes no options, got {', '.join(sorted(options))}")
    return own.from_path(name, client_column, label_column)


def anchored(name: str) -> str:
    """`name` with a path in it made absolute; the names of datasets stay."""
    whole, bracket, rest = name.partition("[")
    if re.split(r"[(\[]", whole)[0] in DATASETS or not whole or not Path(whole).exists():
        return name
    return f"{Path(whole).resolve()}{bracket}{rest}"


def _only(examples: Examples, text: str) -> Examples:
    """The examples of some classes, which keep their numbers: a task of a sequence."""
    kept: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise ApieceError(f"classes [{text}] must be like [0-4] or [0,2,5]")
        kept |= set(range(int(first), int(last or first) + 1))
    rows = np.isin(examples.y, sorted(kept))
    if not rows.any():
        raise ApieceError(f"there is no example of the classes [{text}]")
    client = None if examples.client is None else examples.client[rows]
    return replace(examples, x=tree.map(lambda a: a[rows], examples.x), y=examples.y[rows], client=client)


def _called(name: str) -> tuple[str, str | None] | None:
    """(a dataset's name, what stands behind it in parentheses), if it can be one."""
    called = re.fullmatch(r"([\w-]*)(?:\(([^()]*)\))?", name)
    return None if called is None else (called[1], called[2])


def _source(name: str, key: int) -> Source | None:
    """Where the clients of the dataset come from one by one, if they do."""
    called = _called(name)
    made = _BUILT_IN[called[0]].source if called is not None and called[0] in DATASETS else None
    return None if called is None or made is None else made(key=key, **_given(*called, {}))


def _given(name: str, inside: str | None, options: Mapping[str, float]) -> dict[str, float]:
    """The options in the parentheses behind a dataset's name, and further ones."""
    dataset = _BUILT_IN[name]
    for option in options:
        if option not in dataset.options:
            raise unknown(f"option of {name}", option, dataset.options)
    texts = inside.split(",") if inside is not None else []
    if texts and len(texts) != len(dataset.parameters):
        form = f"{name}({','.join(dataset.parameters)})" if dataset.parameters else name
        raise ApieceError(f"{name}({inside}) has a wrong number of parameters: write {form}")
    try:
        values = [float(text) for text in texts]
    except ValueError:
        raise ApieceError(f"{name}({inside}): the parameters must be numbers") from None
    return dict(zip(dataset.parameters, values, strict=False)) | dict(options)


def prepare(
    name: str,
    partition: str = "auto",
    *,
    clients: int,
    key: int,
    test: float = 0.25,
    unseen: float = 0.2,
    proxy: float = 0.0,
    client_column: str = "client",
    label_column: str = "label",
    examples: Examples | None = None,
) -> Clients:
    """Load (unless `examples` are given), deal out and split.

    `auto` keeps the data's own clients, else deals out four classes each.
    """
    source = _source(name, key) if examples is None and partition in ("auto", "natural") else None
    if source is not None:
        data = lazily(source, clients, key, test, unseen)
        return resident(data, "a proxy set") if proxy else data
    if examples is None:
        examples = load(
            name, clients=clients, key=key, client_column=client_column, label_column=label_column
        )
    if partition == "auto":
        each = max(
            4, math.ceil(examples.classes / max(clients, 1))
        )  # few clients: enough to deal out every class
        partition = "natural" if examples.client is not None else f"classes:{min(each, examples.classes)}"
    parts, names = deal(partition, examples, clients, key)
    return replace(federate(examples, parts, names, key, test, unseen, proxy), partition=partition)


def partition_table(data: Clients, ids: Ints | None = None) -> list[tuple[int, str, int, str, int, int]]:
    """Rows (client, name, seen, split, label, count) of what `ids`, or all, hold.

    seen is 1 or 0, split train or test.
    """
    ids = np.arange(data.population) if ids is None else ids
    return [
        (client, held.names[at], int(held.seen[at]), split, label, int(count))
        for begin in range(0, len(ids), 1000)
        for some in [ids[begin : begin + 1000].tolist()]
        for held in [data.take(some)]
        for at, client in enumerate(some)
        for split, rows in (("train", held.train), ("test", held.test))
        for label, count in enumerate(np.bincount(held.labels[rows[at]], minlength=data.classes))
        if count > 0
    ]
