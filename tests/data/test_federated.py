from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from apiece import data as datasets
from apiece.data import Examples, federate, load, partition_table, prepare, toy
from apiece.data.federated import Ragged, generator
from apiece.errors import ApieceError
from apiece.experiment import Experiment
from apiece.prepare import fingerprint, load_data, loading_once


def examples(n: int) -> Examples:
    """Row i holds i + 1, so that the padding row of zeros is none of them."""
    x = np.arange(1, n + 1, dtype=np.float32)[:, None]
    return Examples(x, np.arange(n, dtype=np.int64) % 3, 3, ("a", "b", "c"))


def parts_of(sizes) -> list[np.ndarray]:
    return np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])


# --- Ragged ---------------------------------------------------------------------------------------------


def test_ragged_rows_of_clients():
    ragged = Ragged.of([np.array([5, 7]), np.array([], dtype=np.int64), np.array([1, 2, 3])])
    assert ragged.sizes.tolist() == [2, 0, 3]
    assert [ragged[i].tolist() for i in range(3)] == [[5, 7], [], [1, 2, 3]]
    assert ragged.take([2, 0])[0].tolist() == [1, 2, 3]
    assert ragged.padded([0, 1, 2], 9).tolist() == [[5, 7, 9], [9, 9, 9], [1, 2, 3]]
    assert ragged.rows.dtype == ragged.offsets.dtype == np.int64


def test_ragged_of_nobody():
    assert len(Ragged.of([]).sizes) == 0


# --- federate -------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 12), min_size=1, max_size=8).filter(any),
    st.floats(0, 0.99),
    st.floats(0, 0.99),
    st.integers(-(2**63), 2**63 - 1),
)
def test_train_and_test_share_out_each_clients_rows(sizes, test, unseen, key):
    assume(round(unseen * len(sizes)) < len(sizes))
    parts = parts_of(sizes)
    names = [f"c{i}" for i in range(len(sizes))]
    data = federate(examples(sum(sizes)), parts, names, key, test, unseen)
    assert data.population == len(sizes)
    assert data.names == tuple(names)
    assert np.count_nonzero(~data.seen) == round(unseen * len(sizes))
    for client, part in enumerate(parts):
        both = np.concatenate([data.train[client], data.test[client]])
        np.testing.assert_array_equal(np.sort(both), part)
        # one example is always left to train on
        assert len(data.test[client]) == min(round(test * len(part)), max(len(part) - 1, 0))


def test_arrays_end_with_a_row_of_padding():
    data = federate(examples(4), parts_of([2, 2]), ["p", "q"], 0)
    assert data.x.tolist() == [[1], [2], [3], [4], [0]]
    assert data.y.tolist() == [0, 1, 2, 0, 0]
    assert data.padding == 4
    assert data.y.dtype == torch.int64
    assert data.input_shape == (1,)
    assert data.label_names == ("a", "b", "c")


def test_inputs_may_be_a_tree():
    several = Examples({"u": np.ones((4, 2)), "v": np.ones(4)}, np.zeros(4, np.int64), 1, ("0",))
    data = federate(several, parts_of([4]), ["p"], 0)
    assert data.x["u"].shape == (5, 2)
    assert data.x["v"].tolist() == [1, 1, 1, 1, 0]


def test_shares_by_default():
    """A quarter of 8 rows is 2; a fifth of 10 clients is 2."""
    data = federate(examples(80), parts_of([8] * 10), list("abcdefghij"), 0)
    assert data.test.sizes.tolist() == [2] * 10
    assert len(data.seen_ids) == 8


def test_the_key_decides_the_split():
    def rows(key):
        data = federate(examples(80), parts_of([8] * 10), list("abcdefghij"), key)
        return data.test.rows.tolist(), data.seen.tolist()

    assert rows(1) == rows(1)
    assert rows(1)[0] != rows(2)[0]
    assert len({tuple(rows(key)[1]) for key in range(10)}) > 1


def test_a_clients_split_does_not_depend_on_the_others():
    alone = federate(examples(8), parts_of([8]), ["p"], 3)
    among = federate(examples(16), parts_of([8, 8]), ["p", "q"], 3)
    assert alone.test[0].tolist() == among.test[0].tolist()


def test_the_pool_holds_the_seen_clients_training_rows():
    data = federate(examples(40), parts_of([8] * 5), list("abcde"), 0, 0.25, 0.4)
    pool = data.pool()
    assert pool.population == 1
    assert pool.seen_ids.tolist() == [0]
    assert pool.names == ("pool",)
    assert pool.test.sizes.tolist() == [0]
    assert pool.train[0].tolist() == [row for i in data.seen_ids for row in data.train[i]]
    assert len(pool.train[0]) == 3 * 6


@pytest.mark.parametrize("share", [-0.1, 1.0, float("nan")])
def test_shares_lie_below_one(share):
    with pytest.raises(ApieceError, match="the test share must lie in"):
        federate(examples(4), parts_of([4]), ["p"], 0, test=share)


@pytest.mark.parametrize("unseen", [-0.1, 1.5, float("nan"), float("inf")])
def test_unseen_is_a_share_or_a_number_of_clients(unseen):
    with pytest.raises(ApieceError, match=r"unseen must be a share in \[0, 1\) or a whole number"):
        federate(examples(4), parts_of([4]), ["p"], 0, unseen=unseen)


def test_the_last_clients_may_be_the_unseen_ones():
    data = federate(examples(20), parts_of([4] * 5), list("pqrst"), 0, unseen=2, unseen_pick="last")
    assert data.seen.tolist() == [True, True, True, False, False]
    with pytest.raises(ApieceError, match="unknown unseen_pick 'first'"):
        federate(examples(4), parts_of([2, 2]), ["p", "q"], 0, unseen=1, unseen_pick="first")


@pytest.mark.parametrize(("unseen", "count"), [(0.0, 0), (0.5, 5), (1.0, 1), (9.0, 9)])
def test_unseen_clients_are_counted_from_one_on(unseen, count):
    data = federate(examples(80), parts_of([8] * 10), list("abcdefghij"), 0, unseen=unseen)
    assert len(data.unseen_ids) == count


def test_the_generator_takes_any_key():
    assert generator(-1).random() == generator(2**64 - 1).random()
    assert generator(-1).random() != generator(1).random()


# --- load and federated ---------------------------------------------------------------------------------


def test_every_dataset_is_described_and_loads(tmp_path):
    made, stored = {"digits", "synthetic", "population"}, toy.folder(tmp_path / "toy")
    assert made < set(datasets.DATASETS)
    for name in datasets.DATASETS:
        found = load(name, clients=2, key=0, data_dir=str(stored))
        assert len(found.y) > 0
        assert found.classes == len(found.label_names) > found.y.max()
        if name not in made:
            with pytest.raises(ApieceError, match=f"not in (the data folder )?{tmp_path}.*--data-dir"):
                load(name, clients=2, key=0, data_dir=str(tmp_path))


def test_parameters_stand_behind_the_name():
    settings = {"clients": 5, "key": 0}
    written = load("synthetic(0,0.5)", **settings)
    given = load("synthetic", options={"alpha": 0.0, "beta": 0.5}, **settings)
    assert np.array_equal(written.x, given.x)
    assert not np.array_equal(written.x, load("synthetic", **settings).x)
    assert np.bincount(load("synthetic", options={"most": 50}, **settings).client).tolist() == [50] * 5


def test_a_path_is_a_dataset(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "eve.csv").write_text("f,what\n1,0\n2,1\n")
    for name in ("mine", "./mine", str(tmp_path / "mine")):
        assert load(name, clients=0, key=0, label_column="what").client_names == ("eve",)
    (tmp_path / "digits").mkdir()
    assert len(load("digits", clients=0, key=0).y) == 1797


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("digit", {}, "unknown dataset 'digit': did you mean 'digits'"),
        ("synthetc(1,1)", {}, "unknown dataset 'synthetc': did you mean 'synthetic'"),
        ("", {}, "unknown dataset ''"),
        ("nowhere.csv", {}, r"no such file or folder: nowhere\.csv"),
        ("no/where", {}, "no such file or folder: no/where"),
        (
            "synthetic(1)",
            {},
            r"synthetic\(1\) has a wrong number of parameters: write synthetic\(alpha,beta\)",
        ),
        ("synthetic()", {}, r"synthetic\(\) has a wrong number of parameters"),
        ("digits(3)", {}, r"digits\(3\) has a wrong number of parameters: write digits$"),
        ("synthetic(a,b)", {}, r"synthetic\(a,b\): the parameters must be numbers"),
        ("synthetic(-1,0)", {}, "alpha of the synthetic data must be a number >= 0"),
        ("synthetic", {"mots": 3.0}, "unknown option of synthetic 'mots': did you mean 'most'"),
        ("digits", {"most": 3.0}, "unknown option of digits 'most'"),
        ("./mine.csv", {"most": 3.0}, r"\./mine\.csv takes no options, got most"),
    ],
)
def test_what_cannot_be_loaded_is_explained(name, options, message):
    with pytest.raises(ApieceError, match=message):
        load(name, clients=3, key=0, options=options)


def test_auto_keeps_natural_clients():
    data = prepare("synthetic", clients=7, key=0)
    by_client = np.bincount(load("synthetic", clients=7, key=0).client)
    assert (data.train.sizes + data.test.sizes).tolist() == by_client.tolist()


@pytest.mark.parametrize(("clients", "classes"), [(20, 4), (3, 4), (2, 5), (1, 10)])
def test_auto_deals_other_data_by_class(clients, classes):
    """Four classes each; two clients need five to hold the ten digits between them, one needs all."""
    data = prepare("digits", clients=clients, key=0, testers="unseen", unseen=0.0)
    y = data.y.numpy()
    assert {len(set(y[data.train[i]])) for i in range(clients)} == {classes}
    assert data.train.sizes.sum() == 1797


def test_a_partition_may_be_asked_for():
    data = prepare("digits", "classes:2", clients=20, key=0, test=0.05, unseen=0.5)
    y = data.y.numpy()
    assert {len(set(y[data.train[i]])) for i in range(20)} == {2}
    assert len(data.seen_ids) == 10


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"clients": 0}, "at least 1 client, got 0"),
        ({"clients": 5000}, "1797 examples cannot be dealt to 5000 clients"),
        ({"clients": 3, "unseen": 0.9}, "unseen = 0.9 leaves none of 3 clients to train with"),
        ({"clients": 3, "unseen": 3}, "unseen = 3 leaves none of 3 clients to train with"),
        ({"clients": 3, "test": 0.0}, "digits has no test examples of its own: give a share"),
        ({"clients": 3, "testers": "seen"}, "unknown testers 'seen'"),
        ({"clients": 3, "partition": "natural"}, "no clients of its own"),
    ],
)
def test_bad_federations_are_explained(settings, message):
    with pytest.raises(ApieceError, match=message):
        prepare("digits", key=0, **settings)


def test_the_partition_table_counts_what_is_held():
    """Labels are row mod 3; nothing is held out of two clients, the third has no rows."""
    data = federate(
        examples(5), [np.array([0, 1, 3]), np.array([2, 4]), np.array([], int)], list("pqr"), 0, 0.0, 0.0
    )
    assert partition_table(data) == [
        (0, "p", 1, "train", 0, 2),
        (0, "p", 1, "train", 1, 1),
        (1, "q", 1, "train", 1, 1),
        (1, "q", 1, "train", 2, 1),
    ]


def test_the_partition_table_tells_splits_and_unseen_clients_apart():
    data = federate(examples(40), parts_of([8] * 5), list("abcde"), 0, 0.25, 0.4)
    table = partition_table(data)
    for client in range(5):
        counts = {
            split: sum(row[5] for row in table if (row[0], row[3]) == (client, split))
            for split in ("train", "test")
        }
        assert counts == {"train": 6, "test": 2}
        assert {row[2] for row in table if row[0] == client} == {int(data.seen[client])}
    assert {row[3] for row in table} == {"train", "test"}


# --- proxy and classes ----------------------------------------------------------------------------------


@settings(deadline=None, max_examples=30)
@given(st.floats(0, 0.5), st.integers(0, 1000))
def test_the_proxy_is_taken_out_of_the_seen_clients_training_rows(share, key):
    parts = parts_of([40, 10, 30, 20])
    names = ["a", "b", "c", "d"]
    plain = federate(examples(100), parts, names, key, 0.2, 0.25)
    data = federate(examples(100), parts, names, key, 0.2, 0.25, proxy=share)
    theirs = {row for i in plain.seen_ids for row in plain.train[i].tolist()}
    assert len(data.proxy) == round(share * len(theirs))
    assert set(data.proxy.tolist()) <= theirs
    for i in range(4):
        assert data.train[i].tolist() == [
            row for row in plain.train[i] if row not in set(data.proxy.tolist())
        ]
        assert data.test[i].tolist() == plain.test[i].tolist()


def test_some_classes_of_a_dataset_keep_their_numbers():
    whole = load("digits", clients=1, key=0)
    some = load("digits[5-7, 9]", clients=1, key=0)
    assert set(some.y.tolist()) == {5, 6, 7, 9}
    assert some.classes == 10
    assert len(some.y) == sum((whole.y == c).sum() for c in (5, 6, 7, 9))
    np.testing.assert_array_equal(some.x, whole.x[np.isin(whole.y, [5, 6, 7, 9])])


@pytest.mark.parametrize("name", ["digits[12]", "digits[5-]", "digits[-]", "digits[,]"])
def test_classes_that_are_not_there_are_refused(name):
    with pytest.raises(ApieceError, match="classes"):
        load(name, clients=1, key=0)


# --- Who is tested, and on what -------------------------------------------------------------------------


def test_the_unseen_clients_alone_may_hold_examples_out():
    """Ten clients of 8: the four unseen ones hold two out, the others train on everything."""
    data = federate(examples(80), parts_of([8] * 10), list("abcdefghij"), 0, unseen=4, testers="unseen")
    assert data.train.sizes[data.seen_ids].tolist() == [8] * 6
    assert data.test.sizes[data.seen_ids].tolist() == [0] * 6
    assert data.train.sizes[data.unseen_ids].tolist() == [6] * 4
    assert data.test.sizes[data.unseen_ids].tolist() == [2] * 4
    all_ = federate(examples(80), parts_of([8] * 10), list("abcdefghij"), 0, unseen=4)
    for i in data.unseen_ids:
        assert data.test[i].tolist() == all_.test[i].tolist()


def test_own_test_examples_are_taken_at_share_zero():
    own = replace(examples(8), test=np.array([0, 0, 1, 0, 1, 1, 0, 0], dtype=bool))
    parts = [np.array([5, 0, 2, 1]), np.array([3, 4, 6, 7])]
    data = federate(own, parts, ["p", "q"], 0, test=0.0, unseen=0.0)
    assert [data.train[i].tolist() for i in range(2)] == [[0, 1], [3, 6, 7]]
    assert [data.test[i].tolist() for i in range(2)] == [[2, 5], [4]]
    shared = federate(own, parts, ["p", "q"], 0, test=0.5, unseen=0.0)
    plain = federate(examples(8), parts, ["p", "q"], 0, test=0.5, unseen=0.0)
    assert [shared.test[i].tolist() for i in range(2)] == [plain.test[i].tolist() for i in range(2)]
    unseen = federate(own, parts, ["p", "q"], 0, test=0.0, unseen=1, testers="unseen")
    (i,) = unseen.seen_ids
    assert unseen.train[i].tolist() == sorted(parts[i])


def test_bytes_stay_bytes():
    pixels = replace(examples(4), x=np.full((4, 1, 2, 2), 255, dtype=np.uint8))
    data = federate(pixels, parts_of([4]), ["p"], 0, unseen=0.0)
    assert data.x.dtype == torch.uint8
    assert data.x[:, 0, 0, 0].tolist() == [255] * 4 + [0]
    assert data.validation(0.5, 0).x.dtype == torch.uint8


def test_the_partition_table_counts_the_characters_of_texts():
    texts = Examples(np.zeros((2, 3)), np.array([[0, 2, 2], [1, 1, 1]]), 3, ("a", "b", "c"))
    data = federate(texts, parts_of([1, 1]), ["p", "q"], 0, test=0.25, unseen=0.0)
    assert partition_table(data) == [
        (0, "p", 1, "train", 0, 1),
        (0, "p", 1, "train", 2, 2),
        (1, "q", 1, "train", 1, 3),
    ]


def test_runs_of_the_same_data_load_it_once():
    first = Experiment(clients=8)
    with loading_once():
        kept = load_data(first)
        assert load_data(replace(first, method="reptile", seed=1)) is kept
        other = load_data(replace(first, partition_seed=1))
        assert other is not kept
        assert load_data(replace(first, partition_seed=1, rounds=3)) is other
        again = load_data(first)
        assert again is not kept, "the last one's alone is kept"
    assert load_data(first) is not again
    assert fingerprint(again) == fingerprint(kept) == fingerprint(other)


def test_a_copy_on_a_device_has_the_same_digest_and_other_examples_another():
    data = load_data(Experiment(clients=8))
    assert data.to(torch.device("cpu")).digest == data.digest
    assert replace(data, y=data.y.roll(1)).digest != data.digest
    assert replace(data, x=data.x + 1.0).digest != data.digest
