from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from apiece import ApieceError, Params, checkpoint
from apiece.checkpoint import Checkpoint


class Server(NamedTuple):
    params: Params
    count: torch.Tensor
    stage: int


def server(value: float, stage: int = 1) -> Server:
    return Server(Params({"w": torch.full((3,), value)}), torch.tensor(value), stage)


def save(folder: Path, round: int, run: str = "run") -> None:
    checkpoint.make_room(folder)
    checkpoint.write(folder, run, Checkpoint(round, server(float(round), stage=round), {"length": round}))


def load(folder: Path, run: str = "run") -> Checkpoint | None:
    return checkpoint.read(folder, run, server(0.0), "cpu")


def test_the_newest_comes_back_and_two_are_kept(tmp_path: Path) -> None:
    assert load(tmp_path / "none") is None
    for round in (9, 10, 100):
        save(tmp_path, round)
    found = load(tmp_path)
    assert found is not None
    assert (found.round, found.server.stage, found.log) == (100, 100, {"length": 100})
    assert found.server.params["w"].tolist() == [100.0] * 3
    assert sorted(p.name for p in tmp_path.iterdir()) == ["round-000010", "round-000100"]


def test_newest_goes_by_number_not_by_name(tmp_path: Path) -> None:
    save(tmp_path, 999_999)
    save(tmp_path, 1_000_000)
    assert load(tmp_path).round == 1_000_000  # type: ignore[union-attr]


def test_no_pickle(tmp_path: Path) -> None:
    save(tmp_path, 1)
    assert {p.suffix for p in tmp_path.rglob("*") if p.is_file()} == {".safetensors", ".json"}


def test_a_draft_left_by_a_kill_is_not_a_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (tmp_path / "draft-000002").mkdir()
    (tmp_path / "draft-000002" / "server.safetensors").write_bytes(b"half")
    found = load(tmp_path)
    assert found is not None
    assert found.round == 1
    save(tmp_path, 2)
    assert load(tmp_path).round == 2  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["server.safetensors", "state.json"])
@pytest.mark.parametrize("damage", ["cut", "flip", "gone"])
def test_damage_is_found_and_the_way_out_is_told(tmp_path: Path, name: str, damage: str) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    path = tmp_path / "round-000002" / name
    content = bytearray(path.read_bytes())
    if damage == "gone":
        path.unlink()
    else:
        content[-5] ^= 0xFF
        path.write_bytes(content[: len(content) // 2] if damage == "cut" else content)
    if (name, damage) == ("state.json", "flip"):
        content[10] ^= 0xFF
        path.write_bytes(content)
    with pytest.raises(ApieceError, match=r"round-000002 is damaged.*Delete the folder .* from round-000001"):
        load(tmp_path)


def test_another_runs_checkpoint_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 1, run="other")
    with pytest.raises(ApieceError, match=r"belongs to another experiment.*start again from round 0"):
        load(tmp_path)
