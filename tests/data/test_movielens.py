from pathlib import Path

import numpy as np
import pytest

from apiece.data import movielens
from apiece.data.federated import Examples
from apiece.errors import ApieceError

FILMS = 200
CHOICES = {1: [7, 3, 9], 2: list(range(20, 80)), 5: [3, 150, FILMS]}  # the latest last
PROFILES = ["5::M::56::20::98765", "1::F::1::10::48067-12", "2::M::25::0::48067"]


def write_users(folder: Path, lines: list[str] = PROFILES) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "users.dat").write_text("\n".join(lines) + "\n", encoding="latin-1")
    return folder


def official(place: Path) -> Path:
    """Times grow along CHOICES; the lines do not follow them. Two more viewers chose the films from 90 on."""
    write_users(place / "ml-1m", [*PROFILES, "9::F::18::3::00000", "10::F::18::3::00000"])
    choices = CHOICES | {9: list(range(90, 146)), 10: list(range(146, FILMS + 1))}
    lines = [
        f"{user}::{film}::{1 + film % 5}::{978300000 + 60 * time}"
        for user, films in choices.items()
        for time, film in enumerate(films)
    ]
    shuffled = np.random.default_rng(0).permutation(lines)
    (place / "ml-1m" / "ratings.dat").write_text("\n".join(shuffled) + "\n", encoding="latin-1")
    return place


def compact(place: Path, latest: dict[int, int] | None = None) -> Path:
    """Viewers 1, 2 and 5; of viewer 1 the film held out is among its own negatives."""
    folder = write_users(place / "movielens1m")
    held_out = {user: films[-1] for user, films in CHOICES.items()} | (latest or {})
    pairs = [(user, film) for user, films in CHOICES.items() for film in films]
    negatives = np.zeros((5, 99), dtype=np.int32)
    for user, films in CHOICES.items():
        negatives[user - 1] = [film for film in range(1, FILMS + 1) if film not in films][:99]
    negatives[0, 4] = held_out[1]
    user, item = np.array(pairs, dtype=np.uint16).T
    np.savez(folder / "ratings.npz", user=user, item=item, rating=np.ones(len(user), dtype=np.uint8))
    np.savez(
        folder / "leave_latest_out.npz",
        latest_item=np.array([held_out.get(user, 0) for user in range(1, 6)], dtype=np.int32),
        timestamp=np.zeros(5, dtype=np.int64),
        negatives=negatives,
    )
    return place


FORMS = pytest.mark.parametrize("form", [official, compact])


def rows(examples: Examples, user: int, test: bool) -> np.ndarray:
    assert examples.test is not None
    return np.flatnonzero((examples.client == user) & (examples.test == test))


@FORMS
def test_the_latest_choice_is_held_out_and_the_others_are_trained_on(tmp_path, form):
    examples = movielens.load(form(tmp_path))
    for user, films in CHOICES.items():
        train, test = rows(examples, user, False), rows(examples, user, True)
        chosen = train[examples.y[train] == 1]
        assert sorted(examples.x["item"][chosen]) == sorted(films[:-1])
        assert examples.x["item"][test][examples.y[test] == 1].tolist() == films[-1:]
        assert len(train) == 5 * len(chosen)


@FORMS
def test_films_that_were_not_chosen(tmp_path, form):
    """In training films of the catalogue but the training choices, in the test films never chosen."""
    examples = movielens.load(form(tmp_path))
    catalogue = set(examples.x["item"][examples.y == 1].tolist())
    for user, films in CHOICES.items():
        train, test = rows(examples, user, False), rows(examples, user, True)
        drawn = set(examples.x["item"][train][examples.y[train] == 0].tolist())
        assert drawn <= catalogue - set(films[:-1])
        others = examples.x["item"][test][examples.y[test] == 0].tolist()
        assert len(set(others)) == len(others) >= 98
        assert not set(others) & set(films)


def test_a_held_out_film_may_be_drawn_in_training(tmp_path):
    """Else its absence among what was not chosen would tell it: viewer 2 draws 236 times of 115 films."""
    examples = movielens.load(official(tmp_path))
    train = rows(examples, 2, False)
    assert CHOICES[2][-1] in examples.x["item"][train][examples.y[train] == 0]


def test_four_films_follow_each_choice_and_share_its_history(tmp_path):
    examples = movielens.load(official(tmp_path))
    train = rows(examples, 2, False).reshape(-1, 5)
    assert (examples.y[train] == [1, 0, 0, 0, 0]).all()
    assert (examples.x["history"][train] == examples.x["history"][train[:, :1]]).all()


def test_the_history_are_the_latest_choices_but_the_one_in_question(tmp_path):
    examples = movielens.load(official(tmp_path))
    for user, films in CHOICES.items():
        before = films[-2::-1]  # the latest first, without the one held out
        train, test = rows(examples, user, False), rows(examples, user, True)
        for row in train[examples.y[train] == 1]:
            expected = [film for film in before if film != examples.x["item"][row]][:50]
            assert examples.x["history"][row].tolist() == expected + [0] * (50 - len(expected))
        for row in test:
            assert examples.x["history"][row].tolist() == before[:50] + [0] * (50 - len(before[:50]))


def test_a_drawn_history_holds_fifty_training_choices_but_the_one_in_question(tmp_path):
    examples = movielens.load(compact(tmp_path))
    for user, films in CHOICES.items():
        count = len(films) - 1
        train, test = rows(examples, user, False), rows(examples, user, True)
        for at in (*train, *test):
            history = [film for film in examples.x["history"][at].tolist() if film]
            assert len(history) == len(set(history)) == min(count - (at in train), 50)
            assert set(history) <= set(films[:-1]) - {examples.x["item"][at]}
        firsts = {tuple(examples.x["history"][at]) for at in train}
        assert len(firsts) == min(count, 51)  # the choices among the first 51 each leave a hole of their own


def test_the_candidates_given_are_taken_without_the_film_held_out(tmp_path):
    examples = movielens.load(compact(tmp_path))
    assert [len(rows(examples, user, True)) for user in (1, 2, 5)] == [99, 100, 100]
    given = [film for film in range(1, FILMS + 1) if film not in CHOICES[2]][:99]
    assert examples.x["item"][rows(examples, 2, True)].tolist() == [79, *given]


def test_of_two_choices_in_one_second_the_one_further_down_is_the_later(tmp_path):
    place = official(tmp_path)
    path = place / "ml-1m" / "ratings.dat"
    path.write_text(path.read_text() + "1::100::5::978300120\n1::101::5::978300120\n")
    examples = movielens.load(place)
    test = rows(examples, 1, True)
    assert examples.x["item"][test][examples.y[test] == 1].tolist() == [101]


@FORMS
def test_profiles(tmp_path, form):
    """Ages and genders by their place among those there are, zips in the order of their text."""
    examples = movielens.load(form(tmp_path))
    zips = sorted({line.split("::")[4] for line in PROFILES} | ({"00000"} if form is official else set()))
    expected = {
        1: ("F", 1, 10, zips.index("48067-12")),
        2: ("M", 25, 0, zips.index("48067")),
        5: ("M", 56, 20, zips.index("98765")),
    }
    for user, (gender, age, occupation, code) in expected.items():
        at = np.flatnonzero(examples.client == user)
        columns = [
            set(examples.x[name][at].tolist()) for name in ("user", "gender", "age", "occupation", "zip")
        ]
        ages = (1, 18, 25, 35, 45, 50, 56)
        assert columns == [{user}, {"FM".index(gender)}, {ages.index(age)}, {occupation}, {code}]


def test_arrays_are_small_and_no_bytes(tmp_path):
    """Bytes would be taken for pixels."""
    examples = movielens.load(compact(tmp_path))
    assert {array.dtype for array in examples.x.values()} == {np.dtype(np.int16)}
    assert (examples.classes, examples.y.dtype) == (2, np.dtype(np.int64))


@FORMS
def test_what_is_drawn_depends_on_the_key(tmp_path, form):
    place = form(tmp_path)
    one, same, other = (movielens.load(place, key) for key in (3, 3, 4))
    assert (one.x["item"] == same.x["item"]).all()
    assert (one.x["item"] != other.x["item"]).any()


def test_the_official_files_go_first(tmp_path):
    assert 9 in movielens.load(compact(official(tmp_path))).client


# What is wrong is told


def test_missing_files(tmp_path):
    write_users(tmp_path / "ml-1m")
    with pytest.raises(ApieceError, match=r"MovieLens-1M is not in the data folder .*grouplens"):
        movielens.load(tmp_path)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("ratings.dat", "1::2::3\n", "is no ratings.dat"),
        ("ratings.dat", "1::two::3::4\n", "is no ratings.dat"),
        ("ratings.dat", "1::4000::3::4\n", "films 1 to 3952"),
        ("ratings.dat", "6041::40::3::4\n", "users are 1 to 6040"),
        ("ratings.dat", "", "is no file of MovieLens-1M"),
        ("ratings.dat", "1::40::3::4\n1::41::3::5\n", "left only 0 films out"),
        ("users.dat", "1::F::1::10\n", "is no users.dat"),
        ("users.dat", "1::X::1::10::48067\n", "is no users.dat"),
        ("users.dat", "1::F::2::10::48067\n", "is no users.dat"),
        ("users.dat", "1::F::1::21::48067\n", "occupation 21 is not in 0 to 20"),
        ("users.dat", "1::F::1::-1::48067\n", "occupation -1 is not in 0 to 20"),
        ("users.dat", "1::F::1::10::48067\n", "does not list every viewer"),
    ],
)
def test_files_that_are_something_else(tmp_path, name, text, message):
    place = official(tmp_path)
    (place / "ml-1m" / name).write_text(text)
    with pytest.raises(ApieceError, match=message):
        movielens.load(place)


def test_compact_files_that_do_not_belong_together(tmp_path):
    with pytest.raises(ApieceError, match=r"leave_latest_out\.npz does not belong to"):
        movielens.load(compact(tmp_path, {2: 5}))


def test_a_compact_file_that_is_none(tmp_path):
    place = compact(tmp_path)
    (place / "movielens1m" / "ratings.npz").write_bytes(b"nothing")
    with pytest.raises(ApieceError, match=r"ratings\.npz cannot be read"):
        movielens.load(place)
