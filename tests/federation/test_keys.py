"""Certificates and keys as Flower and the gateway take them."""

from __future__ import annotations

import logging
import stat
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'apiece[flower]'")

from cryptography.hazmat.primitives.serialization import load_ssh_private_key

from apiece.federation import keys


def test_a_key_is_named_by_its_file_and_nobody_else_can_read_it(tmp_path: Path) -> None:
    public = keys.make_key(tmp_path / "anna" / "key")
    assert stat.S_IMODE((tmp_path / "anna" / "key").stat().st_mode) == 0o600
    private = load_ssh_private_key((tmp_path / "anna" / "key").read_bytes(), None)
    assert private.key_size == 384  # type: ignore[union-attr]
    public.rename(tmp_path / "anna.pub")
    ((text, name),) = keys.names(tmp_path).items()
    assert name == "anna"
    assert text.startswith("-----BEGIN PUBLIC KEY-----\n")


def test_files_that_are_no_keys_are_left_out_and_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys.make_key(tmp_path / "fine")
    (tmp_path / "twice.pub").write_bytes((tmp_path / "fine.pub").read_bytes())
    (tmp_path / "half.pub").write_text("ecdsa-sha2-nistp384 AAAA")
    (tmp_path / "notes.txt").write_text("not looked at")
    for _ in range(2):
        with caplog.at_level(logging.WARNING, "apiece"):
            assert set(keys.names(tmp_path).values()) == {"fine"}
    assert [line.split()[0] for line in caplog.messages] == [
        str(tmp_path / "half.pub"),
        str(tmp_path / "twice.pub"),
    ]


def test_the_servers_key_is_private(tmp_path: Path) -> None:
    keys.certify(tmp_path)
    assert stat.S_IMODE((tmp_path / "server.key").stat().st_mode) == 0o600
    assert not (tmp_path / "ca.key").exists()
