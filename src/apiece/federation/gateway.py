"""The gateway: the one door of a server. It lets through what clients need of Flower, and nothing else.

A SuperLink answers clients, and whoever steers it (starts programs on all clients, registers keys), on one
port, and of the latter it asks no proof. So it listens on this machine alone, and the gateway, at the address
that clients know, hands on the calls that Flower itself authenticates by the clients' keys.
"""

from __future__ import annotations

import logging
import re
import socket
import ssl
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from apiece.errors import ApieceError

CLIENTS = re.compile(rb"/v1/fleet/[a-z-]+")
MOST = 64 << 20  # bytes of one call; Flower cuts arrays into pieces of 5 MiB
DROPPED = {"host", "connection", "content-length", "transfer-encoding", "content-encoding", "keep-alive"}


class Certificate(NamedTuple):
    file: Path
    key: Path


def application(upstream: str, authority: Path | None) -> Starlette:
    """Hand clients' calls on to the SuperLink at `upstream`, whose certificate `authority` has signed."""
    verify = ssl.create_default_context(cafile=str(authority)) if authority is not None else False

    @asynccontextmanager
    async def connected(app: Starlette) -> AsyncIterator[dict[str, httpx.AsyncClient]]:
        async with httpx.AsyncClient(base_url=upstream, verify=verify, timeout=None, trust_env=False) as link:
            yield {"link": link}

    async def forward(request: Request) -> Response:
        # The bytes of the path as they came: what is normalized later would be another path.
        if not CLIENTS.fullmatch(request.scope["raw_path"]) or request.scope["query_string"]:
            return Response(status_code=404)
        length = request.headers.get("content-length", "")
        if not length.isdecimal() or int(length) > MOST:
            return Response(status_code=413)
        headers = [(name, value) for name, value in request.headers.items() if name not in DROPPED]
        try:
            link: httpx.AsyncClient = request.state.link
            found = await link.post(request.url.path, content=await request.body(), headers=headers)
        except httpx.TransportError:
            return Response(status_code=503)  # it starts or restarts: clients try again
        kept = {name: value for name, value in found.headers.items() if name not in DROPPED}
        return Response(found.content, found.status_code, kept)

    return Starlette(routes=[Route("/{path:path}", forward, methods=["POST"])], lifespan=connected)


@contextmanager
def opened(app: Starlette, host: str, port: int, certificate: Certificate | None) -> Iterator[None]:
    """Serve it in a thread."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        door = socket.create_server((host, port), family=family)
    except OSError as error:
        raise ApieceError(
            f"cannot listen at {host}:{port}: {error.strerror}. Give another --address"
        ) from error
    settings = uvicorn.Config(
        app,
        loop="asyncio",
        ws="none",
        timeout_graceful_shutdown=1,
        log_config=None,
        access_log=False,
        ssl_certfile=certificate and str(certificate.file),
        ssl_keyfile=certificate and str(certificate.key),
    )
    logging.getLogger("uvicorn").setLevel(logging.CRITICAL)  # connections that are cut at the end are no news
    server = uvicorn.Server(settings)
    thread = threading.Thread(target=server.run, args=([door],), name="gateway", daemon=True)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.05)
            if not thread.is_alive():
                raise ApieceError("the gateway does not start: are the certificate and its key a pair?")
        yield
    finally:
        server.should_exit = True
        thread.join(5)
        door.close()
