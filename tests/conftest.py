"""One thread per test process: several test processes would fight over the cores."""

import signal
from pathlib import Path

import pytest
import torch

from tests import command

torch.set_num_threads(1)
# Tests press ctrl-C, which shells have their background jobs, and so the jobs' children, ignore.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small finished run of FedAvg. Copy it before you change it."""
    folder = tmp_path_factory.mktemp("runs") / "finished"
    outcome = command.apiece("run", *command.SMALL, "--out", str(folder))
    assert outcome.code == 0, outcome.err
    return folder
