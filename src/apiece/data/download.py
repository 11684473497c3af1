"""Downloads: the datasets that have a public address and may be had from it, into the data folder.

A file is fetched beside its place, checked against its published checksum and only then put there. What was
fetched of a file when a download broke off is kept: the next one asks for the rest.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tarfile
from collections.abc import Callable
from http.client import HTTPException, HTTPResponse
from pathlib import Path, PurePosixPath
from typing import NamedTuple
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from apiece.errors import ApieceError, unknown

Progress = Callable[[str, int, int], None]  # what is fetched, bytes so far, bytes in all (0: not known)

_BLOCK = 1 << 18
_PATIENCE = 60.0  # seconds without a byte
_PARTIAL, _BEYOND_THE_END = 206, 416


class Source(NamedTuple):
    """A file at a public address."""

    address: str
    checksum: str  # of MD5 or SHA-256, as it was published: told by its length
    folder: str  # where it goes, in the data folder
    members: tuple[str, ...] = ()  # of an archive: the files that are wanted of it

    @property
    def name(self) -> str:
        return PurePosixPath(self.address).name

    def places(self, root: Path) -> list[Path]:
        """The files that are there when all is done."""
        return [root / self.folder / PurePosixPath(member).name for member in self.members or (self.name,)]


def _idx(address: str, folder: str, *checksums: str) -> list[Source]:
    names = [
        f"{part}-{kind}-ubyte.gz" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")
    ]
    return [Source(f"{address}/{name}", sum_, folder) for name, sum_ in zip(names, checksums, strict=True)]


SOURCES: dict[str, list[Source]] = {
    "mnist": _idx(
        "https://ossci-datasets.s3.amazonaws.com/mnist",
        "MNIST/raw",
        "f68b3c2dcbeaaa9fbdd348bbdeb94873",
        "d53e105ee54ea40749a09fcbcd1e9432",
        "9fb629c4189551a2d022fa330f9573f3",
        "ec29112dd5afa0611ce80d1b7f02629c",
    ),
    "fashion_mnist": _idx(
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
        "FashionMNIST/raw",
        "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        "25c81989df183df01b3e8a0aad5dffbe",
        "bef4ecab320f06d8554ea6380940ec79",
        "bb300cfdad3c16e7a12a480ee83cd310",
    ),
    "cifar10": [
        Source(
            "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
            "c32a1d4ab5d03f1284b67883e8d87530",
            "cifar-10-batches-bin",
            (
                *(f"cifar-10-batches-bin/data_batch_{number}.bin" for number in range(1, 6)),
                "cifar-10-batches-bin/test_batch.bin",
            ),
        )
    ],
    "cifar100": [
        Source(
            "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
            "03b5dce01913d631647c71ecec9e9cb8",
            "cifar-100-binary",
            ("cifar-100-binary/train.bin", "cifar-100-binary/test.bin"),
        )
    ],
    "femnist": [
        Source(
            "https://storage.googleapis.com/tff-datasets-public/fed_emnist.tar.bz2",
            "fe1ed5a502cea3a952eb105920bff8cffb32836b5173cb18a57a32c3606f3ea0",
            "femnist",
            ("fed_emnist_train.h5", "fed_emnist_test.h5"),
        )
    ],
}

# Datasets that are fetched by hand, and why.
BY_HAND = {
    "movielens": "MovieLens-1M is for research and may not be handed on: read its terms, fetch ml-1m.zip at "
    "https://grouplens.org/datasets/movielens/1m/ and unpack it in the data folder.",
    "shakespeare": "Shakespeare by speaking role is made by preprocess.sh of LEAF "
    "(https://github.com/TalwalkarLab/leaf, data/shakespeare): copy its all_data.json, or the raw_data.txt "
    "that it fetches, into the folder shakespeare of the data folder.",
    "vehicle": "Vehicle has no lasting address: https://github.com/litian96/fair_flearn, data/vehicle, says "
    "where it is; put vehicle.mat into the folder vehicle of the data folder.",
}


def download(name: str, root: Path, progress: Progress = lambda what, done, total: None) -> list[Path]:
    """Fetch what is not in the data folder `root` yet; the files of the dataset."""
    if name not in SOURCES:
        raise unknown("dataset to download", name, [*SOURCES, *BY_HAND])
    for source in SOURCES[name]:
        if not all(place.exists() for place in source.places(root)):
            _fetch(source, root, progress)
    return [place for source in SOURCES[name] for place in source.places(root)]


def _fetch(source: Source, root: Path, progress: Progress) -> None:
    folder = root / source.folder
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f"{source.name}.part"
    try:
        _receive(source, part, progress)
    except (OSError, HTTPException) as error:
        kept = " What was fetched is kept: the same command goes on from there." if part.exists() else ""
        raise ApieceError(f"cannot fetch {source.address}: {error}.{kept}") from None
    found = _checksum(part, len(source.checksum))
    if found != source.checksum:
        part.unlink()
        raise ApieceError(
            f"{source.address} is not the file it was: its checksum is {found}, published was "
            f"{source.checksum}. It was deleted; try again, or fetch the dataset by hand."
        )
    if source.members:
        _unpack(source, part, root)
        part.unlink()
    else:
        os.replace(part, source.places(root)[0])


def _receive(source: Source, part: Path, progress: Progress) -> None:
    """All of the file into `part`, which may hold the beginning of it."""
    have = part.stat().st_size if part.exists() else 0
    try:
        answer = _ask(source.address, have)
    except HTTPError as error:
        if error.code != _BEYOND_THE_END or not have:
            raise
        return  # there is no more of it; the checksum tells whether it is right
    with answer:
        have = have if answer.status == _PARTIAL else 0
        left = answer.headers.get("Content-Length")
        total = have + int(left) if left is not None else 0
        with part.open("r+b" if have else "wb") as file:
            file.seek(have)
            while block := answer.read(_BLOCK):
                file.write(block)
                have += len(block)
                progress(source.name, have, total)
    if have < total:
        raise ConnectionError(f"the connection ended after {have} of {total} bytes")


def _ask(address: str, begin: int) -> HTTPResponse:
    headers = {"User-Agent": "apiece", "Accept-Encoding": "identity"}
    if begin:
        headers["Range"] = f"bytes={begin}-"
    answer: HTTPResponse = urlopen(Request(address, headers=headers), timeout=_PATIENCE)
    return answer


def _checksum(path: Path, length: int) -> str:
    # MD5 is what some were published with; it tells a damaged file, not a forged one.
    digest = hashlib.md5(usedforsecurity=False) if length == 32 else hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _unpack(source: Source, archive: Path, root: Path) -> None:
    """The wanted files alone, each whole or not at all."""
    with tarfile.open(archive) as tar:
        for member, place in zip(source.members, source.places(root), strict=True):
            inside = tar.extractfile(member) if member in tar.getnames() else None
            if inside is None:
                raise ApieceError(f"{source.address} holds no file {member}")
            draft = place.with_name(f"{place.name}.draft")
            with inside, draft.open("wb") as file:
                shutil.copyfileobj(inside, file)
            os.replace(draft, place)
