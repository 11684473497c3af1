from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from apiece.data import place
from apiece.data.place import cached, data_folder


def test_the_data_folder_is_asked_for_or_in_the_environment_or_the_default(monkeypatch):
    monkeypatch.setenv("APIECE_DATA", "/somewhere")
    assert data_folder("~/mine") == Path.home() / "mine"
    assert data_folder() == Path("/somewhere")
    monkeypatch.delenv("APIECE_DATA")
    assert data_folder() == Path.home() / ".cache" / "apiece"


class Maker:
    """Counts how often it was asked."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self) -> dict[str, np.ndarray]:
        self.asked += 1
        return {"x": np.arange(6).reshape(3, 2), "names": np.array(["a", "bc"])}


def test_what_was_made_is_kept_until_a_source_changes(tmp_path):
    source, make = tmp_path / "source", Maker()
    source.write_text("one")
    for _ in range(2):
        held = cached(tmp_path, "thing", [source], make)
        assert set(held) == {"x", "names"}
        assert held["x"].tolist() == [[0, 1], [2, 3], [4, 5]]
        assert held["names"].tolist() == ["a", "bc"]
    assert make.asked == 1
    assert isinstance(held["x"], np.memmap)
    (kept,) = (tmp_path / place.CACHE).iterdir()
    assert kept.stat().st_mode & 0o777 == 0o755  # others may read it
    assert cached(tmp_path, "other", [source], make)["x"].sum() == 15
    assert make.asked == 2
    source.write_text("other")
    cached(tmp_path, "thing", [source], make)
    assert make.asked == 3
    os.utime(source, ns=(1, 1))
    cached(tmp_path, "thing", [source], make)
    assert make.asked == 4


def test_what_is_written_to_a_mapped_array_stays_with_the_writer(tmp_path):
    source = tmp_path / "source"
    source.touch()
    for _ in range(2):
        held = cached(tmp_path, "thing", [source], Maker())
        assert held["x"][0, 0] == 0
        held["x"][0, 0] = 9


def test_a_cache_that_broke_off_is_not_there(tmp_path, monkeypatch):
    source, make = tmp_path / "source", Maker()
    source.touch()
    save = np.save

    def breaks(path: Path, *rest: object, **named: object) -> None:
        if path.stem == "names":
            raise KeyboardInterrupt
        save(path, *rest, **named)

    with monkeypatch.context() as patch:
        patch.setattr(np, "save", breaks)
        with pytest.raises(KeyboardInterrupt):
            cached(tmp_path, "thing", [source], make)
    assert list((tmp_path / place.CACHE).iterdir()) == []
    assert set(cached(tmp_path, "thing", [source], make)) == {"x", "names"}


def test_of_two_that_make_it_at_once_the_second_finds_it_there(tmp_path):
    source, make = tmp_path / "source", Maker()
    source.touch()

    def slow() -> dict[str, np.ndarray]:
        cached(tmp_path, "thing", [source], make)
        return make()

    assert cached(tmp_path, "thing", [source], slow)["x"].sum() == 15
    assert len(list((tmp_path / place.CACHE).iterdir())) == 1


def test_a_folder_that_cannot_be_written_to_is_told(tmp_path, caplog):
    source = tmp_path / "source"
    source.touch()
    (tmp_path / place.CACHE).touch()  # a file where the cache would be: even root cannot write there
    assert cached(tmp_path, "thing", [source], Maker())["x"].sum() == 15
    assert "thing is not kept for the next time" in caplog.text
