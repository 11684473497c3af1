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
from apiece.data.federated import Examples, Federated, federate
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
}


class _BuiltIn(NamedTuple):
    load: Callable[..., Examples]  # (clients, key, **options)
    parameters: tuple[str, ...] = ()  # the options that may stand behind the name, in parentheses
    options: tuple[str, ...] = ()


_BUILT_IN = {
    "digits": _BuiltIn(lambda clients, key: digits.load()),
    "synthetic": _BuiltIn(synthetic.load, ("alpha", "beta"), ("alpha", "beta", "most")),
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
    called = re.fullmatch(r"([\w-]*)(?:\(([^()]*)\))?", name)
    if called is not None and called[1] in DATASETS:
        return _built_in(called[1], called[2], clients, key, options or {})
    if called is not None and not (name and Path(name).exists()):
        raise unknown("dataset", called[1], DATASETS)
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


def _built_in(
    name: str, inside: str | None, clients: int, key: int, options: Mapping[str, float]
) -> Examples:
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
    given = dict(zip(dataset.parameters, values, strict=False)) | dict(options)
    return dataset.load(clients=clients, key=key, **given)


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
) -> Federated:
    """Load (unless `examples` are given), deal out and split.

    `auto` keeps the data's own clients, else deals out four classes each.
    """
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


def partition_table(data: Federated) -> list[tuple[int, str, int, str, int, int]]:
    """Rows (client, name, seen, split, label, count) of what is held; seen is 1 or 0, split train or test."""
    return [
        (client, data.names[client], int(data.seen[client]), split, label, int(count))
        for client in range(data.population)
        for split, rows in (("train", data.train), ("test", data.test))
        for label, count in enumerate(np.bincount(data.labels[rows[client]], minlength=data.classes))
        if count > 0
    ]
