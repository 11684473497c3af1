"""The gateway on real sockets: what clients need gets through, nothing else does."""

from __future__ import annotations

import http.client
import ssl
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'apiece[flower]'")

from apiece.errors import ApieceError
from apiece.federation import gateway, keys, launch

Call = Callable[..., tuple[int, bytes, str | None]]


class Echo(BaseHTTPRequestHandler):
    """A SuperLink that says what it got."""

    protocol_version = "HTTP/1.1"
    seen: list[str]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.seen.append(self.path)
        answer = f"{self.path} {self.headers['x-signature']} ".encode() + body
        self.send_response(412 if body == b"refuse" else 200)
        self.send_header("content-length", str(len(answer)))
        self.send_header("x-version", "1.41")
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def upstream() -> Iterator[tuple[str, list[str]]]:
    seen: list[str] = []
    with ThreadingHTTPServer(("127.0.0.1", 0), type("Told", (Echo,), {"seen": seen})) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}", seen
        server.shutdown()


@pytest.fixture(autouse=True)
def nothing_yet(upstream: tuple[str, list[str]]) -> None:
    upstream[1].clear()


@pytest.fixture(scope="module")
def call(upstream: tuple[str, list[str]], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Call]:
    """(path, body) → the answer through a gateway with TLS."""
    tmp_path = tmp_path_factory.mktemp("keys")
    keys.certify(tmp_path)
    port = launch.free_port()
    certificate = gateway.Certificate(tmp_path / "server.crt", tmp_path / "server.key")
    trust = ssl.create_default_context(cafile=tmp_path / "ca.crt")

    def post(path: str, body: bytes = b"hello", method: str = "POST") -> tuple[int, bytes, str | None]:
        connection = http.client.HTTPSConnection("127.0.0.1", port, context=trust, timeout=10)
        try:
            connection.request(method, path, body, {"x-signature": "s", "Connection": "close"})
            answer = connection.getresponse()
            return answer.status, answer.read(), answer.headers["x-version"]
        finally:
            connection.close()

    with gateway.opened(gateway.application(upstream[0], None), "127.0.0.1", port, certificate):
        yield post


def test_clients_calls_get_through_whole(call: Call) -> None:
    big = bytes(range(256)) * 4096
    assert call("/v1/fleet/pull-messages", big) == (200, b"/v1/fleet/pull-messages s " + big, "1.41")
    assert call("/v1/fleet/activate-node", b"refuse")[0] == 412


@pytest.mark.parametrize(
    "path",
    [
        "/v1/control/start-run",
        "/v1/runtime/acquire-task",
        "/v1/fleet/../control/start-run",
        "/v1/fleet/%2e%2e/control/start-run",
        "/v1/fleet/..%2fcontrol/start-run",
        "/v1/fleet//v1/control/start-run",
        "/v1/fleet/pull-messages/../../control/start-run",
        "/v1/fleet/pull-messages?x=1",
        "/v1/fleet/",
        "//v1/fleet/pull-messages",
        "/docs",
        "/",
    ],
)
def test_nothing_else_does(call: Call, upstream: tuple[str, list[str]], path: str) -> None:
    assert call(path)[0] == 404
    assert upstream[1] == []


def test_only_calls_of_a_known_size_are_read(
    call: Call, upstream: tuple[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway, "MOST", 4)
    assert call("/v1/fleet/push-object", b"12345")[0] == 413
    assert call("/v1/fleet/push-object", b"1234")[0] == 200
    assert call("/v1/fleet/push-object", method="GET")[0] == 405
    assert upstream[1] == ["/v1/fleet/push-object"]


def test_a_link_that_is_away_is_worth_another_try(tmp_path: Path) -> None:
    """503: Flower's clients wait and call again."""
    port = launch.free_port()
    app = gateway.application(f"http://127.0.0.1:{launch.free_port()}", None)
    with gateway.opened(app, "127.0.0.1", port, None):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        connection.request("POST", "/v1/fleet/pull-messages", b"", {"Connection": "close"})
        assert connection.getresponse().status == 503
        connection.close()


def test_a_port_that_is_taken_is_told(upstream: tuple[str, list[str]]) -> None:
    port = int(upstream[0].rpartition(":")[2])
    app = gateway.application("http://127.0.0.1:1", None)
    with (
        pytest.raises(ApieceError, match="Address already in use"),
        gateway.opened(app, "127.0.0.1", port, None),
    ):
        pass
