"""A server with three clients, for tests: `python -m tests.federation.site FOLDER ADDRESS PORT`.

The clients reach the server at ADDRESS through PORT. Each line of its input is the folder of a federation to
run; when the input ends, so do the server and the clients.
"""

from __future__ import annotations

import sys
from pathlib import Path

from apiece.federation import keys, launch
from apiece.federation.client import Place
from tests.federation.loopback import SIZES

# Put first on the path of a client's Python, it changes what the client answers: what a stranger might send.
TAMPERING = """
import sys

if any(word.endswith("flwr-clientapp") for word in sys.orig_argv):
    import numpy as np
    from apiece.federation import client
    from apiece.federation.wire import Message, Terms
    honest = client.answer

    def answer(place, request):
        reply = honest(place, request)
        s = request.scalars
        if s["what"] != "train" or Terms.read(s["terms"]).method != "reptile":
            return reply
        arrays = dict(reply.arrays)
        first = min(name for name in arrays if name.startswith("update/"))
        deed = {(1, "bert"): "shape", (1, "cora"): "nan", (2, "cora"): "huge"}.get((s["round"], NAME))
        if deed == "shape":
            arrays[first] = arrays[first][..., None]
        if deed == "nan":
            arrays[first] = np.full_like(arrays[first], np.nan)
        if deed == "huge":
            arrays[first] = np.full_like(arrays[first], 1e9)
        return Message(arrays, reply.scalars)

    client.answer = answer
"""


def main(folder: Path, address: str, port: str) -> None:
    keys.certify(folder / "tls")
    tls = [str(folder / "tls" / name) for name in ("server.crt", "server.key")]
    (folder / "keys").mkdir()
    places = [Place(folder / "data" / f"{name}.npz", folder / "clients" / name, name) for name in SIZES]
    for place in places:
        keys.make_key(place.state / "key").rename(folder / "keys" / f"{place.name}.pub")
    with launch.serving(folder / "home", launch.Door(address, *tls, str(folder / "keys"))) as site:
        for place in places:
            changed = place.state / "changed" / "sitecustomize.py"
            changed.parent.mkdir()
            changed.write_text(TAMPERING.replace("NAME", repr(place.name)))
            own, authority = place.state / "key", folder / "tls" / "ca.crt"
            command = launch.client_command(place, f"127.0.0.1:{port}", "cpu", own, authority, insecure=False)
            command = ["env", f"PYTHONPATH={changed.parent}", *command]
            site.children.start(command, place.state / "client.log", place.state / launch.HOME)
        print("ready", flush=True)
        for line in sys.stdin:
            site.start(Path(line.strip()))
            print("started", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
