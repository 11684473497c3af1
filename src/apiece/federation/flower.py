"""Flower: the network of a federation, and what Flower runs on either side. Knows flwr."""

from __future__ import annotations

import fcntl
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, MessageType, RecordDict
from flwr.app import Message as Envelope
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from apiece.choice import pick_device
from apiece.errors import ApieceError
from apiece.federation import client, keys, server
from apiece.federation.launch import ERROR, HELD, HOME, LOG, Door
from apiece.federation.server import Plan
from apiece.federation.wire import Message

log = logging.getLogger("apiece")

ARRAYS, SCALARS = "arrays", "scalars"
POLL = 1.0  # seconds between two looks for replies: each costs a call for every client asked
LOOK = 3.0  # seconds for which the list of connected clients is taken to hold

server_app = ServerApp()
client_app = ClientApp()


@server_app.main()  # type: ignore[untyped-decorator]
def main(grid: Grid, context: Context) -> None:
    """The server's side: the rounds."""
    folder = Path(str(context.run_config["folder"]))
    with _held(folder / HOME / HELD), _logged(folder / LOG):
        door, plan = Door.read(folder), Plan.read(folder)
        try:
            server.host(folder, FlowerNetwork(grid, plan.rules.deadline, door.client_keys))
        except BaseException as error:
            if not isinstance(error, ApieceError):
                log.exception("the server failed")
            (folder / ERROR).write_text(f"{error or type(error).__name__}\n", encoding="utf-8")
            raise


@client_app.query()  # type: ignore[untyped-decorator]
def answer(message: Envelope, context: Context) -> Envelope:
    """The client's side: one request."""
    own = {name: str(value) for name, value in context.node_config.items()}
    device = pick_device(own["device"])
    place = client.Place(Path(own["data"]), Path(own["state"]), own["name"], own["label_column"], device)
    return Envelope(_content(client.answer(place, _message(message.content))), reply_to=message)


def _content(message: Message) -> RecordDict:
    arrays = ArrayRecord({name: Array(array) for name, array in message.arrays.items()})
    return RecordDict({ARRAYS: arrays, SCALARS: ConfigRecord(dict(message.scalars))})


def _message(content: RecordDict) -> Message:
    arrays = {name: array.numpy() for name, array in content.array_records[ARRAYS].items()}
    scalars = dict(content.config_records[SCALARS].items())
    return Message(arrays, scalars)


@contextmanager
def _held(path: Path) -> Iterator[None]:
    """Locked as long as this process lives: who started it sees when it is gone."""
    path.parent.mkdir(exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _logged(path: Path) -> Iterator[None]:
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%Y-%m-%d %H:%M:%S"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        handler.close()


class FlowerNetwork:
    """Messages through a SuperLink; clients are known by their keys where there is a folder of them."""

    def __init__(self, grid: Grid, deadline: float, client_keys: str) -> None:
        self._grid, self._deadline = grid, deadline
        self._keys = Path(client_keys) if client_keys else None
        self._waiting: set[str] = set()
        self._present: Mapping[str, str] = {}
        self._looked = -LOOK

    def present(self) -> Mapping[str, str]:
        if time.monotonic() - self._looked > LOOK:
            # A client that was restarted has lost what it was sent: it counts as another address.
            nodes = {
                f"{node.node_id} {node.last_activated_at}": node.public_key for node in self._grid.get_nodes()
            }
            known = keys.names(self._keys) if self._keys is not None else {}
            self._present = {
                address: known.get(_text(key), "")
                for address, key in nodes.items()
                if self._keys is None or _text(key) in known
            }
            self._looked = time.monotonic()
        return self._present

    def send(self, address: str, request: Message) -> str:
        content = _content(request)
        envelope = Envelope(content, int(address.split(maxsplit=1)[0]), MessageType.QUERY, ttl=self._deadline)
        (ticket,) = self._grid.push_messages([envelope]) or [None]
        self._waiting.add(str(ticket))
        return str(ticket)

    def replies(self) -> list[tuple[str, Message]]:
        found: list[tuple[str, Message]] = []
        for ticket in sorted(self._waiting):
            try:  # one by one: a reply that cannot be read costs no other
                for envelope in self._grid.pull_messages([ticket]):
                    self._waiting.discard(ticket)
                    if envelope.has_content():  # else the client is gone: if it comes back, it is asked again
                        found.append((ticket, _message(envelope.content)))
            except Exception as error:
                log.warning("a reply cannot be read (%s)", type(error).__name__)
                self._waiting.discard(ticket)
                found.append((ticket, Message({}, {})))
        if not found:
            time.sleep(POLL)
        return found


def _text(key: Any) -> str:
    return key.decode() if isinstance(key, bytes) else str(key)
