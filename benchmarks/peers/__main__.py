"""One peer in a process of its own: `python -m benchmarks.peers WORK.json ANSWER.json`."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import torch

from benchmarks.peers import Work, distance


def main(asked: Path, answer: Path) -> None:
    order = json.loads(asked.read_text())
    work = Work(**{**order["work"], "sizes": tuple(order["work"]["sizes"])})
    torch.set_num_threads(order["threads"])
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    peer = importlib.import_module(order["peer"])
    times, first = peer.measure(work, order["warm"], order["rounds"])
    moved = distance(work.network().state_dict(), first)
    answer.write_text(json.dumps({"blocks_ms": times, "moved": moved}))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
