"""Shakespeare's plays by speaking role, as LEAF (Caldas et al. 2018) splits them: predict the next character.

A client is a role of a play with three lines or more. Its lines, one after another, are cut into sequences of
80 characters, y; x is the same text one character back, so that every character is predicted once from what
stands before it. Classes are the characters of ALPHABET, LEAF's, in its order; any other is a blank. x counts
them from 1, and 0 stands before the text; y is −1 behind a last, shorter sequence. The last fifth of a role's
lines, one at least, are the data's own test examples, as in McMahan et al. 2017.

Read are, under `shakespeare/`, LEAF's `all_data*.json`, whole or sampled by role, or else the text that LEAF
splits, Project Gutenberg's complete works (etext 100 of 1994): `raw_data.txt` or `raw_data.txt.xz`.

Departures: the text gives 1,143 roles and 4.33 million characters; LEAF reports 1,129 and 4.23, the notices
of the edition's owner among them, which are left out here, and the stage directions, which are kept. LEAF
makes an example of every character with the 80 before it in its line, and scores that character alone.
TensorFlow Federated predicts every character, as here, but cuts each speech by itself, between marks of its
beginning and end, and keeps 715 roles: 500 to train and 215 to personalize in Jiang et al. 2019. Here the
partition `natural:715` draws as many.
"""

from __future__ import annotations

import json
import lzma
import re
import string
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from apiece.data.federated import Examples
from apiece.data.place import Arrays, cached, missing
from apiece.errors import ApieceError

ALPHABET = "".join(sorted("\n !\"&'(),-.:;>?[]}" + string.digits + string.ascii_letters))
LENGTH = 80  # of a sequence

_LEAST_LINES = 3
_TEST = 0.2
_BY = "by William Shakespeare"
# A speech begins with its role and a full stop, indented by two; its further lines are indented by four.
_SPEECH, _MORE = re.compile(r"  ([A-Za-z][A-Za-z ]*)\. (.*)"), re.compile(r"    (.*)")
_FLAT = "THE COMEDY OF ERRORS"  # the one play where all is indented by two less
_POEMS = "THE SONNETS"


def load(folder: Path) -> Examples:
    """The roles in the data folder `folder`."""
    place = folder / "shakespeare"
    sources = sorted(place.glob("all_data*.json"))
    if not sources:
        sources = [path for path in (place / "raw_data.txt", place / "raw_data.txt.xz") if path.exists()][:1]
    if not sources:
        raise missing(
            "Shakespeare",
            folder,
            ("shakespeare/all_data*.json", "shakespeare/raw_data.txt", "shakespeare/raw_data.txt.xz"),
            "Make it with LEAF (TalwalkarLab/leaf, data/shakespeare): preprocess.sh -s niid --sf 1.0 -k 0 "
            "leaves both, the text in data/raw_data, the json in data/all_data.",
        )
    arrays = cached(folder, "shakespeare", sources, lambda: _made(sources))
    return Examples(
        x=arrays["x"],
        y=arrays["y"].astype(np.int64),
        classes=len(ALPHABET),
        label_names=tuple(ALPHABET),
        client=arrays["names"][arrays["client"]],
        test=arrays["test"],
    )


def _made(sources: list[Path]) -> Arrays:
    roles = _from_json(sources) if sources[0].suffix == ".json" else _from_text(sources[0])
    if not roles:
        raise ApieceError(f"{sources[0]} is not what LEAF splits or makes: there is no role of a play in it")
    parts, clients, tests = [], [], []
    for client, text in enumerate(roles.values()):
        lines = text.splitlines(keepends=True)
        held_out = max(int(_TEST * len(lines)), 1)
        for test, some in ((False, lines[:-held_out]), (True, lines[-held_out:])):
            parts.append(_sequences("".join(some)))
            clients.append(np.full(len(parts[-1]), client))
            tests.append(np.full(len(parts[-1]), test))
    both = np.concatenate(parts)
    return {
        "x": both[:, :-1],
        "y": both[:, 1:] - 1,
        "client": np.concatenate(clients),
        "test": np.concatenate(tests),
        "names": np.array(list(roles)),
    }


_NUMBERS = np.full(128, ALPHABET.index(" ") + 1, dtype=np.int8)  # by code; the last is in no alphabet
_NUMBERS[[ord(character) for character in ALPHABET]] = np.arange(1, len(ALPHABET) + 1)


def _sequences(text: str) -> NDArray[np.int8]:
    """Rows of a sequence's characters as numbers, the one before them in front, 0 behind a shorter one."""
    codes = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
    numbers = _NUMBERS[np.minimum(codes, len(_NUMBERS) - 1)]
    count = -(-len(numbers) // LENGTH)
    padded = np.zeros(count * LENGTH + 1, dtype=np.int8)
    padded[1 : len(numbers) + 1] = numbers
    at = np.arange(count)[:, None] * LENGTH + np.arange(LENGTH + 1)
    rows: NDArray[np.int8] = padded[at]
    return rows


def _from_text(path: Path) -> dict[str, str]:
    """Role → what it says."""
    try:
        held = path.read_bytes()
        lines = (lzma.decompress(held) if path.suffix == ".xz" else held).decode().splitlines()
    except (OSError, UnicodeDecodeError, lzma.LZMAError) as error:
        raise ApieceError(f"{path} cannot be read: {error}") from None
    begins = [at for at, line in enumerate(lines) if _BY in line]
    found: dict[str, str] = {}
    for begin, end in pairwise([*begins, len(lines)]):
        title = next((line.strip() for line in reversed(lines[:begin]) if line.strip()), "")
        roles: dict[str, list[str]] = {}
        for role, line in _spoken(title, lines[begin + 1 : end]) if title != _POEMS else ():
            roles.setdefault(role, []).append(re.sub("  +", " ", line))
        for role, said in roles.items():
            if len(said) >= _LEAST_LINES:
                found[re.sub(r"\W+", "_", f"{title}_{role}")] = "\n".join([*said, ""])
    return found


def _spoken(title: str, lines: list[str]) -> Iterator[tuple[str, str]]:
    """(role, line) of all that is said in a play."""
    role, notice = "", False
    for line in (f"  {line}" for line in lines) if title == _FLAT else lines:
        notice = notice or "<<" in line
        if notice:  # of who owns the edition, between << and >>
            role, notice = "", ">>" not in line
        elif begun := _SPEECH.match(line):
            role = "" if begun[1].startswith("ACT ") else begun[1].upper()
            if role:
                yield role, begun[2]
        elif role and (goes_on := _MORE.match(line)):
            yield role, goes_on[1]


def _from_json(paths: list[Path]) -> dict[str, str]:
    """Role → what it says: the characters to predict, one after another."""
    found: dict[str, str] = {}
    for path in paths:
        try:
            users: Mapping[str, Mapping[str, list[str]]] = json.loads(path.read_bytes())["user_data"]
            for role, data in users.items():
                if any(len(x) != LENGTH for x in data["x"]) or any(len(y) != 1 for y in data["y"]):
                    raise ValueError(f"the examples of {role} are not {LENGTH} characters and the next one")
                windows = zip(data["x"], data["y"], data["x"][1:], strict=False)
                if any(after != before[1:] + y and after.strip() for before, y, after in windows):
                    raise ValueError(f"some examples of {role} are missing: sample whole roles (-s niid)")
                found[role] = "".join(data["y"])
        except (OSError, KeyError, TypeError, AttributeError, ValueError) as error:
            raise ApieceError(f"{path} is no all_data.json of LEAF's Shakespeare: {error}") from None
    return {role: found[role] for role in sorted(found) if len(found[role].splitlines()) > 1}
