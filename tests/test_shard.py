import math
from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.func import vmap

from apiece import Batch, Shard, random
from apiece.shard import Rows

PAD = 99  # the last row of the resident arrays: what padding points at
X = torch.arange(100, dtype=torch.float32)[:, None]
Y = torch.arange(100)

sizes = st.integers(0, 23)
batch_sizes = st.integers(0, 9)


def shard(size: int, padded_to: int | None = None, key: int = 5) -> Shard:
    """Rows 10, 11, … of a client of that size."""
    capacity = size if padded_to is None else padded_to
    index = torch.full((capacity,), PAD)
    index[:size] = torch.arange(10, 10 + size)
    rows = Rows(index, torch.tensor(size), random.as_key(key), random.as_key(77))
    return Shard(X, Y, rows, padded_to is None)


def real(batch: Batch) -> list[int]:
    return batch.y[batch.weight > 0].tolist()


def live(batches: list[Batch]) -> list[Batch]:
    return [b for b in batches if b.live is None or bool(b.live)]


@given(sizes, batch_sizes, st.integers(1, 3))
def test_every_epoch_sees_every_example_once(size: int, batch_size: int, epochs: int) -> None:
    batches = list(shard(size).batches(batch_size, epochs))
    per_pass = math.ceil(size / (batch_size or max(size, 1)))
    assert len(batches) == epochs * per_pass
    for e in range(epochs):
        seen = [y for b in batches[e * per_pass : (e + 1) * per_pass] for y in real(b)]
        assert sorted(seen) == list(range(10, 10 + size))


@given(sizes, st.integers(1, 9), st.integers(1, 3), st.integers(0, 20), st.integers(0, 7))
def test_padding_changes_nothing(size: int, batch_size: int, epochs: int, steps: int, extra: int) -> None:
    plain = list(shard(size).batches(batch_size, epochs, steps))
    padded = live(list(shard(size, padded_to=size + extra).batches(batch_size, epochs, steps)))
    assert len(plain) == len(padded)
    for a, b in zip(plain, padded, strict=True):
        assert real(a) == real(b)
        assert int(a.key) == int(b.key)


@given(sizes, st.integers(1, 9), st.integers(0, 20), st.integers(0, 7))
def test_a_batch_says_that_it_is_full_only_if_it_is(
    size: int, batch_size: int, steps: int, extra: int
) -> None:
    plain, padded = shard(size), shard(size, padded_to=size + extra)
    for batch in [*plain.batches(batch_size, 2, steps), plain.all(), *padded.batches(batch_size, 2, steps)]:
        assert not batch.full or (len(batch.weight) > 0 and bool((batch.weight == 1).all()))
    assert all(batch.full for batch in plain.batches(batch_size, 2, steps))
    assert plain.all().full == (size > 0)
    assert not any(batch.full for batch in padded.batches(batch_size, 2, steps))


@given(sizes, st.integers(1, 9), st.integers(1, 20))
def test_steps_walk_through_the_passes(size: int, batch_size: int, steps: int) -> None:
    """Step j is batch j mod B of pass j div B."""
    per_pass = math.ceil(size / batch_size)
    passes = math.ceil(steps / max(per_pass, 1))
    by_steps = list(shard(size).batches(batch_size, steps=steps))
    by_epochs = list(shard(size).batches(batch_size, epochs=passes))[:steps]
    assert [real(b) for b in by_steps] == [real(b) for b in by_epochs]
    assert len(by_steps) == (steps if size else 0)


@given(sizes, st.integers(0, 7), st.sampled_from([0.2, 0.5, 0.8]))
def test_split_parts_the_shard_in_two(size: int, extra: int, fraction: float) -> None:
    support, query = shard(size, padded_to=size + extra).split(fraction)
    one, two = real(support.all()), real(query.all())
    assert sorted(one + two) == list(range(10, 10 + size))
    assert len(one) == int(support.size) == math.ceil(round(size * fraction, 6))
    assert len(two) == int(query.size)


@given(sizes, st.integers(0, 7))
def test_split_is_the_same_in_every_round_and_padding(size: int, extra: int) -> None:
    one = [real(part.all()) for part in shard(size, key=1).split()]
    two = [real(part.all()) for part in shard(size, padded_to=size + extra, key=2).split()]
    assert one == two


@given(sizes, st.integers(0, 7), st.sampled_from([0.2, 0.5, 0.8]))
def test_parts_of_a_shard_are_no_larger_than_they_can_be(size: int, extra: int, fraction: float) -> None:
    """Nothing is computed for padding that no client of the chunk could fill; a full shard has full parts."""
    padded = shard(size, size + extra).split(fraction)
    for full, part in zip(shard(size).split(fraction), padded, strict=True):
        most = max(int(full.size), min(size, 1))
        assert len(full.all().y) == most
        assert len(part.all().y) <= max(math.ceil((size + extra) * max(fraction, 1 - fraction)), 1)
        assert (full.all().live is None) == (int(full.size) > 0)


@given(sizes, st.integers(0, 7), st.integers(2, 6))
def test_folds_hold_every_example_once(size: int, extra: int, count: int) -> None:
    """Position p of an order that lasts is in fold p mod count; rest and fold are the whole."""
    plain, padded = shard(size, key=1), shard(size, padded_to=size + extra, key=2)
    folds = []
    for (rest, fold), (same_rest, same) in zip(plain.folds(count), padded.folds(count), strict=True):
        assert real(fold.all()) == real(same.all())
        assert real(rest.all()) == real(same_rest.all())
        assert sorted(real(rest.all()) + real(fold.all())) == list(range(10, 10 + size))
        assert (int(rest.size), int(fold.size)) == (len(real(rest.all())), len(real(fold.all())))
        folds.append(real(fold.all()))
    assert sorted(y for fold in folds for y in fold) == list(range(10, 10 + size))
    assert [len(fold) for fold in folds] == [len(range(i, size, count)) for i in range(count)]


def test_orders_differ_between_epochs_and_rounds() -> None:
    first, second = (real(b) for b in shard(20).batches(20, epochs=2))
    (other,) = (real(b) for b in shard(20, key=6).batches(20))
    assert first != second
    assert first != other
    assert list(range(10, 30)) not in (first, second, other)


def test_at_another_key_the_examples_and_the_split_are_the_same() -> None:
    """The server's proxy draws its orders below its own key and the round's."""
    one, two, again = (shard(20).at(key) for key in (1, 2, 1))
    (first,), (second,), (third,) = ([real(b) for b in s.batches(20)] for s in (one, two, again))
    assert first == third != second
    assert sorted(first) == sorted(second) == list(range(10, 30))
    assert int(one.key) == random.fold(5, 1)
    assert [real(p.all()) for p in one.split()] == [real(p.all()) for p in shard(20).split()]


def test_batch_keys_are_those_of_epoch_and_batch() -> None:
    keys = [int(b.key) for b in shard(5).batches(2, epochs=2)]
    assert keys == [random.fold(5, e, b) for e in range(2) for b in range(3)]


def test_under_vmap_clients_keep_their_own_batches() -> None:
    sizes = [3, 7]
    rows = [shard(n, padded_to=7)._rows for n in sizes]
    stacked = Rows(*(torch.stack(leaves) for leaves in zip(*rows, strict=True)))

    def passes(rows: Rows) -> tuple[torch.Tensor, ...]:
        return tuple(torch.where(b.weight > 0, b.y, -1) for b in Shard(X, Y, rows, False).batches(2, steps=5))

    together = vmap(passes)(stacked)
    for i, n in enumerate(sizes):
        alone = [real(b) for b in shard(n).batches(2, steps=5)]
        assert [[y for y in step[i].tolist() if y >= 0] for step in together] == alone


def test_a_shard_can_hold_several_inputs() -> None:
    rows = shard(4)._rows
    batch = Shard({"a": X, "b": X * 2}, Y, rows, True).all()
    assert torch.equal(batch.x["b"], batch.x["a"] * 2)


@given(st.lists(sizes, min_size=1, max_size=6), st.integers(1, 9), st.floats(0.1, 0.9), st.integers(2, 4))
def test_whoever_has_a_batch_is_among_the_first(
    counts: list[int], batch_size: int, fraction: float, folds: int
) -> None:
    """Of a shard and of its parts, bounds known client by client: exactly, where they are the sizes."""
    counts = sorted(counts, reverse=True)
    chunk = [replace(shard(n, max(counts[0], 1)), _even=False, _most=tuple(counts)) for n in counts]

    def parts(whole: Shard) -> list[Shard]:
        return [whole, *whole.split(fraction), *(part for pair in whole.folds(folds) for part in pair)]

    for of_each in zip(*map(parts, chunk), strict=True):
        for batch in zip(*(part.batches(batch_size) for part in of_each), strict=True):
            having = [bool(mine.live) for mine in batch]
            assert {mine.first for mine in batch} == {sum(having)}
            assert having == sorted(having, reverse=True)
