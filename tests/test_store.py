"""The store against a plain dictionary of what should be where after any crash."""

import resource
import signal
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from apiece import Params
from apiece.errors import ApieceError
from apiece.store import Store
from tests.worlds import CPU


class State(NamedTuple):
    theta: Params
    known: torch.Tensor
    counts: torch.Tensor


def template() -> State:
    return State(
        Params({"w": torch.empty(2, 3, device="meta")}),
        torch.empty((), device="meta"),
        torch.empty(2, dtype=torch.int64, device="meta"),
    )


def states(values: list[int]) -> State:
    v = torch.tensor(values, dtype=torch.float32)
    return State(
        Params({"w": v[:, None, None].expand(-1, 2, 3)}), v + 0.5, torch.stack([v.long(), -v.long()], 1)
    )


def read(store: Store, client: int) -> int | None:
    """The value a client's row was made of; every leaf must tell the same."""
    if not store.known([client])[0]:
        return None
    row = store.get([client])
    value = int(row.counts[0, 0])
    expected = states([value])
    for got, wanted in zip(
        (row.theta["w"], row.known, row.counts),
        (expected.theta["w"], expected.known, expected.counts),
        strict=True,
    ):
        assert torch.equal(got, wanted)
    return value


def new(folder: Path | None, mapped: bool, clients: int = 4) -> Store:
    store = Store(template(), clients, CPU, folder, mapped)
    store.open(0)
    return store


@pytest.mark.parametrize("mapped", [False, True])
def test_rows_come_back_mixed_fresh_and_committed(tmp_path: Path, mapped: bool) -> None:
    store = new(tmp_path, mapped)
    store.put([0, 2], states([10, 12]))
    store.commit(1)
    store.put([2, 3], states([22, 23]))
    assert [read(store, i) for i in range(4)] == [10, None, 22, 23]
    assert store.get([3, 0, 2]).counts[:, 0].tolist() == [23, 10, 22]


steps = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.lists(st.integers(0, 3), unique=True, min_size=1), st.integers(0, 99)),
        st.tuples(st.just("checkpoint")),
        st.tuples(st.just("crash")),
        st.tuples(st.just("crash in commit")),
    ),
    max_size=14,
)


@settings(max_examples=60, deadline=None)
@given(steps, st.booleans())
def test_any_crash_goes_back_to_the_last_checkpoint(
    tmp_path_factory: Any, script: list[Any], mapped: bool
) -> None:
    folder = tmp_path_factory.mktemp("store")
    store, now, last = new(folder, mapped), {}, 0
    saved: dict[int, int] = {}
    for round, step in enumerate(script, start=1):
        if step[0] == "put":
            store.put(step[1], states([step[2] + i for i in step[1]]))
            now.update({i: step[2] + i for i in step[1]})
        elif step[0] == "checkpoint":
            store.commit(round)
            saved, last = dict(now), round
        else:
            if step[0] == "crash in commit":
                store.commit(round)  # its checkpoint is never written
            store = Store(template(), 4, CPU, folder, mapped)
            store.open(last)
            now = dict(saved)
        assert {i: v for i in range(4) if (v := read(store, i)) is not None} == now


@pytest.mark.parametrize("mapped", [False, True])
def test_the_last_two_checkpoints_can_both_be_opened(tmp_path: Path, mapped: bool) -> None:
    store = new(tmp_path, mapped)
    for round in (1, 2, 3):
        store.put([0], states([round]))
        store.commit(round)
    for round in (3, 2):
        again = Store(template(), 4, CPU, tmp_path, mapped)
        again.open(round, writable=False)
        assert read(again, 0) == round


def test_reading_alone_changes_nothing_on_disk(tmp_path: Path) -> None:
    store = new(tmp_path, True)
    store.put([1], states([5]))
    store.commit(4)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    Store(template(), 4, CPU, tmp_path, True).open(3, writable=False)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_a_half_written_row_is_never_read(tmp_path: Path) -> None:
    """A kill between the bytes and the tag: the tag is 0 and the other slot stands."""
    store = new(tmp_path, True)
    store.put([1], states([5]))
    store.commit(1)
    store.put([1], states([6]))
    store.commit(2)
    rows = np.memmap(tmp_path / "clients.rows", np.uint8, "r+", shape=(4, 2, 44))
    tags = np.memmap(tmp_path / "clients.tags", np.int64, "r+", shape=(4, 2))
    older = int(tags[1].argmin())
    tags[1, older] = 0
    rows[1, older, :7] = 255
    again = Store(template(), 4, CPU, tmp_path, True)
    again.open(2)
    assert read(again, 1) == 6


def test_the_file_is_sparse(tmp_path: Path) -> None:
    """A million clients take the space of those that were met."""
    store = new(tmp_path, True, clients=1_000_000)
    store.put([999_999], states([1]))
    store.commit(1)
    held = (tmp_path / "clients.rows").stat()
    assert held.st_size == 1_000_000 * 2 * 44
    assert held.st_blocks * 512 < 1_000_000


def test_rows_are_not_mapped_into_memory(tmp_path: Path) -> None:
    """Pages of a mapping count as the process's own: they would grow with the clients that were met."""
    store = new(tmp_path, True, clients=1000)
    store.put([7, 999], states([1, 2]))
    store.commit(1)
    store.get([7, 8, 999])
    assert "clients." not in Path("/proc/self/maps").read_text()


def test_begun_again_from_round_0_nothing_is_left_on_disk(tmp_path: Path) -> None:
    store = new(tmp_path, True, clients=1000)
    store.put(list(range(1000)), states(list(range(1000))))
    store.commit(1)
    assert not any(new(tmp_path, True, clients=1000).known(range(1000)))
    assert sum(path.stat().st_blocks for path in tmp_path.iterdir()) == 0


@pytest.mark.parametrize("name", ["clients.rows", "clients.tags"])
def test_files_that_are_gone_or_cut_short_are_not_taken_for_new_clients(tmp_path: Path, name: str) -> None:
    store = new(tmp_path, True)
    store.put([1], states([5]))
    store.commit(1)
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:-1])
    for _ in range(2):
        with pytest.raises(ApieceError, match=f"{name} is missing or cut short"):
            Store(template(), 4, CPU, tmp_path, True).open(1)
        (tmp_path / name).unlink(missing_ok=True)


def test_a_full_disk_is_an_error_and_the_last_checkpoint_stands(tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk: the second client's row does not fit."""
    store = new(tmp_path, True, clients=1000)
    store.put([0, 900], states([1, 2]))
    store.commit(1)
    store.put([0, 900], states([3, 4]))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (900 * 2 * 44 + 60, before[1]))
        with pytest.raises(OSError, match=r"clients\.rows|File too large"):
            store.commit(2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    again = Store(template(), 1000, CPU, tmp_path, True)
    again.open(1)
    assert [read(again, client) for client in (0, 900)] == [1, 2]


def test_before_it_is_opened_a_mapped_store_holds_what_was_put(tmp_path: Path) -> None:
    """As when an engine is measured before round 0; nothing reaches the disk."""
    store = Store(template(), 4, CPU, tmp_path, True)
    store.put([2], states([8]))
    assert read(store, 2) == 8
    store.forget()
    assert read(store, 2) is None
    assert list(tmp_path.iterdir()) == []


def test_methods_without_state_leave_no_file(tmp_path: Path) -> None:
    store = Store((), 5, CPU, tmp_path, False)
    store.open(0)
    store.put([1], ())
    store.commit(1)
    assert list(tmp_path.iterdir()) == []
