"""Steps narrowed to those who have a batch for them give the numbers of steps that all take, masked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import vmap

from apiece import Recipe, loop, tree
from apiece.batched import clients_of, physical
from apiece.engines.base import Known
from apiece.engines.narrowing import narrowing
from apiece.engines.vectorized import Vectorized
from apiece.local import looping
from apiece.methods.fedavg import FedAvg
from apiece.random import as_key
from apiece.shard import Batch, Rows, Shard
from apiece.train import together
from tests.worlds import CPU, federation, servers

WIDE = 3
Step = Callable[[Any, Batch], Any]
Made = Callable[[Tensor], tuple[Any, Step]]  # of a client's own tensor: the first carry, and a step


def shards(sizes: tuple[int, ...]) -> tuple[Tensor, Tensor, Rows]:
    """Rows of so many clients, padded to the largest of them by a last row of zeros."""
    x = torch.cat(
        [torch.from_numpy(np.random.default_rng(0).normal(size=(sum(sizes), WIDE))), torch.zeros(1, WIDE)]
    )
    place = torch.full((len(sizes), max(sizes)), len(x) - 1)
    for row, (begin, end) in zip(place, pairwise(np.cumsum((0, *sizes)).tolist()), strict=True):
        row[: end - begin] = torch.arange(begin, end)
    keys = torch.stack([as_key(k, CPU) for k in range(len(sizes))])
    return x, torch.zeros(len(x)), Rows(place, torch.tensor(sizes), keys, keys)


def trained(made: Made, sizes: tuple[int, ...], narrowed: bool) -> Any:
    x, y, rows = shards(sizes)

    def client(rows: Rows, own: Tensor) -> Any:
        carry, step = made(own)
        return loop(step, carry, Shard(x, y, rows, False, most).batches(2, epochs=2))

    most = Known.of(sizes, False, Recipe(batch_size=2)).most if narrowed else ()
    own = torch.arange(1.0, 1 + len(sizes) * WIDE, dtype=x.dtype).reshape(len(sizes), WIDE)
    with torch.no_grad(), looping(narrowing if narrowed else None):
        return vmap(client)(rows, own)


def reads_its_own(own: Tensor) -> tuple[Any, Step]:
    """By operators, methods and functions, alone and in a list."""

    def step(w: Tensor, batch: Batch) -> Tensor:
        both = torch.cat([own, w])
        return w * 0.9 + own.sin() * batch.x.sum(0) + torch.add(both[:WIDE], own, alpha=0.1)

    return torch.zeros(WIDE), step


def differentiates_its_carry(own: Tensor) -> tuple[Any, Step]:
    def step(w: Tensor, batch: Batch) -> Tensor:
        slope = torch.func.grad(lambda w: ((batch.x @ (w * own)) ** 2 * batch.weight).sum())(w)
        return w - 0.001 * slope

    return torch.ones(WIDE, dtype=own.dtype), step


def differentiates_its_own(own: Tensor) -> tuple[Any, Step]:
    """What it takes the gradient by never passes an operation on its way into it."""

    def step(total: Tensor, batch: Batch) -> Tensor:
        return total + torch.func.grad(lambda w: ((batch.x @ w) ** 2 * batch.weight).sum())(own)

    return torch.zeros(WIDE, dtype=own.dtype), step


def examples_under_a_vmap_of_their_own(own: Tensor) -> tuple[Any, Step]:
    def step(total: Tensor, batch: Batch) -> Tensor:
        return total + vmap(lambda x, real: (x * own).cos() * real)(batch.x, batch.weight).sum(0)

    return torch.zeros(WIDE, dtype=own.dtype), step


def features_under_a_vmap_of_their_own(own: Tensor) -> tuple[Any, Step]:
    """As many features as some chunks have clients: what is of all features stays so."""

    def step(w: Tensor, batch: Batch) -> Tensor:
        return w + vmap(lambda column, k: (column.sum() * own).cos() + k)(batch.x.T, w).sum(0)

    return torch.zeros(WIDE, dtype=own.dtype), step


def hands_on_what_it_was_given(own: Tensor) -> tuple[Any, Step]:
    """The last carry is the next one's second part: written over before it is read, it would be new."""

    def step(carry: tuple[Tensor, Tensor], batch: Batch) -> tuple[Tensor, Tensor]:
        w, before = carry
        return w + batch.x.sum(0) + 0.1 * before, w

    return (torch.zeros(WIDE, dtype=own.dtype), own), step


def begins_with_what_others_read(own: Tensor) -> tuple[Any, Step]:
    """The carry begins as the client's own tensor, which every step reads."""

    def step(w: Tensor, batch: Batch) -> Tensor:
        return w + batch.x.sum(0) - 0.5 * (w - own)

    return own, step


MADE = [
    reads_its_own,
    differentiates_its_carry,
    differentiates_its_own,
    examples_under_a_vmap_of_their_own,
    features_under_a_vmap_of_their_own,
    hands_on_what_it_was_given,
    begins_with_what_others_read,
]


@pytest.mark.parametrize(
    "sizes", [(9, 5, 4, 1, 0), (4, 3), (2, 9, 0, 5), (6, 6, 6), (9, 4, 2), (7,), (0, 0, 3)], ids=str
)
@pytest.mark.parametrize("made", MADE)
def test_the_same_numbers(made: Made, sizes: tuple[int, ...]) -> None:
    for a, b in zip(
        *(tree.tensors(trained(made, sizes, narrowed)) for narrowed in (True, False)), strict=True
    ):
        torch.testing.assert_close(a, b)


def test_what_does_not_fit_is_computed_masked() -> None:
    """By an index of the batch, into what a gradient is taken by: PyTorch finds that no RuntimeError."""

    def picks(own: Tensor) -> tuple[Any, Step]:
        def step(w: Tensor, batch: Batch) -> Tensor:
            column = (batch.x[:, 0] > 0).long()
            return w + torch.func.grad(lambda c: (c[column] ** 2 * batch.weight).sum())(own)

        return torch.zeros(WIDE, dtype=own.dtype), step

    ours, theirs = (trained(picks, (9, 4, 2), narrowed) for narrowed in (True, False))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("sizes", [(8, 4, 2), (9, 9, 3)], ids=str)
def test_examples_weighed_by_the_method(sizes: tuple[int, ...]) -> None:
    """A full batch whose weights are not all 1 is no plain mean."""
    x, y, rows = shards(sizes)

    def client(most: tuple[int, ...], rows: Rows) -> Tensor:
        def step(w: Tensor, batch: Batch) -> Tensor:
            weight = batch.weight.to(x.dtype)
            return w + (batch.x.mean(0) if batch.full else (weight @ batch.x) / weight.sum().clamp(min=1))

        batches = Shard(x, y, rows, False, most).batches(2, epochs=2)
        weighed = (b._replace(weight=b.weight * (1 + 2.0 * (b.x[:, 0] > 0)), full=False) for b in batches)
        return loop(step, torch.zeros(WIDE, dtype=x.dtype), weighed)

    with torch.no_grad():
        theirs = vmap(partial(client, ()))(rows)
        with looping(narrowing):
            ours = vmap(partial(client, Known.of(sizes, False, Recipe(batch_size=2)).most))(rows)
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("narrowed", [True, False])
def test_a_number_of_python_is_not_carried_on(narrowed: bool) -> None:
    """It would have to be another one for each client."""

    def counts(own: Tensor) -> tuple[Any, Step]:
        def step(carry: tuple[Tensor, int], batch: Batch) -> tuple[Tensor, int]:
            return carry[0] + batch.x.sum(0) / (1 + carry[1]), carry[1] + 1

        return (torch.zeros(WIDE, dtype=own.dtype), 0), step

    with pytest.raises(TypeError, match="a static leaf cannot"):
        trained(counts, (9, 5, 2), narrowed)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(0, 11), min_size=1, max_size=6).filter(any))
def test_the_same_numbers_whatever_the_sizes(sizes: list[int]) -> None:
    descending = tuple(sorted(sizes, reverse=True))
    ours, theirs = (trained(begins_with_what_others_read, descending, narrowed) for narrowed in (True, False))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("made", [made for made in MADE if made is not differentiates_its_own])
def test_whatever_a_step_does_it_is_narrowed(made: Made) -> None:
    """Sizes 9, 4, 2 in batches of 2: 5, 2 and 1 of them in a pass, and never one client alone."""
    seen: list[int | None] = []

    def watched(own: Tensor) -> tuple[Any, Step]:
        carry, step = made(own)

        def watching(carry: Any, batch: Batch) -> Any:
            seen.append(clients_of(batch.x))
            return step(carry, batch)

        return carry, watching

    trained(watched, (9, 4, 2), narrowed=True)
    assert seen == [3, 2, 2, 2, 2] * 2


def counting(seen: list[int]) -> Callable[[], nn.Module]:
    """Networks that note for how many clients at once they are computed."""

    class Watching(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            value, axis = physical(x)
            while axis is None and torch._C._functorch.is_gradtrackingtensor(value):
                value, axis = physical(torch._C._functorch.get_unwrapped(value))
            if axis is not None:  # shapes are worked out on one client
                seen.append(value.shape[axis])
            return super().forward(x)

    return lambda: Watching(5, 3)


METHOD = FedAvg(local=Recipe(lr=0.1, batch_size=4, epochs=1))


def test_nobody_is_computed_without_a_batch() -> None:
    """Sizes 20, 16, 16, 12 in batches of 4: of five steps three are for all, the fourth for three clients;
    that for the largest alone is computed for two."""
    seen: list[int] = []
    training, server = federation(METHOD, Vectorized(CPU, 64), (16, 12, 20, 16), 4, counting(seen))
    list(servers(training, server, 1))
    assert seen == [4, 4, 4, 3, 2]


def test_replicas_go_together_by_their_steps() -> None:
    """Twice the same sizes: the longest of both are the chunk's first."""
    seen: list[int] = []
    training, server = federation(METHOD, Vectorized(CPU, 64), (16, 12, 20, 16), 4, counting(seen))
    other = replace(training, federation=replace(training.federation, root=7))
    with torch.no_grad():
        list(together([training, other], [server, server], 0, 1))
    assert seen == [8, 8, 8, 6, 2]
