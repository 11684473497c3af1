"""MovieLens-1M (Harper and Konstan 2015) as implicit feedback: will this viewer choose this film?

6,040 viewers, a client each; 3,706 films that were rated, 1,000,209 ratings. Every rating, high or low, is a
choice. The latest choice of each viewer is held out, as He et al. 2017 and FedPA do. Examples:

- training: each other choice (class 1), followed by 4 films drawn among those the viewer did not choose in
  training (class 0). The film held out is one of them: nothing in training tells it from the others.
- test: the choice held out, and 99 films the viewer never chose.

Inputs, by name: `user`, `gender`, `age`, `occupation`, `zip`, the film `item`, and `history`: at most 50
films that the viewer chose in training, 0 behind them. A training choice is neither in its own history nor in
that of the four films drawn with it: else its absence would tell them apart.

Read are, under `ml-1m/` or `movielens1m/`, `users.dat` and

- `ratings.dat`, the official file. History are the latest choices; what is drawn depends on the key alone.
- or `ratings.npz` (`user`, `item`, in the order of ratings.dat, without times) and `leave_latest_out.npz`
  (`latest_item`, `negatives`: by viewer, the choice held out and the 99 films). History are choices drawn
  once for each viewer. A held-out choice among its own 99 films (156 viewers) is dropped there.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from apiece import random
from apiece.data.federated import Examples, Ints, generator
from apiece.data.place import Arrays, cached, missing
from apiece.errors import ApieceError

USERS, ITEMS, ZIPS, OCCUPATIONS = 6040, 3952, 3439, 21
AGES = (1, 18, 25, 35, 45, 50, 56)  # the first year of each group
GENDERS = ("F", "M")
HISTORY = 50
TRAIN_NEGATIVES, TEST_NEGATIVES = 4, 99

_FOLDERS = ("ml-1m", "movielens1m")


class _Choices(NamedTuple):
    """All choices, by viewer; of one viewer those first that go into a history first."""

    user: Ints
    item: Ints
    latest: Ints  # by user, the film held out; 0: there is no such user
    negatives: list[Ints]  # by user, the films of the test


def load(folder: Path, key: int = 0) -> Examples:
    """The viewers of the data folder `folder`; `key` is for what is drawn."""
    places = [folder / name for name in _FOLDERS]
    for place, names in ((p, n) for n in (_OFFICIAL, _COMPACT) for p in places):
        paths = [place / name for name in ("users.dat", *names)]
        if all(path.exists() for path in paths):
            break
    else:
        raise missing(
            "MovieLens-1M",
            folder,
            [f"ml-1m/{{users.dat,{','.join(names)}}}" for names in (_OFFICIAL, _COMPACT)],
            "Its terms forbid handing it on: unpack ml-1m.zip of https://grouplens.org/datasets/movielens/1m "
            "there.",
        )
    arrays = cached(folder, f"movielens-{key}", paths, lambda: _made(paths, key))
    x = {name: arrays[name] for name in ("user", "gender", "age", "occupation", "zip", "item")}
    return Examples(
        x=x | {"history": arrays["histories"][arrays["history"]]},
        y=arrays["y"].astype(np.int64),
        classes=2,
        label_names=("not chosen", "chosen"),
        client=arrays["user"],
        test=arrays["test"],
    )


_OFFICIAL = ("ratings.dat",)
_COMPACT = ("ratings.npz", "leave_latest_out.npz")


def _made(paths: list[Path], key: int) -> Arrays:
    profiles = _profiles(paths[0])
    choices = _official(paths[1], key) if len(paths) == 2 else _compact(paths[1], paths[2], key)
    rows = _rows(choices, key)
    if not np.isin(rows["user"], profiles["user"]).all():
        raise ApieceError(f"{paths[0]} does not list every viewer of {paths[1]}")
    at = np.searchsorted(profiles["user"], rows["user"])
    return rows | {name: column[at].astype(np.int16) for name, column in profiles.items()}


def _profiles(path: Path) -> dict[str, Ints]:
    """The columns of users.dat as numbers, by user."""
    lines = [line.split("::") for line in path.read_text(encoding="latin-1").splitlines()]
    try:
        number, gender, age, occupation, zips = zip(*lines, strict=True)
        columns = {
            "user": [int(n) for n in number],
            "gender": [GENDERS.index(g) for g in gender],
            "age": [AGES.index(int(a)) for a in age],
            "occupation": [int(o) for o in occupation],
            "zip": np.unique(zips, return_inverse=True)[1].tolist(),
        }
    except ValueError as error:
        raise ApieceError(f"{path} is no users.dat of MovieLens-1M: {error}") from None
    by_user = np.argsort(columns["user"])
    found = {name: np.array(column, dtype=np.int64)[by_user] for name, column in columns.items()}
    for name, most in (("user", USERS), ("occupation", OCCUPATIONS - 1), ("zip", ZIPS - 1)):
        beyond = found[name][(found[name] < 0) | (found[name] > most)]
        if len(beyond):
            raise ApieceError(
                f"{path} is no users.dat of MovieLens-1M: {name} {beyond[0]} is not in 0 to {most}"
            )
    return found


def _official(path: Path, key: int) -> _Choices:
    try:
        table = np.array(path.read_bytes().replace(b"::", b" ").split(), dtype=np.int64).reshape(-1, 4)
    except ValueError as error:
        raise ApieceError(f"{path} is no ratings.dat of MovieLens-1M: {error}") from None
    user, item, _, time = table.T
    chosen = _chosen(path, user, item)
    # Of choices in one second, the one further down in the file is the later one.
    order = np.lexsort((-np.arange(len(user)), -time, user))
    user, item = user[order], item[order]
    latest = np.zeros(len(chosen), dtype=np.int64)
    first = np.flatnonzero(np.diff(user, prepend=0))
    latest[user[first]] = item[first]
    known = np.unique(item)
    negatives = [np.zeros(0, dtype=np.int64)] * len(chosen)
    for viewer in user[first].tolist():
        pool = known[~chosen[viewer, known]]
        if len(pool) < TEST_NEGATIVES:
            raise ApieceError(
                f"{path}: viewer {viewer} left only {len(pool)} films out, {TEST_NEGATIVES} are needed"
            )
        draw = generator(random.fold(key, "test negatives", viewer))
        negatives[viewer] = draw.choice(pool, TEST_NEGATIVES, replace=False)
    return _Choices(user, item, latest, negatives)


def _compact(ratings: Path, held_out: Path, key: int) -> _Choices:
    given: dict[str, Ints] = {}
    for path, names in ((ratings, ("user", "item")), (held_out, ("latest_item", "negatives"))):
        try:
            with np.load(path, allow_pickle=False) as file:
                given |= {name: file[name].astype(np.int64) for name in names}
        except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
            raise ApieceError(f"{path} cannot be read: {error}") from None
    user, item, latest = given["user"], given["item"], np.concatenate([[0], given["latest_item"]])
    chosen = _chosen(ratings, user, item)
    if len(latest) < len(chosen) or not chosen[user, latest[user]].all():
        raise ApieceError(f"{held_out} does not belong to {ratings}: a choice held out is not in it")
    order = generator(random.fold(key, "history")).permutation(len(user))
    order = order[np.argsort(user[order], kind="stable")]
    negatives = [films[films != mine] for films, mine in zip(given["negatives"], latest[1:], strict=True)]
    return _Choices(user[order], item[order], latest, [latest[:0], *negatives])


def _chosen(path: Path, user: Ints, item: Ints) -> NDArray[np.bool_]:
    """By user and film: did they choose it?"""
    if not len(user) or user.min() < 1 or user.max() > USERS or item.min() < 1 or item.max() > ITEMS:
        raise ApieceError(f"{path} is no file of MovieLens-1M: users are 1 to {USERS}, films 1 to {ITEMS}")
    chosen = np.zeros((int(user.max()) + 1, ITEMS + 1), dtype=bool)
    chosen[user, item] = True
    return chosen


def _rows(choices: _Choices, key: int) -> dict[str, NDArray[Any]]:
    """user, item, y and test of every example, and which of `histories` is its own."""
    held_out = choices.item == choices.latest[choices.user]
    known = np.unique(choices.item)
    user, item = choices.user[~held_out], choices.item[~held_out]
    place = np.arange(len(user)) - np.searchsorted(user, user)  # of a choice among its viewer's
    first = np.zeros((len(choices.latest), HISTORY + 1), dtype=np.int16)
    early = place <= HISTORY
    first[user[early], place[early]] = item[early]
    columns = np.arange(HISTORY)
    # All but the choice itself: from its place on, the next one.
    histories = first[user[:, None], columns + (columns >= place[:, None])]

    group = 1 + TRAIN_NEGATIVES
    films = np.column_stack([item, _negatives(user, item, known, key)]).ravel()
    viewers = np.flatnonzero(choices.latest)
    tests = [np.concatenate([choices.latest[[u]], choices.negatives[u]]) for u in viewers]
    test_sizes = [len(candidates) for candidates in tests]
    is_choice = [np.arange(len(films)) % group == 0, *(np.arange(size) == 0 for size in test_sizes)]
    return {
        "user": np.concatenate([np.repeat(user, group), np.repeat(viewers, test_sizes)]),
        "item": np.concatenate([films, *tests]).astype(np.int16),
        "y": np.concatenate(is_choice).astype(np.int8),
        "test": np.repeat([False, True], [len(films), sum(test_sizes)]),
        "history": np.repeat(
            np.arange(len(user) + len(viewers), dtype=np.int32), [*[group] * len(user), *test_sizes]
        ),
        "histories": np.concatenate([histories, first[viewers, :HISTORY]]),
    }


def _negatives(user: Ints, item: Ints, known: Ints, key: int) -> Ints:
    """For each training choice, films drawn among those that its viewer did not choose in training."""
    chosen = np.zeros((int(user.max()) + 1, int(known.max()) + 1), dtype=bool)
    chosen[user, item] = True
    if (chosen.sum(1) == len(known)).any():
        raise ApieceError(
            "a viewer chose every film there is: there is no film left that they did not choose"
        )
    draw = generator(random.fold(key, "train negatives"))
    films = known[draw.integers(len(known), size=(len(user), TRAIN_NEGATIVES))]
    while len(again := np.argwhere(chosen[user[:, None], films])):
        films[tuple(again.T)] = known[draw.integers(len(known), size=len(again))]
    return films
