"""Data: datasets by name, your own files, and how they are dealt out to clients."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from apiece.data import cifar, digits, femnist, images, mnist, movielens, own, shakespeare, synthetic, vehicle
from apiece.data.federated import Clients, Examples, Federated, Ints, federate, resident
from apiece.data.lazy import Source, lazily
from apiece.data.own import from_arrays, from_path, save
from apiece.data.partition import deal
from apiece.data.place import data_folder
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
    "mnist": "28 × 28 images of digits, 60,000 + 10,000 examples, 10 classes; from the data folder",
    "fashion_mnist": "28 × 28 images of clothes, 60,000 + 10,000 examples, 10 classes; from the data folder",
    "cifar10": "32 × 32 colour images, 50,000 + 10,000 examples, 10 classes; from the data folder",
    "cifar100": "32 × 32 colour images, 50,000 + 10,000 examples, 100 classes; from the data folder",
    "femnist": "28 × 28 images of handwritten characters, 62 classes, their writers as clients; "
    "from the data folder",
    "movielens": "MovieLens-1M, implicit feedback: 6,040 viewers as clients, of each the latest choice and "
    "99 other films to test on; from the data folder",
    "shakespeare": "the plays' next character, 80 at a time, the speaking roles as clients; "
    "from the data folder",
    "vehicle": "100 features of 23 acoustic and seismic sensors as clients, 2 classes; from the data folder",
}


class _Made(NamedTuple):
    """A dataset that needs no files."""

    load: Callable[..., Examples]  # (clients, key, **options)
    parameters: tuple[str, ...] = ()  # the options that may stand behind the name, in parentheses
    options: tuple[str, ...] = ()
    source: Callable[..., Source] | None = None  # (key, **options), where not all clients need be in memory


class _Stored(NamedTuple):
    """A dataset whose files lie in the data folder."""

    load: Callable[[Path, Sequence[str], int], Examples]  # (data folder, words, key)
    words: tuple[str, ...] = ()  # what may stand behind the name, in parentheses


def _images(load: Callable[[Path], Examples]) -> _Stored:
    return _Stored(lambda folder, words, key: images.prepared(load(folder), words), tuple(images.WORDS))


def _femnist(folder: Path, words: Sequence[str], key: int) -> Examples:
    layouts = [word for word in words if word in femnist.LAYOUTS]
    if len(layouts) > 1:
        raise ApieceError(f"FEMNIST is in one layout at a time, not in {' and '.join(layouts)}")
    rest = [word for word in words if word not in layouts]
    return images.prepared(femnist.load(folder, *layouts), rest)


_MADE = {
    "digits": _Made(lambda clients, key: digits.load()),
    "synthetic": _Made(synthetic.load, ("alpha", "beta"), ("alpha", "beta", "most")),
    "population": _Made(
        lambda clients, **given: synthetic.Population(**given).examples(clients),
        ("alpha", "beta", "most"),
        ("alpha", "beta", "most"),
        synthetic.Population,
    ),
}
_STORED = {
    "mnist": _images(mnist.load),
    "fashion_mnist": _images(mnist.load_fashion),
    "cifar10": _images(cifar.load_10),
    "cifar100": _images(cifar.load_100),
    "femnist": _Stored(_femnist, (*femnist.LAYOUTS, *images.WORDS)),
    "movielens": _Stored(lambda folder, words, key: movielens.load(folder, key)),
    "shakespeare": _Stored(lambda folder, words, key: shakespeare.load(folder)),
    "vehicle": _Stored(lambda folder, words, key: vehicle.load(folder)),
}


def load(
    name: str,
    *,
    clients: int,
    key: int,
    data_dir: str = "",
    client_column: str = "client",
    label_column: str = "label",
    options: Mapping[str, float] | None = None,
) -> Examples:
    """A dataset of DATASETS, or the file or folder at the path `name`; `digits[0-4]` keeps those classes.

    `clients` and `key` make the data that is generated; `data_dir` is the data folder of the data that is
    stored; the columns are those of .csv and .parquet files.
    """
    some = re.fullmatch(r"(.+)\[([\d,\- ]+?)( from 0)?\]", name)
    if some is not None:
        whole = load(
            some[1],
            clients=clients,
            key=key,
            data_dir=data_dir,
            client_column=client_column,
            label_column=label_column,
            options=options,
        )
        return _only(whole, some[2], renumbered=some[3] is not None)
    called = _called(name)
    if called is not None and called[0] in _MADE:
        given = _given(*called, options or {})
        return _MADE[called[0]].load(clients=clients, key=key, **given)
    known = called is not None and called[0] in _STORED
    if called is not None and not known and not (name and Path(name).exists()):
        raise unknown("dataset", called[0], DATASETS)
    if options:
        raise ApieceError(f"{name} takes no options, got {', '.join(sorted(options))}")
    if called is not None and known:
        folder = data_folder(data_dir)
        return _read(called[0], folder, tuple(_words(*called)), key, _stamp(folder))
    return own.from_path(name, client_column, label_column)


@lru_cache(maxsize=1)
def _read(name: str, folder: Path, words: tuple[str, ...], key: int, stamp: Hashable) -> Examples:
    """The runs of one table read the same files one after another: while nothing changes, once is enough."""
    return _STORED[name].load(folder, words, key)


def _stamp(folder: Path) -> Hashable:
    """What changes when a file in the data folder does."""
    files = [path for depth in ("[!.]*/*", "[!.]*/*/*") for path in folder.glob(depth) if path.is_file()]
    return tuple(sorted((str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files))


def anchored(name: str) -> str:
    """`name` with a path in it made absolute; the names of datasets stay."""
    whole, bracket, rest = name.partition("[")
    if re.split(r"[(\[]", whole)[0] in DATASETS or not whole or not Path(whole).exists():
        return name
    return f"{Path(whole).resolve()}{bracket}{rest}"


def _only(examples: Examples, text: str, renumbered: bool) -> Examples:
    """The examples of some classes, which keep their numbers or are numbered from 0."""
    kept: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise ApieceError(f"classes [{text}] must be like [0-4] or [0,2,5]")
        kept |= set(range(int(first), int(last or first) + 1))
    if examples.y.ndim > 1:
        raise ApieceError(f"classes [{text}] cannot be chosen: an example has many labels")
    if max(kept, default=0) >= examples.classes:
        raise ApieceError(f"classes [{text}]: there are {examples.classes}, from 0 to {examples.classes - 1}")
    rows = np.isin(examples.y, sorted(kept))
    if not rows.any():
        raise ApieceError(f"there is no example of the classes [{text}]")
    some = examples.only(rows)
    if not renumbered:
        return some
    numbers = np.array(sorted(kept))
    names = tuple(examples.label_names[label] for label in numbers)
    return replace(some, y=np.searchsorted(numbers, some.y), classes=len(names), label_names=names)


def _called(name: str) -> tuple[str, str | None] | None:
    """(a dataset's name, what stands behind it in parentheses), if it can be one."""
    called = re.fullmatch(r"([\w-]*)(?:\(([^()]*)\))?", name)
    return None if called is None else (called[1], called[2])


def _source(name: str, key: int) -> Source | None:
    """Where the clients of the dataset come from one by one, if they do."""
    called = _called(name)
    made = _MADE[called[0]].source if called is not None and called[0] in _MADE else None
    return None if called is None or made is None else made(key=key, **_given(*called, {}))


def _words(name: str, inside: str | None) -> list[str]:
    """The words in the parentheses behind a dataset's name."""
    words = [word.strip() for word in inside.split(",")] if inside is not None else []
    known = _STORED[name].words
    for word in words:
        if not known:
            raise ApieceError(f"nothing stands in parentheses behind {name}: write {name}")
        if word not in known:
            raise unknown(f"word behind {name}", word, known)
    return words


def _given(name: str, inside: str | None, options: Mapping[str, float]) -> dict[str, float]:
    """The options in the parentheses behind a dataset's name, and further ones."""
    dataset = _MADE[name]
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
    testers: str = "all",
    unseen_pick: str = "random",
    data_dir: str = "",
    client_column: str = "client",
    label_column: str = "label",
    examples: Examples | None = None,
) -> Clients:
    """Load (unless `examples` are given), deal out and split.

    `auto` keeps the data's own clients, else deals out four classes each. test 0: the data's own test
    examples.
    """
    source = _source(name, key) if examples is None and partition in ("auto", "natural") else None
    if source is not None:
        if test == 0.0:
            raise _no_own_test(name)
        lazy = lazily(source, clients, key, test, unseen, testers, unseen_pick)
        return resident(lazy, "a proxy set") if proxy else lazy
    if examples is None:
        examples = load(
            name,
            clients=clients,
            key=key,
            data_dir=data_dir,
            client_column=client_column,
            label_column=label_column,
        )
    if partition == "auto":
        each = max(
            4, math.ceil(examples.classes / max(clients, 1))
        )  # few clients: enough to deal out every class
        partition = "natural" if examples.client is not None else f"classes:{min(each, examples.classes)}"
    if test == 0.0 and examples.test is None:
        raise _no_own_test(name)
    parts, names = deal(partition, examples, clients, key, own_test=test == 0.0)
    data = federate(examples, parts, names, key, test, unseen, proxy, testers, unseen_pick)
    return replace(data, partition=partition)


def _no_own_test(name: str) -> ApieceError:
    return ApieceError(f"{name} has no test examples of its own: give a share to hold out, --test 0.25")


def partition_table(data: Clients, ids: Ints | None = None) -> list[tuple[int, str, int, str, int, int]]:
    """Rows (client, name, seen, split, label, count) of what `ids`, or all, hold.

    seen is 1 or 0, split train or test. Of texts the characters are counted.
    """
    ids = np.arange(data.population) if ids is None else ids
    return [
        (client, held.names[at], int(held.seen[at]), split, label, int(count))
        for begin in range(0, len(ids), 1000)
        for some in [ids[begin : begin + 1000].tolist()]
        for held in [data.take(some)]
        for at, client in enumerate(some)
        for split, rows in (("train", held.train), ("test", held.test))
        for label, count in enumerate(held.counts(rows[at]))
        if count > 0
    ]
