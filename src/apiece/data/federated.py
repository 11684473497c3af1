"""Examples before they are dealt out; Clients: a population; Federated: one that is resident on a device."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from apiece import random, tree
from apiece.data.arena import Arena
from apiece.errors import ApieceError, unknown
from apiece.tree import Tree

Ints = NDArray[np.int64]

BLOCK = 1 << 16  # clients looked at together where all of them are


@dataclass(frozen=True)
class Examples:
    """A dataset: arrays with one row per example."""

    x: Any  # an array or a tree of arrays: float32, or bytes that stand for pixels, 255 for 1
    y: Ints
    classes: int
    label_names: tuple[str, ...]
    client: NDArray[Any] | None = None  # the natural client of each row
    client_names: tuple[str, ...] | None = None  # given where some have no row
    test: NDArray[np.bool_] | None = None  # the data's own test examples, where it has any
    features: tuple[str, ...] = ()  # names of the columns of x, where it has any

    def only(self, rows: NDArray[np.bool_]) -> Examples:
        """Some of the rows; classes and clients stay."""
        client = None if self.client is None else self.client[rows]
        test = None if self.test is None else self.test[rows]
        x = tree.map(lambda array: array[rows], self.x)
        return replace(self, x=x, y=self.y[rows], client=client, test=test)


@dataclass(frozen=True)
class Ragged:
    """Rows of many clients in one array: client i's are rows[offsets[i]:offsets[i + 1]]."""

    rows: Ints
    offsets: Ints

    @staticmethod
    def of(parts: Sequence[Ints]) -> Ragged:
        sizes = np.array([len(part) for part in parts], dtype=np.int64)
        rows = np.concatenate([np.asarray(p, dtype=np.int64) for p in parts]) if len(parts) else sizes
        return Ragged(rows, np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64))

    @property
    def sizes(self) -> Ints:
        return np.diff(self.offsets)

    def __getitem__(self, client: int | np.integer) -> Ints:
        return self.rows[self.offsets[client] : self.offsets[client + 1]]

    def take(self, clients: Sequence[int]) -> Ragged:
        return Ragged.of([self[i] for i in clients])

    def padded(self, clients: Sequence[int], filler: int) -> Ints:
        """The clients' rows as a rectangle, `filler` behind the shorter ones."""
        parts = [self[i] for i in clients]
        out = np.full((len(parts), max(len(part) for part in parts)), filler, dtype=np.int64)
        for line, part in zip(out, parts, strict=True):
            line[: len(part)] = part
        return out


class Clients(ABC):
    """A population. What a round or a score needs of it is that of a few clients: `take` gives it."""

    x: Tree  # the examples in memory, one row each; the last row is padding (zeros)
    y: Tensor
    classes: int
    label_names: tuple[str, ...]
    names: Sequence[str]  # the clients', by id
    seen: NDArray[np.bool_]  # False: never sampled, only scored
    partition: str  # how it was dealt out
    features: tuple[str, ...] = ()  # names of the columns of x, where it has any
    # What is missing for who needs all examples, and what to do.
    lack: ClassVar[str] = (
        "in memory, and these are made when they are asked for: use data that is resident (docs/data.md)"
    )

    @abstractmethod
    def take(self, ids: Sequence[int]) -> Federated:
        """These clients alone, in this order, in memory."""

    @abstractmethod
    def sizes(self, ids: Sequence[int] | Ints) -> tuple[Ints, Ints]:
        """How many training and test examples these clients have."""

    @abstractmethod
    def to(self, device: torch.device) -> Clients:
        """The same, its examples on `device`."""

    @property
    def kept(self) -> Clients:
        """The same, their examples where they are kept: to see who holds what before any is copied."""
        return self

    def brought(self, some: Federated, into: Arena | None = None) -> Federated:
        """Clients taken of `kept`, on the device; where `into` is given, until it is filled again."""
        return some

    @property
    def padding(self) -> int:
        return len(self.y) - 1

    @property
    def population(self) -> int:
        return len(self.seen)

    @cached_property
    def seen_ids(self) -> Ints:
        return np.flatnonzero(self.seen)

    @cached_property
    def unseen_ids(self) -> Ints:
        return np.flatnonzero(~self.seen)

    @cached_property
    def examples(self) -> int:
        """Training examples of the seen clients."""
        return sum(int(self.sizes(ids[self.seen[ids]])[0].sum()) for ids in self.blocks())

    @property
    def input_shape(self) -> tuple[int, ...]:
        return tuple(tree.leaves(self.x)[0].shape[1:])

    def blocks(self) -> Iterator[Ints]:
        """All ids, some at a time."""
        for begin in range(0, self.population, BLOCK):
            yield np.arange(begin, min(begin + BLOCK, self.population))


@dataclass(frozen=True)
class Federated(Clients):
    """Every client's training and test rows over arrays that hold all examples."""

    x: Tree
    y: Tensor
    classes: int
    label_names: tuple[str, ...]
    names: tuple[str, ...]
    train: Ragged
    test: Ragged
    seen: NDArray[np.bool_]
    proxy: Ints  # rows of the server's own, taken out of the seen clients' training rows
    partition: str = ""
    lasting: bool = True  # False: the arrays were made for one cohort and are gone after it
    features: tuple[str, ...] = ()

    def take(self, ids: Sequence[int]) -> Federated:
        """The arrays stay as they are."""
        names = tuple(self.names[i] for i in ids)
        train, test = self.train.take(ids), self.test.take(ids)
        return self._changed(names=names, train=train, test=test, seen=self.seen[list(ids)])

    def sizes(self, ids: Sequence[int] | Ints) -> tuple[Ints, Ints]:
        at = np.asarray(ids, dtype=np.int64)
        train, test = self.train.offsets, self.test.offsets
        return train[at + 1] - train[at], test[at + 1] - test[at]

    def to(self, device: torch.device) -> Federated:
        other = self._changed(x=tree.to(self.x, device), y=self.y.to(device))
        if "digest" in vars(self):  # a device would have to send all of them back
            vars(other)["digest"] = self.digest
        return other

    def redealt(self, train: Ragged) -> Federated:
        """With other training rows of the same arrays."""
        return self._changed(train=train)

    def _changed(self, **changes: Any) -> Federated:
        """With the same labels, so that a device need not be asked for them again."""
        other = replace(self, **changes)
        vars(other)["labels"] = self.labels
        return other

    @cached_property
    def labels(self) -> Ints:
        """y on the host."""
        labels: Ints = self.y.cpu().numpy()
        return labels

    @cached_property
    def digest(self) -> str:
        """A hash of the examples."""
        found = hashlib.sha256()
        for array in (*tree.leaves(self.x), self.y):
            found.update(array.cpu().numpy())
        return found.hexdigest()[:16]

    def counts(self, rows: Ints) -> Ints:
        """How many of the rows are of each class; where an example has many labels, how many labels are."""
        labels = self.labels[rows]
        return np.bincount(labels[labels >= 0], minlength=self.classes)

    def pool(self) -> Federated:
        """The seen clients' training rows as one client: what the centralized baseline trains on."""
        return self.holder("pool", np.concatenate([self.train[i] for i in self.seen_ids]))

    def holder(self, name: str, rows: Ints) -> Federated:
        """One client alone, who trains on these rows."""
        everyone = np.ones(1, dtype=bool)
        return replace(
            self, names=(name,), train=Ragged.of([rows]), test=Ragged.of([rows[:0]]), seen=everyone
        )

    def validation(self, share: float, key: int) -> Federated:
        """The seen clients alone, their training rows split into train and test: what tuning works on.

        No other row is in it: neither the test rows nor those of unseen clients. Ids count seen clients only.
        """
        if not 0.0 < share < 1.0:
            raise ApieceError(f"the validation share must lie between 0 and 1, got {share}")
        ids = self.seen_ids
        parts = [hold_out(self.train[i], share, random.fold(key, "validation", int(i))) for i in ids]
        kept = np.unique(np.concatenate([*(self.train[i] for i in ids), self.proxy]))
        place = torch.from_numpy(np.append(kept, self.padding)).to(self.y.device)
        return replace(
            self,
            x=tree.map(lambda array: array[place], self.x),
            y=self.y[place],
            names=tuple(self.names[i] for i in ids),
            train=Ragged.of([np.searchsorted(kept, train) for train, _ in parts]),
            test=Ragged.of([np.searchsorted(kept, test) for _, test in parts]),
            seen=np.ones(len(ids), dtype=bool),
            proxy=np.searchsorted(kept, self.proxy),
        )


TESTERS = ("all", "unseen")
PICKS = ("random", "last")


def federate(
    examples: Examples,
    parts: Sequence[Ints],
    names: Sequence[str],
    key: int,
    test: float = 0.25,
    unseen: float = 0.2,
    proxy: float = 0.0,
    testers: str = "all",
    unseen_pick: str = "random",
) -> Federated:
    """Split each client's rows into train and test, and the clients into seen and unseen.

    test 0: the data's own test examples, where it has any. A client of one example keeps it for training: it
    is trained, and scored NaN. testers `unseen`: the seen clients train on all they have. `proxy` is the
    share of the seen clients' training rows that becomes the server's.
    """
    check_share("test", test)
    check_share("proxy", proxy)
    examples, parts = _dealt_alone(examples, parts)
    seen = draw_seen(len(parts), unseen, key, unseen_pick)
    holds_out = draw_testers(seen, testers)

    def split(client: int, rows: Ints) -> tuple[Ints, Ints]:
        if not holds_out[client]:
            return np.sort(rows), rows[:0]
        if test == 0.0 and examples.test is not None:
            rows = np.sort(rows)
            return rows[~examples.test[rows]], rows[examples.test[rows]]
        return hold_out(rows, test, random.fold(key, "test", client))

    pairs = [split(client, np.asarray(rows, dtype=np.int64)) for client, rows in enumerate(parts)]
    train_parts, test_parts = [train for train, _ in pairs], [held_out for _, held_out in pairs]
    theirs = np.concatenate([part for part, mine in zip(train_parts, seen, strict=True) if mine])
    taken = generator(random.fold(key, "proxy")).permutation(theirs)[: round(proxy * len(theirs))]
    if len(taken):
        gone = np.zeros(len(examples.y), dtype=bool)
        gone[taken] = True
        train_parts = [part[~gone[part]] for part in train_parts]

    return Federated(
        x=tree.map(with_padding, examples.x),
        y=with_padding(examples.y),
        classes=examples.classes,
        label_names=examples.label_names,
        names=tuple(names),
        train=Ragged.of(train_parts),
        test=Ragged.of(test_parts),
        seen=seen,
        proxy=np.sort(taken),
        features=examples.features,
    )


def _dealt_alone(examples: Examples, parts: Sequence[Ints]) -> tuple[Examples, Sequence[Ints]]:
    """Without the rows that no client was dealt: they need not be resident."""
    dealt = np.zeros(len(examples.y), dtype=bool)
    for rows in parts:
        dealt[rows] = True
    if dealt.all():
        return examples, parts
    place = np.cumsum(dealt) - 1
    return examples.only(dealt), [place[rows] for rows in parts]


def hold_out(rows: Ints, share: float, key: int) -> tuple[Ints, Ints]:
    """(the rows kept, those held out), at random; one at least is kept."""
    shuffled = generator(key).permutation(rows)
    held_out = int(count_held_out(len(rows), share))
    return np.sort(shuffled[held_out:]), np.sort(shuffled[:held_out])


def count_held_out(size: int | Ints, share: float) -> Ints:
    """How many of `size` examples are held out."""
    sizes = np.asarray(size)
    counts: Ints = np.minimum(np.rint(share * sizes), np.maximum(sizes - 1, 0)).astype(np.int64)
    return counts


def draw_seen(count: int, unseen: float, key: int, pick: str = "random") -> NDArray[np.bool_]:
    """Which of so many clients may train; `unseen` is a share of them, or from 1 on their number.

    pick: who may not, `random` ones or the `last`.
    """
    if pick not in PICKS:
        raise unknown("unseen_pick", pick, PICKS)
    if not (unseen >= 0.0 and (unseen < 1.0 or unseen % 1.0 == 0.0)):
        raise ApieceError(f"unseen must be a share in [0, 1) or a whole number of clients, got {unseen}")
    left_out = round(unseen * count) if unseen < 1.0 else int(unseen)
    if left_out >= count:
        raise ApieceError(f"unseen = {unseen:g} leaves none of {count} clients to train with")
    seen = np.ones(count, dtype=bool)
    if pick == "last":
        seen[count - left_out :] = False
    else:
        seen[random.choose(random.fold(key, "unseen"), left_out, count)] = False
    return seen


def draw_testers(seen: NDArray[np.bool_], testers: str) -> NDArray[np.bool_]:
    """Which clients hold examples out: all of them, or the unseen ones alone."""
    if testers not in TESTERS:
        raise unknown("testers", testers, TESTERS)
    return ~seen if testers == "unseen" else np.ones(len(seen), dtype=bool)


def check_share(name: str, share: float) -> None:
    if not 0.0 <= share < 1.0:
        raise ApieceError(f"the {name} share must lie in [0, 1), got {share}")


def with_padding(array: Any) -> Tensor:
    """The array as a tensor, a row of zeros behind the last."""
    rows = torch.from_numpy(np.ascontiguousarray(array))
    return torch.cat([rows, rows.new_zeros((1, *rows.shape[1:]))])


def resident(data: Clients, what: str) -> Federated:
    """`data`, which `what` needs whole."""
    if not isinstance(data, Federated):
        raise ApieceError(f"{what} needs every client's examples {data.lack}")
    return data


def generator(key: int) -> np.random.Generator:
    """NumPy's counter-based generator at `key`, for dealing data out on the host."""
    return np.random.Generator(np.random.Philox(key=key & (2**64 - 1)))
