import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from apiece import Recipe, tree
from apiece.choice import fitting
from apiece.engines.base import WASTE, Call, Known, Member, Program, ceiling, client_phase, cut, recurring
from apiece.engines.capture import Captured, stairs
from apiece.engines.narrowing import computed
from apiece.engines.sequential import Sequential
from apiece.engines.vectorized import Vectorized
from apiece.evaluate import evaluate
from apiece.method import STACK, Stacked
from apiece.methods.fedavg import FedAvg
from apiece.methods.scaffold import Scaffold
from apiece.tree import Tree
from tests.broken import UpdateOf
from tests.worlds import CPU, federation, servers

RECIPE = Recipe(batch_size=4, epochs=2, steps=0)


@given(st.lists(st.integers(0, 60), min_size=1, max_size=40), st.integers(1, 9))
def test_chunks_part_the_cohort_with_bounded_waste(sizes: list[int], limit: int) -> None:
    chunks = cut(sizes, RECIPE, limit)
    assert sorted(i for chunk in chunks for i in chunk) == list(range(len(sizes)))
    for chunk in chunks:
        batches = [max(1, math.ceil(sizes[i] / 4)) for i in chunk]
        assert len(chunk) <= limit
        assert max(batches) * len(chunk) <= WASTE * sum(batches)


@given(st.lists(st.integers(0, 2000), min_size=1, max_size=90), st.integers(1, 80))
def test_rounded_up_chunks_waste_no_more(sizes: list[int], limit: int) -> None:
    chunks = cut(sizes, RECIPE, limit, 12.0, ceiling)
    assert sorted(i for chunk in chunks for i in chunk) == list(range(len(sizes)))
    for chunk in chunks:
        batches = [max(1, math.ceil(sizes[i] / 4)) for i in chunk]
        assert len(chunk) <= limit
        assert ceiling(max(batches)) * ceiling(len(chunk)) <= WASTE * sum(batches)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=12), st.floats(0, 20), st.integers(1, 12))
def test_no_way_to_cut_is_cheaper(steps: list[int], overhead: float, limit: int) -> None:
    """Of all ways to end chunks where the work, in three digits, changes, or at the limit: each is tried."""
    longest_first = sorted(steps, reverse=True)

    def cost(chunk: list[int]) -> float:
        return chunk[0] * (len(chunk) + overhead)

    def ways(rest: list[int]) -> Iterator[float]:
        if not rest:
            yield 0.0
        for end in range(1, min(limit, len(rest)) + 1):
            chunk, after = rest[:end], rest[end:]
            between = not after or end == limit or ceiling(after[0]) != ceiling(chunk[-1])
            if between and chunk[0] * end <= WASTE * sum(chunk):
                yield from (cost(chunk) + more for more in ways(after))

    found = cut(steps, Recipe(batch_size=1, epochs=1, steps=0), limit, overhead)
    taken = sum(cost([steps[i] for i in chunk]) for chunk in found)
    assert math.isclose(taken, min(ways(longest_first)), rel_tol=1e-9)


def test_clients_that_rounding_would_make_dear_are_parted() -> None:
    """33 of 129 batches would be computed as 40 of 160, 1.503 times their work; 32 are not rounded."""
    sizes = [4 * 129] * 33
    assert [len(chunk) for chunk in cut(sizes, RECIPE, 64, 12.0, ceiling)] == [32, 1]
    assert [len(chunk) for chunk in cut(sizes + [1] * 7, RECIPE, 64, 12.0, ceiling)] == [32, 1, 7]


@given(st.lists(st.integers(0, 300), min_size=1, max_size=90), st.integers(1, 70))
def test_what_a_gpu_computes_stays_within_the_limit(sizes: list[int], limit: int) -> None:
    """Nobody's rows count, too: memory was tried for so many clients and no more."""
    engine = Captured.__new__(Captured)
    engine.limit = limit
    for chunk in engine.cut(sizes, RECIPE):
        assert ceiling(len(chunk)) <= limit


@given(st.lists(st.integers(0, 300), min_size=1, max_size=90), st.integers(8, 70))
def test_what_a_gpu_computes_is_at_most_one_and_a_half_times_the_work(sizes: list[int], limit: int) -> None:
    engine = Captured.__new__(Captured)
    engine.limit = limit
    for chunk in engine.cut(sizes, RECIPE):
        batches = sorted((max(1, math.ceil(sizes[i] / 4)) for i in chunk), reverse=True)
        taken = [batches] if recurring(sizes) else [stairs(batches)]
        assert sum(map(computed, taken)) <= WASTE * sum(batches)


@given(st.lists(st.integers(0, 300), min_size=1, max_size=90), st.integers(1, 20))
def test_bounds_of_what_is_recorded(sizes: list[int], unit: int) -> None:
    """No client has more batches than his bound, and nobody more than who stands before."""
    sizes.sort(reverse=True)
    bounds = stairs(sizes, unit)
    assert len(bounds) == ceiling(len(sizes))
    assert bounds == sorted(bounds, reverse=True)
    assert all(math.ceil(size / unit) <= bound // unit for size, bound in zip(sizes, bounds, strict=False))


def test_bounds_by_hand() -> None:
    """Of ten clients, one of them nobody, eighths begin at 0, 1, 2, 3, 5, 6, 7 and 8: at 10, 9, 9, 8, 6, 5, 4
    and 3 batches. A line from 10 towards a quarter of it falls by 0.9375: 10, 9.06, 8.13, 7.19, 6.25, …"""
    assert stairs([10, 9, 9, 8, 8, 6, 5, 4, 3]) == [10, 10, 9, 8, 8, 7, 6, 5, 4, 4]
    assert stairs([10, 9, 9, 8, 8, 6, 5, 4, 3], 7) == [7 * n for n in stairs([2, 2, 2, 2, 2, 1, 1, 1, 1])]
    assert stairs([5] * 9) == [5] * 10


def test_recordings_are_few() -> None:
    """Of 16 clients, of whom the longest has 40 batches, five: one for each slope."""
    draw = np.random.default_rng(0)
    met = set()
    for _ in range(300):
        rest = sorted((40 * draw.random(15) ** draw.choice([0.1, 0.5, 1, 3, 9])).astype(int), reverse=True)
        met.add(tuple(stairs([40, *map(int, rest)])))
    assert len(met) == 5


@given(st.lists(st.integers(0, 60), min_size=1, max_size=20))
def test_what_is_known_of_sizes(sizes: list[int]) -> None:
    """In whatever order: nobody has more, and nobody later may have more than one before."""
    known = Known.of(sizes, False, RECIPE).most
    assert all(size <= most for size, most in zip(sizes, known, strict=True))
    assert list(known) == sorted(known, reverse=True)
    assert set(known) <= set(sizes)
    assert Known.of(sizes, False, RECIPE._replace(steps=3)).most == ()  # a batch is everybody's


def test_one_client_does_not_tell_that_its_shapes_come_again() -> None:
    assert recurring([7, 7])
    assert not recurring([7, 8])
    assert not recurring([7])


def test_shorter_clients_take_the_places_of_nobody() -> None:
    """9 clients of 20 batches would be computed as 10: one of the three with 4 goes along."""
    sizes = [80] * 9 + [16] * 3
    assert [len(chunk) for chunk in cut(sizes, RECIPE, 64)] == [9, 3]
    assert [len(chunk) for chunk in cut(sizes, RECIPE, 64, 0.0, ceiling)] == [10, 2]


def test_programs_know_whether_their_shapes_recur() -> None:
    """They do where everybody has as many examples, to train and, in an evaluation, to be scored by."""

    class Watching(Vectorized):
        def answers(self, calls: Iterable[Call]) -> Iterator[Tree]:
            given = list(calls)
            seen.extend(call.program.recurs for call in given)
            return super().answers(given)

    for sizes, expected in (((6, 6, 6), True), ((6, 5, 6), False)):
        seen: list[bool] = []
        engine = Watching(CPU, 64)
        training, server = federation(FedAvg(), engine, sizes, 3)
        list(servers(training, server, 1))
        evaluate(engine, training.federation, training.broadcast(server, 1), range(3), 1)
        assert seen
        assert set(seen) == {expected}


def test_even_cohorts_are_one_chunk() -> None:
    assert cut([8, 7, 5, 8], RECIPE, 64) == [[0, 1, 2, 3]]
    assert cut([100, 1, 1, 1], RECIPE._replace(steps=3), 64) == [[0, 1, 2, 3]]
    assert cut([100, 1], RECIPE, 64) == [[0], [1]]


def test_engines_agree_with_dropout_on_ragged_clients_over_many_rounds() -> None:
    """Ten rounds, clients of 0 to 40 examples, chunks of three: 1e-5 of the largest entry of each tensor."""
    method = FedAvg(local=Recipe(lr=0.1, batch_size=4, epochs=3))
    sizes = (0, 1, 2, 5, 9, 17, 40, 8)
    runs = []
    for engine in (Sequential(CPU), Vectorized(CPU, 3), Vectorized(CPU, 64)):
        training, server = federation(method, engine, sizes, 6)
        runs.append(list(servers(training, server, 10)))
    for one, few, many in zip(*runs, strict=True):
        for name, p in one.params.items():
            for other in (few, many):
                assert (other.params[name] - p).abs().max() <= 1e-5 * p.abs().max()


def test_stack_hands_over_every_reply_in_the_order_of_ids() -> None:
    """Each client sends its size; weights are the sizes too."""
    sizes = (5, 30, 0, 12)
    for engine in (Sequential(CPU), Vectorized(CPU, 2)):
        training, server = federation(UpdateOf(STACK), engine, sizes, 4)
        round = training.round(0)
        cohort = training.sampler(training.federation.data, round)
        member = Member(training.federation, training.broadcast(server, 0), cohort, round)
        (outcome,) = client_phase(engine, member)
        assert isinstance(outcome.update, Stacked)
        assert outcome.update.updates.tolist() == [5.0, 30.0, 0.0, 12.0]
        assert outcome.update.weights.tolist() == [5.0, 30.0, 0.0, 12.0]


def test_mean_is_weighted() -> None:
    """(5·5 + 30·30 + 0·0 + 12·12) / 47."""
    for engine in (Sequential(CPU), Vectorized(CPU, 2)):
        training, server = federation(UpdateOf(), engine, (5, 30, 0, 12), 4)
        (after,) = servers(training, server, 1)
        assert math.isclose(float(after.params["total"]), (25 + 900 + 144) / 47, rel_tol=1e-6)


def test_a_reply_that_is_not_finite_counts_nothing() -> None:
    """Client 1 (30 examples) answers NaN: (25 + 144) / 17 is left, and three replies."""
    for engine in (Sequential(CPU), Vectorized(CPU, 8)):
        training, server = federation(UpdateOf(bad_size=30), engine, (5, 30, 0, 12), 4)
        with torch.no_grad():
            (closed,) = training.rounds(server, 0, 1)
        assert closed.finite.tolist() == [True, False, True, True]
        assert int(closed.round.replies) == 3
        assert math.isclose(float(closed.server.params["total"]), 169 / 17, rel_tol=1e-6)


def test_a_reply_that_is_not_finite_is_told_of_where_it_weighs_nothing() -> None:
    """Client 2 has no examples: 0 · NaN is what its part of the mean would be."""
    for engine in (Sequential(CPU), Vectorized(CPU, 8)):
        training, server = federation(UpdateOf(bad_size=0), engine, (5, 30, 0, 12), 4)
        with torch.no_grad():
            (closed,) = training.rounds(server, 0, 1)
        assert closed.finite.tolist() == [True, True, False, True]
        assert math.isclose(float(closed.server.params["total"]), (25 + 900 + 144) / 47, rel_tol=1e-6)


def test_no_weight_at_all_leaves_the_server_as_it_was() -> None:
    training, server = federation(UpdateOf(), Vectorized(CPU, 8), (0, 0), 2)
    (after,) = servers(training, server, 1)
    assert float(after.params["total"]) == 0.0
    assert not math.isnan(float(after.params["total"]))


def test_errors_name_round_and_clients() -> None:
    training, server = federation(UpdateOf(), Sequential(CPU), (3, 4), 2)
    raising = replace(training, federation=replace(training.federation, method=UpdateOf(raises=True)))
    with pytest.raises(RuntimeError) as caught:
        list(raising.rounds(server, 0, 1))
    assert caught.value.__notes__ == ["in client_update of UpdateOf, round 0, clients [0]"]


def test_ceilings_are_few_and_near() -> None:
    assert [ceiling(n) for n in range(1, 18)] == [1, 2, 3, 4, 5, 6, 7, 8, 10, 10, 12, 12, 14, 14, 16, 16, 20]
    for n in range(1, 3000):
        assert n <= ceiling(n) <= 1.25 * n


def test_an_overhead_joins_chunks_that_padding_would_part() -> None:
    """16 clients of 10 batches and 16 of 8. Apart: 10·16 + 8·16 = 288 and 18 overheads; joined 320 and 10."""
    sizes = [40] * 16 + [32] * 16
    assert [len(chunk) for chunk in cut(sizes, RECIPE, 64, overhead=3.9)] == [16, 16]
    assert [len(chunk) for chunk in cut(sizes, RECIPE, 64, overhead=4.1)] == [32]


def test_whole_shards_are_cut_by_their_examples() -> None:
    """One batch each, but of 100 examples and of 2."""
    recipe = RECIPE._replace(batch_size=0)
    assert cut([100, 2, 90, 2], recipe, 64, overhead=1.0) == [[0, 2], [1, 3]]


class Small(Vectorized):
    """A device that has room for three clients at once."""

    def each(self, program: Program, shared: Tree, clients: tuple[Tree, ...]) -> Tree:
        if tree.leaves(clients)[0].shape[0] > 3:
            raise torch.OutOfMemoryError("no room")
        return super().each(program, shared, clients)


@pytest.mark.parametrize(("asked", "found"), [(2, 2), (3, 3), (4, 2), (6, 3), (64, 2)])
def test_chunks_are_halved_until_they_fit(asked: int, found: int) -> None:
    """64 → 32 → 16 → 8 → 4 → 2, as there are six clients; and nothing is left of the trial."""
    training, server = federation(Scaffold(), Vectorized(CPU, 64), (5, 9, 9, 9, 9, 9), 2)
    with torch.no_grad():
        assert fitting(training, server, asked, lambda clients: Small(CPU, clients)) == found
    assert not training.federation.store.known(range(6)).any()
