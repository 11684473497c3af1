"""Checkpoints: folders `round-000040` of one safetensors and one json file, written whole or not at all.

The last two are kept. Clients' rows lie beside them in the store's own files, two for each client: before
newer ones replace the older of the two, the checkpoint that needs those goes.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from apiece import tree
from apiece.errors import ApieceError
from apiece.tree import Tree


class Checkpoint(NamedTuple):
    round: int
    server: Tree
    log: dict[str, Any]  # what the run folder needs to go on: lengths of its logs, counters


def write(folder: Path, run_id: str, checkpoint: Checkpoint) -> None:
    """Add a checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    final = folder / f"round-{checkpoint.round:06d}"
    draft = folder / f"draft-{checkpoint.round:06d}"
    for stale in (draft, final):
        if stale.exists():
            shutil.rmtree(stale)
    draft.mkdir()
    flat = tree.flatten(checkpoint.server)
    save_file(
        {name: leaf.contiguous().cpu() for name, leaf in flat.items() if isinstance(leaf, Tensor)},
        draft / "server.safetensors",
    )
    meta = {
        "run": run_id,
        "round": checkpoint.round,
        "sha256": _digest(draft / "server.safetensors"),
        "scalars": {name: leaf for name, leaf in flat.items() if not isinstance(leaf, Tensor)},
        "log": checkpoint.log,
    }
    (draft / "state.json").write_text(json.dumps(meta, indent=1))
    for path in (draft / "server.safetensors", draft / "state.json", draft):
        sync(path)
    draft.rename(final)
    sync(folder)


def make_room(folder: Path) -> None:
    """Drop all but the newest checkpoint, before clients' rows are written that the others would need."""
    for old in _rounds(folder)[:-1]:
        shutil.rmtree(old)


def read(folder: Path, run_id: str, template: Tree, device: Any) -> Checkpoint | None:
    """The newest checkpoint, or None if there is none; a damaged or foreign one is an error."""
    found = _rounds(folder) if folder.exists() else []
    if not found:
        return None
    newest = found[-1]
    before = f"continue from {found[-2].name}" if len(found) > 1 else "start again from round 0"
    mend = f"Delete the folder {newest} to {before}."
    try:
        meta = json.loads((newest / "state.json").read_text())
        if meta["sha256"] != _digest(newest / "server.safetensors"):
            raise ValueError("server.safetensors is not what was saved")
        if meta["run"] != run_id:
            raise ApieceError(f"checkpoint {newest} belongs to another experiment. {mend}")
        # Copies, in memory that PyTorch has aligned as all its own: products of others may round otherwise.
        leaves = load_file(newest / "server.safetensors", device=str(device))
        values = {**{path: leaf.clone() for path, leaf in leaves.items()}, **meta["scalars"]}
        return Checkpoint(meta["round"], tree.restore(template, values), meta["log"])
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise ApieceError(f"checkpoint {newest} is damaged: {error}. {mend}") from error


def sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _rounds(folder: Path) -> list[Path]:
    return sorted(folder.glob("round-*"), key=lambda path: int(path.name.removeprefix("round-")))


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
