"""The `apiece` command run inside the test process, and the small experiment that its tests share."""

from __future__ import annotations

import csv
import io
import json
import shutil
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

from apiece import cli

# 8 clients, of whom 6 are seen; 650 parameters; evaluated after rounds 0, 2 and 4; all checkpoints are due.
SIZES = ("--clients", "8", "--cohort", "3", "--engine", "vectorized", "--threads", "1", "--model", "logistic")
SMALL = (*SIZES, "--rounds", "4", "--evaluate-every", "2", "--checkpoint-every", "1", "--set", "epochs=1")


class Outcome(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """What was printed, as strict JSON."""
        return strict(self.out)


def apiece(*arguments: str) -> Outcome:
    """Run the command as a shell would, without starting a process."""
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        try:
            cli.main(list(arguments))
            code: Any = 0
        except SystemExit as end:
            code = end.code or 0
    return Outcome(code, out.getvalue(), err.getvalue())


def strict(text: str) -> Any:
    """JSON without Python's NaN and Infinity."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def table(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def interrupted(finished: Path, folder: Path) -> Path:
    """A copy of a finished run as a kill in its last round would have left it."""
    shutil.copytree(finished, folder)
    (folder / "summary.json").unlink()
    shutil.rmtree(sorted((folder / "checkpoint").glob("round-*"))[-1])
    return folder
