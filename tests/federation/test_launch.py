"""Processes that end with their parents, and doors that are asked for as they are meant."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from apiece.errors import ApieceError
from apiece.federation import launch
from apiece.federation.launch import Door

# A child that starts a child, which starts one by one of the names that Flower's processes use.
FAMILY = """
import subprocess, sys, time
from pathlib import Path
from apiece.federation import launch

launch._found = lambda name: {"flower-superlink": "/bin/sh", "flower-superexec": "/bin/sh"}.get(name, name)
folder = Path(sys.argv[1])
script = "flower-superexec -c 'sleep 300 & echo $! > grandchild; wait' & echo $! > child; wait"
launch._COMMANDS = ("flower-superexec",)
with launch.Children() as children:
    children.start(["flower-superlink", "-c", f"cd {folder}; {script}"], folder / "log", folder / "home")
    while not (folder / "grandchild").exists() or not (folder / "grandchild").read_text():
        time.sleep(0.05)
    print("ready", flush=True)
    sys.stdin.read()
"""


def gone(pid: int) -> bool:
    """Ended, buried or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def wait_until(done: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux ends processes with their parents")
@pytest.mark.parametrize("how", ["killed", "left"])
def test_no_process_outlives_its_parent(tmp_path: Path, how: str) -> None:
    """kill -9, which nobody can clean up after, and an orderly end; children of children too."""
    process = subprocess.Popen(
        [sys.executable, "-c", FAMILY, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        pids = [int((tmp_path / name).read_text()) for name in ("child", "grandchild")]
        assert not any(map(gone, pids))
        if how == "killed":
            process.send_signal(signal.SIGKILL)
        process.stdin.close()
        process.wait(30)
    (child, grandchild) = pids
    wait_until(lambda: gone(child))
    if how == "left":  # a `sleep` is not bound to anybody: it was adopted, and ended
        assert gone(grandchild)
    else:
        os.kill(grandchild, signal.SIGKILL)


def test_flower_is_offline(tmp_path: Path) -> None:
    pytest.importorskip("flwr", reason="Flower is not installed: pip install 'apiece[flower]'")
    found = launch.environment(tmp_path)
    assert found["FLWR_HOME"] == str(tmp_path)
    assert found["FLWR_TELEMETRY_ENABLED"] == "0"
    assert found["FLWR_DISABLE_UPDATE_CHECK"] == "1"
    assert found["FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"] == "1"


@pytest.mark.parametrize(
    ("door", "told"),
    [
        (Door(), "--certificate"),
        (Door(certificate="a", private_key="b"), "--client-keys"),
        (Door(certificate="a", insecure=True), "leave one or the other out"),
        (Door(address="8000", insecure=True), "HOST:PORT"),
        (Door(address="host:0", insecure=True), "HOST:PORT"),
        (Door(certificate="/no", private_key="/no", client_keys="/no"), "no such file or folder: /no"),
    ],
)
def test_a_door_is_locked_unless_asked_otherwise(door: Door, told: str) -> None:
    with pytest.raises(ApieceError, match=told):
        door.check()


def test_an_insecure_door_must_be_asked_for() -> None:
    Door(insecure=True).check()


def test_a_door_reads_as_it_was_written(tmp_path: Path) -> None:
    door = Door("127.0.0.1:1", "c", "k", "keys", False)
    door.write(tmp_path)
    assert Door.read(tmp_path) == door
    (tmp_path / launch.DOOR).write_text("{")
    with pytest.raises(ApieceError, match="damaged"):
        Door.read(tmp_path)
    with pytest.raises(ApieceError, match="no federation"):
        Door.read(tmp_path / "other")
