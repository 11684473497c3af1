"""The processes of a federation: Flower's SuperLink behind a gateway, its SuperNodes, and their end."""

from __future__ import annotations

import ctypes
import fcntl
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, NoReturn

from apiece import folder as files
from apiece.errors import ApieceError
from apiece.federation.client import Place
from apiece.settings import to_toml

log = logging.getLogger("apiece")

DOOR, LOG, ERROR = "door.json", "federation.log", "error.txt"  # in the run's folder
HOME = "flower"  # what Flower keeps, in the run's folder and in each client's
HELD = "server.lock"  # in HOME: locked as long as the rounds are being run
STARTS = 180.0  # seconds that Flower may take to begin
PATIENCE = 5.0  # seconds that processes may take to end by themselves

# A fresh Python asks the kernel to end it when its parent ends, in whatever way; then it becomes the command.
_BOUND = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); "
    "os.getppid() == int(sys.argv[1]) or sys.exit(); os.execvp(sys.argv[2], sys.argv[2:])"
)
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
    if shutil.which("flower-superlink", path=_path()) is None:
        raise ApieceError("a federation needs Flower: pip install 'apiece[flower]'")


def _path() -> str:
    """Flower starts its own commands by name: those beside this Python come first."""
    return f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"


def environment(home: Path) -> dict[str, str]:
    """Flower offline: nothing is reported, looked up or installed."""
    return {
        **os.environ,
        "PATH": _path(),
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
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
        self._before = set(_children())
        ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
        return self

    def start(self, command: list[str], output: Path, home: Path) -> subprocess.Popen[bytes]:
        bound = [sys.executable, "-S", "-c", _BOUND, str(os.getpid()), *command]
        with output.open("ab") as out:
            child = subprocess.Popen(
                bound, env=environment(home), stdin=subprocess.DEVNULL, stdout=out, stderr=out
            )
        self._started.append(child)
        return child

    def __exit__(self, *_: object) -> None:
        for wanted in (signal.SIGTERM, signal.SIGKILL):
            for pid in self._left():
                os.kill(pid, wanted)
            end = time.monotonic() + PATIENCE
            while self._left() and time.monotonic() < end:
                time.sleep(0.05)
        for child in self._started:
            child.poll()
        ctypes.CDLL(None).prctl(_SUBREAPER, 0, 0, 0, 0)

    def _left(self) -> set[int]:
        """Those alive: what was started, and what that started and left behind; the ended ones are buried."""
        for pid in set(_children()) - self._before:
            os.waitpid(pid, os.WNOHANG)
        return set(_children()) - self._before


def _children() -> list[int]:
    text = " ".join(path.read_text() for path in Path("/proc/self/task").glob("*/children"))
    return [int(pid) for pid in text.split()]


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
        for line in told.splitlines():
            if (
                line.startswith("error:") and "already" not in line.lower()
            ):  # by a server that was here before
                raise ApieceError(f"Flower: {line}")
        self._registered |= set(fresh)

    def start(self, folder: Path) -> None:
        """Begin the rounds of the federation that is planned in `folder`."""
        app = self._home / "app"
        app.mkdir(exist_ok=True)
        place = "apiece.federation.flower"
        table = {
            "project": {"name": "apiece-federation", "version": "0.1.0", "dependencies": []},
            "tool": {"flwr": {"app": {"publisher": "apiece"}}},
        }
        table["tool"]["flwr"]["app"] |= {
            "components": {"serverapp": f"{place}:server_app", "clientapp": f"{place}:client_app"},
            "config": {"folder": str(folder.resolve())},
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
        app = gateway.application(link.url, authority)
        with gateway.opened(app, host.strip("[]"), int(port), certificate):
            steering = _Steering(home, link.address, authority)
            site = Site(children, steering, door.client_keys, link.process)
            site.tend()
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
    with files.locked(folder), serving(folder / HOME, Door.read(folder)) as site:
        (folder / HOME / HELD).unlink(missing_ok=True)
        site.start(folder)
        beside(site.children)
        watch(folder, site, progress, tell)


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


def watch(folder: Path, site: Site, progress: Callable[[int], None], tell: Callable[[str], None]) -> None:
    """Until the run in `folder` is over."""
    told, begun, end = 0, False, time.monotonic() + STARTS
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
    """Flower's SuperNode for a client; what is the client's own goes through a file in its folder."""
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
    if key is None or authority is None:
        raise ApieceError(
            "give --key and --root-certificate (docs/federation.md says how to make them), or, where "
            "everybody on the network is trusted, --insecure"
        )
    return [*command, "--auth-supernode-private-key", str(key), "--root-certificates", str(authority)]


def become_client(command: list[str], state: Path) -> NoReturn:
    """This process turns into the SuperNode: whoever started it can watch it and stop it."""
    require_flower()
    sys.stdout.flush()
    os.execvpe(command[0], command, environment(state / HOME))
