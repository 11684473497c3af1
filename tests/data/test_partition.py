from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from apiece.data.federated import Examples
from apiece.data.partition import deal
from apiece.errors import ApieceError

quick = settings(max_examples=60, deadline=None)
labels = st.lists(st.integers(0, 5), min_size=1, max_size=80)
keys = st.integers(-(2**63), 2**63 - 1)


def examples(y, client=None, client_names=None) -> Examples:
    y = np.asarray(y, dtype=np.int64)
    classes = int(y.max()) + 1
    return Examples(np.zeros((len(y), 1)), y, classes, tuple(map(str, range(classes))), client, client_names)


def same(a, b) -> bool:
    return all(np.array_equal(p, q) for p, q in zip(a, b, strict=True))


def assert_partition(parts, n: int) -> None:
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(n))
    assert all(np.array_equal(part, np.sort(part)) for part in parts)


def can_deal_classes(y, clients: int, k: int) -> bool:
    present = len(set(y))
    return k <= present <= clients * k


@quick
@given(labels, st.data(), keys)
def test_every_row_goes_to_exactly_one_client_and_the_deal_is_a_function_of_the_key(y, data, key):
    clients = data.draw(st.integers(1, len(y)))
    for spec in ("iid", "dirichlet:0.3:0", "classes:2", "classes:1", "power:1.5", "power:1.5:0:0"):
        if spec.startswith("classes") and not can_deal_classes(y, clients, int(spec[-1])):
            continue
        parts, names = deal(spec, examples(y), clients, key)
        assert names == [str(i) for i in range(clients)]
        assert len(parts) == clients
        assert_partition(parts, len(y))
        again, _ = deal(spec, replace(examples(y), x=None), clients, key)
        assert same(parts, again)


@pytest.mark.parametrize("spec", ["iid", "dirichlet:1", "classes:2", "pieces:2", "power:1"])
def test_another_key_deals_otherwise(spec):
    data = examples(np.arange(200) % 4)
    assert not same(deal(spec, data, 10, 0)[0], deal(spec, data, 10, 1)[0])


@pytest.mark.parametrize("spec", ["iid", "dirichlet:1", "classes:2", "power:1"])
def test_global_random_state_is_neither_read_nor_moved(spec):
    data = examples(np.arange(200) % 4)
    np.random.seed(1)
    before = np.random.get_state()[1].copy()
    first, _ = deal(spec, data, 10, 0)
    assert np.array_equal(before, np.random.get_state()[1])
    np.random.seed(2)
    assert same(first, deal(spec, data, 10, 0)[0])


@quick
@given(st.integers(1, 200), st.data(), keys)
def test_iid_sizes_are_equal_up_to_one(n, data, key):
    clients = data.draw(st.integers(1, n))
    sizes = [len(part) for part in deal("iid", examples(np.zeros(n)), clients, key)[0]]
    # n = q * clients + r: r clients of q + 1 and the others of q
    q, r = divmod(n, clients)
    assert Counter(sizes) == Counter([q + 1] * r + [q] * (clients - r))


def test_iid_mixes_the_rows():
    """Sorted labels, 10 clients of 100 rows: a client without label 0 has probability 2^-100."""
    y = np.repeat([0, 1], 500)
    for part in deal("iid", examples(y), 10, 3)[0]:
        assert set(y[part]) == {0, 1}


def test_dirichlet_of_a_large_alpha_gives_equal_shares():
    """Shares tend to 1/5 (deviation about 1e-4 at alpha 1e7), so of 50 rows each gets 10, cuts rounded."""
    y = np.repeat([0, 1, 2], 50)
    for part in deal("dirichlet:1e7", examples(y), 5, 0)[0]:
        assert Counter(y[part]) == {0: 10, 1: 10, 2: 10}


@quick
@given(keys)
def test_dirichlet_of_a_tiny_alpha_gives_each_class_to_one_client(key):
    y = np.repeat([0, 1, 2], 50)
    parts, _ = deal("dirichlet:1e-9:0", examples(y), 7, key)
    for label in range(3):
        assert sorted(np.count_nonzero(y[part] == label) for part in parts) == [0] * 6 + [50]


def test_dirichlet_shares_have_the_variance_of_the_distribution():
    """Dirichlet(α, ..., α) over N: var of a share = (1/N)(1 - 1/N) / (Nα + 1); N = 10, α = 0.5: 0.015."""
    y = np.repeat(np.arange(400), 1000)
    parts, _ = deal("dirichlet:0.5:0", examples(y), 10, 0)
    shares = np.stack([np.bincount(y[part], minlength=400) for part in parts]) / 1000
    assert shares.mean() == pytest.approx(0.1)
    assert shares.var() == pytest.approx(0.015, rel=0.15)


@quick
@given(st.integers(0, 6), keys)
def test_dirichlet_gives_everyone_the_minimum(least, key):
    parts, _ = deal(f"dirichlet:1:{least}", examples(np.arange(200) % 5), 8, key)
    assert min(len(part) for part in parts) >= least


def test_dirichlet_asks_for_two_each_unless_told():
    """With 5 rows for 3 clients two each is impossible, with 6 it is found by redrawing."""
    with pytest.raises(ApieceError, match="5 examples cannot give 3 clients 2 each: lower MIN"):
        deal("dirichlet:1", examples([0] * 5), 3, 0)
    assert [len(part) for part in deal("dirichlet:10", examples([0] * 6), 3, 0)[0]] == [2, 2, 2]


def test_dirichlet_gives_up_with_advice():
    """Two classes go to two of 30 clients at this alpha: two rows each is out of reach."""
    data = examples(np.arange(100) % 2)
    with pytest.raises(ApieceError, match=r"lower MIN \(0 always works\), raise ALPHA"):
        deal("dirichlet:0.001:2", data, 30, 0)
    assert_partition(deal("dirichlet:0.001:0", data, 30, 0)[0], 100)


def test_classes_as_in_the_papers():
    """4 classes of 12, 6 clients of 2: 6 * 2 / 4 = 3 pieces of 4 a class; a client holds two such pieces."""
    y = np.repeat([0, 1, 2, 3], 12)
    parts, _ = deal("classes:2", examples(y), 6, 0)
    held = [Counter(y[part].tolist()) for part in parts]
    assert [sorted(count.values()) for count in held] == [[4, 4]] * 6
    assert Counter(label for count in held for label in count) == {0: 3, 1: 3, 2: 3, 3: 3}


def test_classes_that_do_not_divide():
    """3 classes of 10, 5 clients of 1: 5 pieces, so 2, 2 and 1: pieces of 5, 5, 5, 5 and 10."""
    y = np.arange(30) % 3
    parts, _ = deal("classes:1", examples(y), 5, 0)
    assert sorted(len(part) for part in parts) == [5, 5, 5, 5, 10]
    assert all(len(set(y[part])) == 1 for part in parts)


def test_the_odd_piece_comes_from_the_larger_class():
    """Sizes 4 and 9, 3 clients of 1: the class of 9 is cut in two, 5 and 4."""
    y = np.array([0] * 4 + [1] * 9)
    assert sorted(len(part) for part in deal("classes:1", examples(y), 3, 0)[0]) == [4, 4, 5]


@quick
@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.integers(1, 30), st.data(), keys)
def test_classes_are_equal_pieces_of_different_classes(sizes, clients, data, key):
    k = data.draw(st.integers(1, len(sizes)))
    assume(sum(sizes) >= clients)
    assume(clients * k >= len(sizes))
    y = np.repeat(np.arange(len(sizes)) * 2, sizes)  # labels with gaps
    parts, _ = deal(f"classes:{k}", examples(y), clients, key)
    held = np.stack([np.bincount(y[part], minlength=2 * len(sizes))[::2] for part in parts])
    assert held.sum(axis=0).tolist() == sizes
    assert held.sum(axis=1).min() >= 1
    for label, size in enumerate(sizes):
        pieces = held[:, label][held[:, label] > 0]
        assert pieces.max() - pieces.min() <= 1
        assert len(pieces) <= size
    distinct = (held > 0).sum(axis=1)
    if sum(min(size, clients) for size in sizes) >= clients * k:
        assert set(distinct) == {k}
    assert distinct.max() <= k
    if min(sizes) >= clients:
        holders = (held > 0).sum(axis=0)
        assert holders.max() - holders.min() <= 1


@quick
@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 6), st.integers(1, 30), keys)
def test_pieces_are_equal_and_may_be_of_one_class(classes, each, k, size, key):
    """Classes of `size` rows in `each` pieces or a row more; clients of k pieces, dealt out whole."""
    clients = classes * each
    assume(each * k <= size)
    parts, _ = deal(f"pieces:{k}", examples(np.arange(classes * size) % classes), clients, key)
    assert_partition(parts, classes * size)
    least = size // (each * k)
    for part in parts:
        held = Counter(part % classes).values()
        assert sum(held) in range(k * least, k * (least + 1) + 1)
        assert len(held) <= k


def test_pieces_repeat_as_often_as_chance_has_it():
    """20 pieces of each of ten classes: two pieces are of one class with probability 19/199, of 300 · 100."""
    data = examples(np.repeat(np.arange(10), 100))
    dealt = [deal("pieces:2", data, 100, key)[0] for key in range(300)]
    alone = sum(len(set(part // 100)) == 1 for parts in dealt for part in parts)
    assert abs(alone / 30_000 - 19 / 199) < 4 * (0.0955 * 0.9045 / 30_000) ** 0.5


def test_class_pairs_are_mixed():
    """50 draws among the 45 pairs of 10 classes: a fixed rotation would repeat 5 of them."""
    y = np.arange(1000) % 10
    parts, _ = deal("classes:2", examples(y), 50, 0)
    assert len({tuple(sorted(set(y[part]))) for part in parts}) > 15


@quick
@given(st.integers(1, 300), st.floats(0, 1e6), st.data(), keys)
def test_power_sizes_add_up_with_at_least_one_each(n, sigma, data, key):
    clients = data.draw(st.integers(1, n))
    sizes = [len(part) for part in deal(f"power:{sigma!r}", examples(np.zeros(n)), clients, key)[0]]
    assert sum(sizes) == n
    assert min(sizes) >= 1


def test_power_at_the_ends():
    """Sigma 0: equal up to one. A huge sigma: one client gets all but one row of each other."""
    data = examples(np.zeros(103))
    assert sorted(len(part) for part in deal("power:0", data, 10, 0)[0]) == [10] * 7 + [11] * 3
    assert sorted(len(part) for part in deal("power:1e5", data, 10, 0)[0]) == [1] * 9 + [94]


def test_power_sizes_are_lognormal():
    """The logarithms of lognormal(0, 1) draws have deviation 1, whatever the draws are divided by."""
    parts, _ = deal("power:1", examples(np.zeros(400_000)), 1000, 0)
    assert np.log([len(part) for part in parts]).std() == pytest.approx(1.0, abs=0.1)


def test_natural_clients_are_sorted_as_what_they_are():
    y = [0, 1, 0, 1]
    parts, names = deal("natural", examples(y, np.array([10, 2, 10, 3])), 0, 0)
    assert names == ["2", "3", "10"]
    assert [part.tolist() for part in parts] == [[1], [3], [0, 2]]
    assert deal("natural", examples(y, np.array(["10", "2", "10", "3"])), 0, 0)[1] == ["10", "2", "3"]


def test_natural_keeps_named_clients_without_rows():
    data = examples([0, 1, 1], np.array(["b", "b", "d"]), ("a", "b", "c", "d"))
    parts, names = deal("natural", data, 0, 0)
    assert names == ["a", "b", "c", "d"]
    assert [part.tolist() for part in parts] == [[], [0, 1], [], [2]]
    assert {part.dtype for part in parts} == {np.dtype(np.int64)}


@pytest.mark.parametrize(
    ("spec", "clients", "message"),
    [
        ("dirichelt:1", 2, "unknown partition 'dirichelt': did you mean 'dirichlet'"),
        ("", 2, "unknown partition ''"),
        ("iid:3", 2, "'iid:3' has a wrong number of parameters: write iid$"),
        ("natural:1:2", 2, r"'natural:1:2' has a wrong number of parameters: write natural\[:MOST\]$"),
        ("natural:0", 2, "MOST .* must be a whole number >= 1, got '0'"),
        ("power:1:2:3:4", 2, r"write power:SIGMA\[:K\[:FLOOR\]\]$"),
        ("power:1:5", 2, "5 classes per client are more than the 4 in the data"),
        ("power:1:1", 3, "3 clients with 1 of 4 classes each would leave classes undealt"),
        ("power:1:2:3", 4, "20 examples cannot give 4 clients 3 each: lower FLOOR"),
        ("power:1:2:2", 5, "20 examples of 4 classes cannot give 5 clients 2 of each of 2 classes"),
        ("lognormal:x:1:2", 2, "MEAN in partition 'lognormal:x:1:2' must be a number, got 'x'"),
        ("lognormal:1:1:2", 6, "cannot give 6 clients 2 of each of 2 classes"),
        ("uniform:2:3:2", 2, "LOW must not exceed HIGH: 3 rows of a class at least, 2 at most"),
        ("uniform:2:1:6", 2, "cannot give 2 clients 6 of each of 2 classes: ask for fewer"),
        ("cycle:2:3:2", 2, "LOW must not exceed HIGH"),
        ("cycle:2:1:3", 4, "20 examples of 4 classes cannot give 4 clients 3 of each of 2 classes"),
        ("cycle:5:1:1", 2, "cannot give 2 clients 1 of each of 5 classes"),
        ("dirichlet", 2, r"wrong number of parameters: write dirichlet:ALPHA\[:MIN\]"),
        ("dirichlet:1:2:3", 2, r"wrong number of parameters: write dirichlet:ALPHA\[:MIN\]"),
        ("classes", 2, "wrong number of parameters: write classes:K"),
        ("power", 2, "wrong number of parameters: write power:SIGMA"),
        ("dirichlet:much", 2, "ALPHA in partition 'dirichlet:much' must be a number >= 1e-09, got 'much'"),
        ("dirichlet:0", 2, "ALPHA .* got '0'"),
        ("dirichlet:nan", 2, "ALPHA .* got 'nan'"),
        ("dirichlet:inf", 2, "ALPHA .* got 'inf'"),
        ("dirichlet:1:1.5", 2, "MIN .* must be a whole number >= 0, got '1.5'"),
        ("dirichlet:1:-1", 2, "MIN .* got '-1'"),
        ("dirichlet:", 2, "ALPHA .* got ''"),
        ("classes:0", 2, "K .* must be a whole number >= 1, got '0'"),
        ("power:-1", 2, "SIGMA .* must be a number >= 0, got '-1'"),
        ("classes:5", 2, "asks for more classes than the 4 in the data"),
        ("classes:1", 3, "3 clients with 1 of 4 classes each would leave classes undealt"),
        ("natural", 2, "no clients of its own for 'natural': choose one of iid, dirichlet:ALPHA"),
        ("iid", 0, "at least 1 client, got 0"),
        ("classes:2", -3, "at least 1 client, got -3"),
        ("iid", 21, "20 examples cannot be dealt to 21 clients"),
        ("dirichlet:1:0", 21, "20 examples cannot be dealt to 21 clients"),
        ("power:1", 21, "20 examples cannot be dealt to 21 clients"),
    ],
)
def test_what_cannot_be_dealt_is_explained(spec, clients, message):
    with pytest.raises(ApieceError, match=message):
        deal(spec, examples(np.arange(20) % 4), clients, 0)


# --- The papers' splits ---------------------------------------------------------------------------------


def classes_of(parts, y) -> list[Counter]:
    return [Counter(y[part].tolist()) for part in parts]


def dealt_once(parts) -> bool:
    rows = np.concatenate(parts)
    return len(rows) == len(set(rows.tolist()))


@quick
@given(st.integers(4, 12), st.integers(1, 4), st.integers(0, 3), st.floats(0, 2), keys)
def test_power_with_classes_gives_each_a_floor_and_deals_all(clients, k, floor, sigma, key):
    """Of 4 classes of 40 rows, at most 12 clients × 3 rows are given away before the rest is shared."""
    y = np.arange(160) % 4
    parts, _ = deal(f"power:{sigma}:{k}:{floor}", examples(y), clients, key)
    assert_partition(parts, 160)
    for held in classes_of(parts, y):
        assert len(held) <= k
        assert floor == 0 or len(held) == k
        assert min(held.values(), default=0) >= floor


def test_power_with_classes_shares_in_proportion_to_lognormal_draws():
    """One class for all. Beyond the floor the logarithms of the sizes are normal with deviation σ = 1.

    The standard error of a deviation from 300 draws is 1/√600 = 0.04; that all add up shifts the logarithms.
    """
    parts, _ = deal("power:1:1:1", examples(np.zeros(1_000_300, int)), 300, 5)
    logs = np.log([len(part) - 1 for part in parts])
    assert abs(logs.std() - 1.0) < 0.15


def test_the_floor_without_classes():
    sizes = [len(part) for part in deal("power:3:0:7", examples(np.zeros(100, int)), 10, 0)[0]]
    assert sum(sizes) == 100
    assert min(sizes) == 7
    assert max(sizes) > 10


@quick
@given(st.integers(1, 10), st.integers(1, 4), st.integers(0, 30), st.floats(0, 1.5), keys)
def test_lognormal_sizes_are_equal_over_a_clients_classes_where_rows_suffice(clients, k, more, sigma, key):
    y = np.arange(4000) % 4
    parts, _ = deal(f"lognormal:2:{sigma}:{k}:{more}", examples(y), clients, key)
    assert dealt_once(parts)
    for held in classes_of(parts, y):
        assert len(held) == k
        assert min(held.values()) >= 2
        if sum(map(len, parts)) < 1000:  # no class was short
            assert len(set(held.values())) == 1
            assert held.total() >= k * (more // k)


def test_lognormal_sizes_follow_their_law():
    """σ = 0, so that every client has e^3 + 10 = 30.08 rows: 10 of each of 3 classes."""
    y = np.arange(3000) % 10
    parts, _ = deal("lognormal:3:0:3:10", examples(y), 30, 1)
    assert {tuple(sorted(held.values())) for held in classes_of(parts, y)} == {(10, 10, 10)}
    assert sorted(Counter(label for held in classes_of(parts, y) for label in held).values()) == [9] * 10


def test_a_class_too_small_for_its_clients_is_shared_out():
    """All 4 clients want e^4 // 2 = 27 of both classes; of the first there are 40, of the other 1000."""
    y = np.repeat([0, 1], [40, 1000])
    parts, _ = deal("lognormal:4:0:2", examples(y), 4, 0)
    assert dealt_once(parts)
    assert [dict(held) for held in classes_of(parts, y)] == [{0: 10, 1: 27}] * 4


@quick
@given(st.integers(1, 8), st.integers(1, 4), st.integers(1, 5), st.integers(0, 5), keys)
def test_uniform_gives_low_to_high_of_each_class(clients, k, low, more, key):
    y = np.arange(400) % 4
    parts, _ = deal(f"uniform:{k}:{low}:{low + more}", examples(y), clients, key)
    assert dealt_once(parts)
    for held in classes_of(parts, y):
        assert len(held) == k
        assert set(held.values()) <= set(range(low, low + more + 1))


def test_uniform_numbers_are_all_drawn():
    y = np.arange(4000) % 4
    parts, _ = deal("uniform:2:3:5", examples(y), 100, 0)
    assert {n for held in classes_of(parts, y) for n in held.values()} == {3, 4, 5}


@quick
@given(st.integers(1, 8), st.integers(1, 4), st.integers(1, 5), st.integers(0, 5), keys)
def test_cycle_deals_the_classes_in_turn(clients, k, low, more, key):
    y = np.arange(400) % 4
    parts, _ = deal(f"cycle:{k}:{low}:{low + more}", examples(y), clients, key)
    assert dealt_once(parts)
    turn = itertools.cycle(range(4))
    for held in classes_of(parts, y):
        assert set(held) == {next(turn) for _ in range(k)}
        assert set(held.values()) <= set(range(low, low + more + 1))


def test_natural_clients_may_be_capped():
    client = np.repeat([f"w{i}" for i in range(9)], 2)
    parts, names = deal("natural:4", examples(np.zeros(18, int), client), 0, 0)
    assert len(names) == 4
    assert names == sorted(set(names))
    assert all(set(client[part]) == {name} for part, name in zip(parts, names, strict=True))
    assert names != deal("natural:4", examples(np.zeros(18, int), client), 0, 1)[1]
    assert len(deal("natural:99", examples(np.zeros(18, int), client), 0, 0)[1]) == 9


def with_own_test(train, test) -> Examples:
    own = np.repeat([False, True], [len(train), len(test)])
    return replace(examples(np.concatenate([train, test])), test=own)


def test_own_test_examples_follow_the_classes_of_the_training_examples():
    """CIFAR-10 (100, 2) in small: 10 clients, 2 of 5 classes; pieces of 25 to train on and 5 to test on."""
    data = with_own_test(np.arange(500) % 5, np.arange(100) % 5)
    parts, _ = deal("classes:2", data, 10, 3, own_test=True)
    assert_partition(parts, 600)
    for part in parts:
        train, test = part[part < 500], part[part >= 500]
        assert sorted(Counter(data.y[train].tolist()).values()) == [25, 25]
        assert Counter(data.y[test].tolist()) == dict.fromkeys(set(data.y[train].tolist()), 5)


@quick
@given(
    st.sampled_from(
        ["iid", "dirichlet:0.3:0", "power:1:2:2", "lognormal:1:1:2", "uniform:2:1:4", "cycle:2:1:4"]
    ),
    keys,
)
def test_every_partition_deals_own_test_examples_in_proportion(spec, key):
    """A client's test examples of a class differ by less than one from its share of them, before rounding."""
    data = with_own_test(np.arange(300) % 3, np.arange(90) % 3)
    plain, _ = deal(spec, replace(examples(data.y[:300])), 12, key)
    parts, _ = deal(spec, data, 12, key, own_test=True)
    assert dealt_once(parts)
    for part, train in zip(parts, plain, strict=True):
        assert np.array_equal(part[part < 300], train)
        held = np.bincount(data.y[part[part >= 300]], minlength=3)
        assert (abs(held - np.bincount(data.y[train], minlength=3) * 30 / 100) < 1).all()


def test_own_test_examples_are_dealt_with_the_others_unless_asked_for():
    data = with_own_test(np.zeros(20, int), np.zeros(20, int))
    parts, _ = deal("iid", data, 2, 0)
    assert_partition(parts, 40)
    assert [int((part >= 20).sum()) for part in parts] != [10, 10]  # as it is with this key: they are mixed


def test_texts_are_of_one_class():
    texts = replace(examples(np.zeros(6, int)), y=np.arange(12).reshape(6, 2))
    assert [len(part) for part in deal("iid", texts, 3, 0)[0]] == [2, 2, 2]
    with pytest.raises(ApieceError, match="more classes than the 1 in the data"):
        deal("classes:2", texts, 3, 0)


@pytest.mark.parametrize("spec", ["power:2:2:5", "lognormal:4:1:3:5", "uniform:2:10:20", "cycle:2:10:20"])
def test_another_key_deals_the_papers_splits_otherwise(spec):
    data = examples(np.arange(9000) % 5)
    assert not same(deal(spec, data, 10, 0)[0], deal(spec, data, 10, 1)[0])
    assert same(deal(spec, data, 10, 0)[0], deal(spec, data, 10, 0)[0])
