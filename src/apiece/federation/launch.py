"""The processes of a federation: Flower's SuperLink behind a gateway, its SuperNodes, and their end."""

from __future__ import annotations

import ctypes
import fcntl
import json
import logging
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from apiece import folder as files
from apiece.errors import ApieceError
from apiece.federation.client import Place
from apiece.settings import to_toml

log = logging.getLogger("apiece")

DOOR, LOG, ERROR = "door.json", "federation.log", "error.txt"  # in the run's folder
HOME = "flower"  # what Flower keeps, in the run's folder and in each client's
HELD = "server.lock"  # in HOME: locked as long as the rounds are being run
STARTS = 180.0  # seconds that Flower may take to begin
AGAIN = 10.0  # seconds between two tries of a client to connect
PATIENCE = 5.0  # seconds that processes may take to end by themselves

# A fresh Python asks the kernel to end it when its parent ends, in whatever way; then it becomes the command.
_BOUND = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); "
    "os.getppid() == int(sys.argv[1]) or sys.exit(); os.execv(sys.argv[2], sys.argv[2:])"
)
_COMMANDS = ("flower-superexec", "flwr-serverapp", "flwr-clientapp")  # what Flower's processes start by name
# Flower's own command line, several commands at once; an error is one line.
_FLWR = """
import json, sys, warnings
warnings.simplefilter("ignore")
import click
from flwr.cli.app import app
for command in json.loads(sys.argv[1]):
    try:
        app(command, standalone_mode=False)
    except click.ClickException as error:
        print("error:", " ".join(error.format_message().split()))
"""
_SUBREAPER = 36  # of prctl: children of children that are left alone become ours


class Door(NamedTuple):
    """Where a server is reached, and by whom."""

    address: str = "0.0.0.0:8000"
    certificate: str = ""
    private_key: str = ""
    client_keys: str = ""  # a folder of NAME.pub
    insecure: bool = False

    def check(self) -> None:
        host, _, port = self.address.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
            raise ApieceError(f"--address {self.address!r} must be HOST:PORT, for example 0.0.0.0:8000")
        needed = (self.certificate, self.private_key, self.client_keys)
        if self.insecure:
            if any(needed):
                raise ApieceError("--insecure goes without certificate and keys: leave one or the other out")
            return
        if not all(needed):
            raise ApieceError(
                "give --certificate, --private-key and --client-keys (docs/federation.md says how to make "
                "them), or, where everybody on the network is trusted, --insecure"
            )
        for path in needed:
            if not Path(path).exists():
                raise ApieceError(f"no such file or folder: {path}")

    def write(self, folder: Path) -> None:
        files.write_json(folder / DOOR, self._asdict())

    @staticmethod
    def read(folder: Path) -> Door:
        try:
            return Door(**json.loads((folder / DOOR).read_text(encoding="utf-8")))
        except OSError as error:
            raise ApieceError(f"{folder} holds no federation: there is no {DOOR} in it") from error
        except (TypeError, ValueError) as error:
            raise ApieceError(f"{folder / DOOR} is damaged: {error}") from error


def require_flower() -> None:
    _found("flower-superlink")


def _path() -> str:
    """Commands beside this Python come first."""
    return f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"


def _found(command: str) -> str:
    path = shutil.which(command, path=_path())
    if path is None:
        raise ApieceError("a federation needs Flower: pip install 'apiece[flower]'")
    return path


def _bound(command: list[str], parent: str) -> list[str]:
    """The command, as a process that ends when its parent does."""
    if sys.platform != "linux":
        return [_found(command[0]), *command[1:]]
    return [sys.executable, "-S", "-c", _BOUND, parent, _found(command[0]), *command[1:]]


def _bind(folder: Path) -> Path:
    """Flower's commands under their names, each bound to whoever starts it: none outlives the others."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in _COMMANDS if sys.platform == "linux" else ():
        words = " ".join(shlex.quote(word) for word in _bound([name], "PARENT"))
        script = folder / name
        script.write_text(f'#!/bin/sh\nexec {words.replace("PARENT", "$PPID")} "$@"\n', encoding="utf-8")
        script.chmod(0o755)
    return folder


def environment(home: Path) -> dict[str, str]:
    """Flower offline: nothing is reported, looked up or installed."""
    return {
        **os.environ,
        "PATH": f"{_bind(home / 'bin')}{os.pathsep}{_path()}",
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.5",
    }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Children:
    """Processes that end when this one does, however it ends; leaving ends them all, with their own."""

    def __enter__(self) -> Children:
        if sys.platform != "linux":
            raise ApieceError(
                "the server of a federation needs Linux, which ends processes with their parents"
            )
        self._started: list[subprocess.Popen[bytes]] = []
        self._before = _children()
        ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
        return self

    def start(self, command: list[str], output: Path, home: Path) -> subprocess.Popen[bytes]:
        bound, env = _bound(command, str(os.getpid())), environment(home)
        with output.open("ab") as out:
            child = subprocess.Popen(bound, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        self._started.append(child)
        return child

    def __exit__(self, *_: object) -> None:
        for wanted in (signal.SIGTERM, signal.SIGKILL):
            end, told = time.monotonic() + PATIENCE, set[int]()
            while (left := self._left()) and time.monotonic() < end:
                for pid in left - told:  # some become ours only when their parents are gone
                    os.kill(pid, wanted)
                told |= left
                time.sleep(0.05)
        ctypes.CDLL(None).prctl(_SUBREAPER, 0, 0, 0, 0)

    def _left(self) -> set[int]:
        """Those alive: what was started, and what that started and left behind; the ended ones are buried."""
        alive = {child.pid for child in self._started if child.poll() is None}
        for pid in _children() - self._before - alive:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        return alive | (_children() - self._before)


def _children() -> set[int]:
    text = " ".join(path.read_text() for path in Path("/proc/self/task").glob("*/children"))
    return {int(pid) for pid in text.split()}


class _Steering:
    """The SuperLink of this machine, steered by Flower's own command line."""

    def __init__(self, home: Path, address: str, authority: Path | None) -> None:
        self._home, self._registered = home, set[str]()
        trust = {"insecure": True} if authority is None else {"root-certificates": str(authority)}
        table = {"superlink": {"default": "here", "here": {"address": address, **trust}}}
        (home / "config.toml").write_text(to_toml(table), encoding="utf-8")

    def register(self, folder: Path) -> None:
        """Let the clients in whose public keys are in the folder."""
        from apiece.federation import keys

        fresh = sorted(set(keys.names(folder).values()) - self._registered)
        if not fresh:
            return
        told = self._flwr(*(["supernode", "register", str(folder / f"{name}.pub")] for name in fresh))
        errors = [line for line in told.splitlines() if line.startswith("error:")]
        strange = [line for line in errors if "already" not in line.lower()]  # a server was here before
        if strange:
            raise ApieceError(f"Flower: {strange[0]}")
        self._registered |= set(fresh)

    def start(self, folder: Path) -> None:
        """Begin the rounds of the federation that is planned in `folder`."""
        app = self._home / "app"
        app.mkdir(exist_ok=True)
        place = "apiece.federation.flower"
        components = {"serverapp": f"{place}:server_app", "clientapp": f"{place}:client_app"}
        described = {
            "publisher": "apiece",
            "components": components,
            "config": {"folder": str(folder.resolve())},
        }
        table = {
            "project": {"name": "apiece-federation", "version": "0.1.0", "dependencies": []},
            "tool": {"flwr": {"app": described}},
        }
        (app / "pyproject.toml").write_text(to_toml(table), encoding="utf-8")
        told = self._flwr(["run", str(app)])
        if "started run" not in told:
            raise ApieceError(f"Flower does not start the run: {told.strip()}")

    def _flwr(self, *commands: list[str]) -> str:
        program = [sys.executable, "-c", _FLWR, json.dumps(commands)]
        ended = subprocess.run(
            program, env=environment(self._home), capture_output=True, text=True, check=False
        )
        if ended.returncode:
            raise ApieceError(f"Flower's command line fails: {ended.stderr.strip()}")
        return ended.stdout


class Site(NamedTuple):
    """A server that clients can connect to."""

    children: Children
    steering: _Steering
    client_keys: str
    link: subprocess.Popen[bytes]

    def start(self, folder: Path) -> None:
        """Begin the rounds of the federation that is planned in `folder`."""
        self.steering.start(folder)

    def tend(self) -> None:
        """Let in whose keys have come since."""
        if self.client_keys:
            self.steering.register(Path(self.client_keys))


@contextmanager
def serving(home: Path, door: Door) -> Iterator[Site]:
    """SuperLink and gateway, and the clients' keys; what Flower keeps is in `home`."""
    from apiece.federation import gateway

    home.mkdir(exist_ok=True)
    with Children() as children:
        link, authority = _start_link(children, home, door.insecure)
        certificate = None
        if not door.insecure:
            certificate = gateway.Certificate(Path(door.certificate), Path(door.private_key))
        host, _, port = door.address.rpartition(":")
        site = Site(children, _Steering(home, link.address, authority), door.client_keys, link.process)
        site.tend()  # before the first client comes: who is not known is sent away
        app = gateway.application(link.url, authority)
        with gateway.opened(app, host.strip("[]"), int(port), certificate):
            yield site


def serve(
    folder: Path,
    progress: Callable[[int], None],
    tell: Callable[[str], None],
    beside: Callable[[Children], None] = lambda children: None,
) -> None:
    """Carry out the federation that is planned in `folder`; it is over when this returns.

    `tell` gets every line of the log; `beside` may start more processes, once clients can connect.
    """
    (folder / ERROR).unlink(missing_ok=True)
    told = len(_lines(folder / LOG))
    with files.locked(folder), serving(folder / HOME, Door.read(folder)) as site:
        site.start(folder)
        beside(site.children)
        _watch(folder, site, progress, tell, told)


class _Link(NamedTuple):
    process: subprocess.Popen[bytes]
    address: str
    url: str


def _start_link(children: Children, home: Path, insecure: bool) -> tuple[_Link, Path | None]:
    """A SuperLink that this machine alone can reach, and the authority that signed its certificate."""
    from apiece.federation import keys

    address = f"127.0.0.1:{free_port()}"
    command = ["flower-superlink", "--host", "127.0.0.1", "--port", address.rpartition(":")[2]]
    command += ["--disable-runtime-dependency-installation", "--database", str(home / "link.db")]
    authority = None
    if insecure:
        command.append("--insecure")
    else:
        keys.certify(home / "link")
        authority = home / "link" / "ca.crt"
        command += ["--ssl-ca-certfile", str(authority), "--enable-supernode-auth"]
        command += ["--ssl-certfile", str(home / "link" / "server.crt")]
        command += ["--ssl-keyfile", str(home / "link" / "server.key")]
    process = children.start(command, home / "link.log", home)
    end = time.monotonic() + STARTS
    while not _listening(address):
        if process.poll() is not None or time.monotonic() > end:
            raise ApieceError(f"Flower's SuperLink does not start: see {home / 'link.log'}")
        time.sleep(0.1)
    scheme = "http" if insecure else "https"
    return _Link(process, address, f"{scheme}://{address}"), authority


def _listening(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


def _watch(
    folder: Path, site: Site, progress: Callable[[int], None], tell: Callable[[str], None], told: int
) -> None:
    """Until the run in `folder` is over; so many lines of its log have been told."""
    begun, end = False, time.monotonic() + STARTS
    while True:
        held = _held(folder / HOME / HELD)
        begun = begun or held
        lines = _lines(folder / LOG)
        for line in lines[told:]:
            tell(line)
        told = len(lines)
        progress(max(len(_lines(folder / "rounds.csv")) - 1, 0))
        if (folder / "summary.json").exists() and not held:
            return
        if site.link.poll() is not None or (begun and not held) or (not begun and time.monotonic() > end):
            path = folder / ERROR
            why = path.read_text(encoding="utf-8").strip() if path.exists() else "The server ended."
            raise ApieceError(f"{why} See {folder / LOG} and {folder / HOME / 'link.log'}")
        site.tend()
        time.sleep(0.5)


def _held(path: Path) -> bool:
    """Does a process hold the lock?"""
    if not path.exists():
        return False
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def client_command(
    place: Place, server: str, device: str, key: Path | None, authority: Path | None, insecure: bool
) -> list[str]:
    """Flower's SuperNode for a client; what is the client's own goes through a file in its folder.

    `authority` None: the server's certificate is signed by one that everybody knows.
    """
    if not insecure and key is None:
        raise ApieceError(
            "give --key and --root-certificate (docs/federation.md says how to make them), or, where "
            "everybody on the network is trusted, --insecure"
        )
    place.state.mkdir(parents=True, exist_ok=True)
    own = {
        "data": str(place.data.resolve()),
        "state": str(place.state.resolve()),
        "name": place.name,
        "label_column": place.label_column,
        "device": device,
    }
    settings = place.state.resolve() / "client.toml"
    files.write_text(settings, to_toml(own) + "\n")
    command = ["flower-supernode", "--superlink", server, "--node-config", str(settings)]
    command += ["--host", "127.0.0.1", "--port", str(free_port())]
    if insecure:
        return [*command, "--insecure"]
    command += ["--auth-supernode-private-key", str(key)]
    return command if authority is None else [*command, "--root-certificates", str(authority)]


def run_client(command: list[str], state: Path) -> None:
    """Until stopped. A SuperNode that ends is started again: Flower sends a client that was killed away until
    it has noticed, after a minute, and one whose key it does not know yet, until it does."""
    signal.signal(signal.SIGTERM, _interrupted)
    home = environment((state / HOME).resolve())
    while True:
        process = subprocess.Popen(_bound(command, str(os.getpid())), env=home, stdin=subprocess.DEVNULL)
        try:
            process.wait()
            log.warning("the connection ended, or the server refused it; trying again in %g s", AGAIN)
            time.sleep(AGAIN)
        except KeyboardInterrupt:
            process.terminate()
            process.wait()
            return


def _interrupted(*_: object) -> None:
    raise KeyboardInterrupt
