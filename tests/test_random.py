import math

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.func import vmap

from apiece import random

ints = st.integers(-(2**63), 2**63 - 1)


def splitmix64(state: int) -> int:
    """Steele, Lea, Flood 2014, as their reference prints it."""
    mask = (1 << 64) - 1
    z = (state + 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def test_the_published_first_output_of_splitmix64() -> None:
    assert splitmix64(0) == 0xE220A8397B1DCDAF
    assert random.fold(0) == 0  # nothing folded, nothing mixed


@given(ints, ints)
def test_fold_is_mix_of_key_xor_mix_of_data(key: int, data: int) -> None:
    mask = (1 << 64) - 1
    assert random.fold(key, data) & mask == splitmix64((key & mask) ^ splitmix64(data & mask))


@given(ints, st.lists(ints | st.text(max_size=5), max_size=3))
def test_host_and_tensor_keys_agree(key: int, path: list[int | str]) -> None:
    on_host = random.fold(key, *path)
    tensors = [torch.tensor(p) if isinstance(p, int) else p for p in path]
    assert int(random.fold(random.as_key(key), *tensors)) == on_host
    assert int(random.fold(random.as_key(key), *path)) == on_host


@given(ints, st.integers(0, 30), st.integers(0, 30))
def test_rows_do_not_depend_on_how_many_are_drawn(key: int, n: int, more: int) -> None:
    few, many = (random.bits(random.as_key(key), (rows, 3)) for rows in (n, n + more))
    assert torch.equal(few, many[:n])


def test_draws_are_the_same_under_vmap() -> None:
    keys = torch.arange(5)
    together = vmap(lambda k: random.uniform(k, (7,)))(keys)
    assert torch.equal(together, torch.stack([random.uniform(k, (7,)) for k in keys]))


def test_uniform_is_uniform() -> None:
    draws = random.uniform(random.as_key(3), (100_000,))
    assert float(draws.min()) >= 0.0
    assert float(draws.max()) < 1.0
    # Standard errors: mean 0.289/√n = 0.0009, each decile 0.3/√n = 0.001; five of them.
    assert abs(float(draws.mean()) - 0.5) < 0.005
    assert all(abs(float((draws < d / 10).float().mean()) - d / 10) < 0.005 for d in range(1, 10))


def test_neighbouring_keys_are_unrelated() -> None:
    a, b = (random.uniform(random.as_key(k), (10_000,)) - 0.5 for k in (0, 1))
    assert abs(float((a * b).mean()) * 12) < 5 / math.sqrt(10_000)


@given(ints, st.integers(0, 60), st.integers(0, 60))
def test_choose_gives_that_many_different_sorted_members(key: int, a: int, b: int) -> None:
    count, population = min(a, b), max(a, b)
    chosen = random.choose(key, count, population)
    assert chosen == sorted(set(chosen))
    assert len(chosen) == count
    assert all(0 <= i < population for i in chosen)


def test_choose_is_fair() -> None:
    """4000 cohorts of 3 out of 10: each client 1200 times, standard deviation √(4000·0.3·0.7) = 29."""
    counts = torch.zeros(10)
    for key in range(4000):
        for i in random.choose(key, 3, 10):
            counts[i] += 1
    assert (counts - 1200).abs().max() < 5 * 29


def test_choose_costs_the_cohort_not_the_population() -> None:
    assert len(random.choose(1, 10, 10**15)) == 10


@given(st.integers(-(2**63), 2**63 - 1), st.lists(st.integers(0, 2**62), min_size=1, max_size=9))
def test_many_numbers_are_folded_as_each_is(key: int, numbers: list[int]) -> None:
    assert random.fold_all(key, numbers).tolist() == [random.fold(key, number) for number in numbers]
