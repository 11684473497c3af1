"""The command line of federations, and the commands on its page."""

from __future__ import annotations

import re
import shlex
import shutil
import ssl
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest
import typer

from apiece.commands import federate
from tests.command import apiece
from tests.federation.loopback import examples

PAGE = (Path(__file__).parents[2] / "docs" / "federation.md").read_text(encoding="utf-8")
needs_flower = pytest.mark.skipif(
    find_spec("flwr") is None, reason="Flower is not installed: pip install 'apiece[flower]'"
)
FINE = ("server", "--insecure", "--clients", "2", "--input-shape", "5", "--labels", "3")
CLIENT = ("client", "--server", "h:1", "--state", "s")


def block(title: str) -> str:
    (found,) = re.findall(rf"^```bash {title}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    return str(found)


def shell(commands: str, folder: Path) -> None:
    subprocess.run(["bash", "-e", "-c", commands], cwd=folder, check=True, capture_output=True)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_the_certificate_on_the_page_is_one_that_clients_accept(tmp_path: Path) -> None:
    """A handshake in memory: for the server's name it succeeds, for another it does not."""
    shell(block("certificate"), tmp_path)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(tmp_path / "server.crt", tmp_path / "server.key")
    client = ssl.create_default_context(cafile=tmp_path / "ca.crt")
    shake(client, server, "fed.example.org")
    with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
        shake(client, server, "other.example.org")


def shake(client: ssl.SSLContext, server: ssl.SSLContext, name: str) -> None:
    one, other = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [client.wrap_bio(one, other, server_hostname=name), server.wrap_bio(other, one, server_side=True)]
    for _ in range(5):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue


@needs_flower
@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="ssh-keygen is not installed")
def test_the_key_on_the_page_is_one_that_the_server_knows(tmp_path: Path) -> None:
    from apiece.federation import keys

    shell(block("key"), tmp_path)
    assert list(keys.names(tmp_path).values()) == ["WARD"]


def lines() -> list[list[str]]:
    text = re.sub(r"\\\n\s+", "", PAGE)
    return [shlex.split(line) for line in re.findall(r"^apiece federate .*$", text, re.MULTILINE)]


def test_the_page_shows_every_command() -> None:
    assert {words[2] for words in lines()} == {"demo", "server", "client"}


@pytest.mark.parametrize("words", lines(), ids=lambda words: words[2])
def test_the_commands_on_the_page_can_be_given(words: list[str]) -> None:
    """Every flag is one that the command has, and takes what stands behind it."""
    command = typer.main.get_command(federate.app).commands[words[2]]  # type: ignore[attr-defined]
    context = command.make_context(words[2], words[3:])
    assert context.params


@needs_flower
@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("server", *FINE[4:]), "--certificate"),
        (("server", "--insecure", *FINE[4:]), "--clients 3"),
        ((*FINE, "--input-shape", "5x5"), "--input-shape"),
        ((*FINE, "--labels", "1"), "--labels"),
        ((*FINE, "--labels", "a,a"), "--labels"),
        ((*FINE, "--cohort", "3"), "cohort of 3"),
        ((*FINE, "--method", "feddf"), "server's own"),
        ((*FINE, "--method", "no_such_module:Mine"), "cannot import"),
        ((*FINE, "--min-replies", "2"), "--min-replies"),
        (("server", "--resume", "nowhere"), "no federation"),
        ((*CLIENT, "--data", "no.npz", "--insecure"), "no such file: no.npz"),
        ((*CLIENT, "--data", "own.npz", "--insecure"), "--name"),
        ((*CLIENT, "--data", "own.npz"), "--key and --root-certificate"),
        (("demo", "--method", "nothing"), "unknown method"),
        (("demo", "--out", "."), "choose another folder"),
    ],
)
def test_mistakes_are_told_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], told: str
) -> None:
    import numpy as np

    monkeypatch.chdir(tmp_path)
    np.savez(tmp_path / "own.npz", **examples(4, 0))
    outcome = apiece("federate", *words)
    assert outcome.code == 2
    assert told in " ".join(outcome.err.split())
    assert not (tmp_path / "runs").exists()


def test_without_flower_it_is_said_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    for words in (
        ["demo"],
        ["server", "--insecure"],
        ["client", "--server", "h:1", "--data", "d", "--state", "s"],
    ):
        outcome = apiece("federate", *words)
        assert outcome.code == 2
        assert "pip install 'apiece[flower]'" in outcome.err
