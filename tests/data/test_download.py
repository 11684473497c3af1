"""Downloads from a real HTTP server on this machine."""

from __future__ import annotations

import hashlib
import io
import re
import tarfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from apiece.data import download as downloads
from apiece.data.download import BY_HAND, SOURCES, Source, download
from apiece.errors import ApieceError
from tests.command import apiece

HELD = bytes(range(256)) * 4000  # more than one block


class Server:
    """Serves `files`, in the way of a server that can begin in the middle unless `ranges` is off."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.asked: list[tuple[str, str | None]] = []  # path, range
        self.ranges = True
        self.breaks_after: int | None = None  # bytes of an answer, then the connection ends

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        wanted = request.headers.get("Range")
        self.asked.append((request.path, wanted))
        held = self.files.get(request.path)
        if held is None:
            request.send_error(404)
            return
        begin = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted and self.ranges else 0
        if begin >= len(held) > 0 and wanted and self.ranges:
            request.send_response(416)
            request.send_header("Content-Length", "0")
            request.end_headers()
            return
        request.send_response(206 if wanted and self.ranges else 200)
        request.send_header("Content-Length", str(len(held) - begin))
        request.end_headers()
        request.wfile.write(held[begin:][: self.breaks_after])


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    served = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            served.answer(self)

        def log_message(self, *_: object) -> None:
            pass

    monkeypatch.setenv("no_proxy", "127.0.0.1")
    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, args=(0.01,))
    thread.start()
    sources = [
        Source(f"http://127.0.0.1:{http.server_port}/one.gz", hashlib.sha256(HELD).hexdigest(), "Thing/raw")
    ]
    monkeypatch.setitem(SOURCES, "thing", sources)
    served.files["/one.gz"] = HELD
    yield served
    http.shutdown()
    thread.join()
    http.server_close()


def test_a_file_is_fetched_checked_and_not_fetched_again(server, tmp_path):
    told: list[tuple[str, int, int]] = []
    (path,) = download("thing", tmp_path, lambda *news: told.append(news))
    assert path == tmp_path / "Thing" / "raw" / "one.gz"
    assert path.read_bytes() == HELD
    assert [p.name for p in path.parent.iterdir()] == ["one.gz"]
    assert len(told) > 1
    assert [done for _, done, _ in told] == sorted({done for _, done, _ in told})
    assert told[-1] == ("one.gz", len(HELD), len(HELD))
    download("thing", tmp_path)
    assert server.asked == [("/one.gz", None)]


def test_what_broke_off_goes_on_where_it_was(server, tmp_path):
    server.breaks_after = 300_000
    with pytest.raises(
        ApieceError, match=r"the connection ended after 300000 of 1024000 bytes.*goes on from there"
    ):
        download("thing", tmp_path)
    assert not (tmp_path / "Thing" / "raw" / "one.gz").exists()
    server.breaks_after = None
    told: list[tuple[str, int, int]] = []
    (path,) = download("thing", tmp_path, lambda *news: told.append(news))
    assert path.read_bytes() == HELD
    assert server.asked[1:] == [("/one.gz", "bytes=300000-")]
    assert told[0][1] > 300_000
    assert told[-1][2] == len(HELD)


def test_a_server_that_cannot_begin_in_the_middle_sends_all_of_it(server, tmp_path):
    part = tmp_path / "Thing" / "raw" / "one.gz.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(b"x" * 2_000_000)
    server.ranges = False
    assert download("thing", tmp_path)[0].read_bytes() == HELD


def test_a_part_that_is_all_there_is_only_checked(server, tmp_path):
    part = tmp_path / "Thing" / "raw" / "one.gz.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(HELD)
    assert download("thing", tmp_path)[0].read_bytes() == HELD


def test_a_wrong_file_is_refused_and_fetched_from_the_beginning_the_next_time(server, tmp_path):
    part = tmp_path / "Thing" / "raw" / "one.gz.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(b"wrong")
    with pytest.raises(
        ApieceError, match=r"one\.gz is not the file it was: its checksum is [0-9a-f]{64}, published"
    ):
        download("thing", tmp_path)
    assert list(part.parent.iterdir()) == []
    assert download("thing", tmp_path)[0].read_bytes() == HELD
    assert server.asked[-1] == ("/one.gz", None)


def test_an_address_that_does_not_answer_is_told(server, tmp_path):
    server.files.clear()
    with pytest.raises(ApieceError, match=r"cannot fetch http://127\.0\.0\.1:\d+/one\.gz: HTTP Error 404"):
        download("thing", tmp_path)


def test_of_an_archive_only_the_wanted_files_are_unpacked(server, tmp_path, monkeypatch):
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w:gz") as tar:
        for name in ("inside/a.bin", "../escaped", "inside/b.bin", "inside/other"):
            info = tarfile.TarInfo(name)
            info.size = len(name)
            tar.addfile(info, io.BytesIO(name.encode()))
    server.files["/all.tar.gz"] = held.getvalue()
    address = SOURCES["thing"][0].address.replace("one.gz", "all.tar.gz")
    md5 = hashlib.md5(held.getvalue(), usedforsecurity=False).hexdigest()
    source = Source(address, md5, "place", ("inside/a.bin", "inside/b.bin"))
    monkeypatch.setitem(SOURCES, "thing", [source])
    root = tmp_path / "data"
    a, b = download("thing", root)
    assert (a.read_text(), b.read_text()) == ("inside/a.bin", "inside/b.bin")
    assert {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()} == {
        "data/place/a.bin",
        "data/place/b.bin",
    }
    download("thing", root)
    assert len(server.asked) == 1
    monkeypatch.setitem(SOURCES, "thing", [source._replace(members=("inside/c.bin",))])
    with pytest.raises(ApieceError, match=r"holds no file inside/c\.bin"):
        download("thing", root)


def test_the_command_fetches_or_says_where(server, tmp_path, monkeypatch):
    outcome = apiece("download", "thing", "--data-dir", str(tmp_path / "there"), "--json")
    assert outcome.code == 0, outcome.err
    assert [Path(row["file"]).read_bytes() for row in outcome.json] == [HELD]
    monkeypatch.setenv("APIECE_DATA", str(tmp_path / "mine"))
    assert apiece("download", "thing").code == 0
    assert (tmp_path / "mine" / "Thing" / "raw" / "one.gz").read_bytes() == HELD
    by_hand = apiece("download", "movielens")
    assert by_hand.code == 0
    assert "grouplens.org" in by_hand.out
    assert "unknown dataset to download 'mnits': did you mean 'mnist'" in apiece("download", "mnits").err
    server.files.clear()
    failed = apiece("download", "thing", "--data-dir", str(tmp_path / "again"))
    assert failed.code == 2
    assert "404" in failed.err


def test_what_is_downloaded_is_where_its_loader_looks():
    """Names of datasets, checksums that are MD5 or SHA-256, and the folders of the loaders."""
    from apiece.data import DATASETS

    made = {"digits", "synthetic", "population"}
    assert set(SOURCES) | set(BY_HAND) == set(DATASETS) - made
    assert not set(SOURCES) & set(BY_HAND)
    for source in [source for sources in SOURCES.values() for source in sources]:
        assert re.fullmatch(r"[0-9a-f]{32}|[0-9a-f]{64}", source.checksum)
        assert source.address.startswith("http")
    places = {str(place) for name in SOURCES for s in SOURCES[name] for place in s.places(Path())}
    assert {
        "MNIST/raw/t10k-labels-idx1-ubyte.gz",
        "FashionMNIST/raw/train-images-idx3-ubyte.gz",
        "cifar-10-batches-bin/data_batch_5.bin",
        "cifar-10-batches-bin/test_batch.bin",
        "cifar-100-binary/train.bin",
        "femnist/fed_emnist_test.h5",
    } <= places
    assert len(places) == 4 + 4 + 6 + 2 + 2
    assert downloads.Source("http://a/b.tar.gz", "", "c").name == "b.tar.gz"
