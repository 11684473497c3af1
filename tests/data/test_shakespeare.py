import json
import lzma
import string
from pathlib import Path

import numpy as np
import pytest

from apiece.data import shakespeare
from apiece.data.federated import Examples
from apiece.data.shakespeare import ALPHABET
from apiece.errors import ApieceError

NOTICE = """\
<<THIS ELECTRONIC VERSION IS COPYRIGHT BY A LIBRARY, AND
PROVIDED WITH PERMISSION.  ELECTRONIC COPIES MAY BE MADE.  NOBODY. Pays for them.
    A LINE OF FOUR BLANKS.>>
"""

TEXT = f"""\
The Complete Works of William Shakespeare

1609

THE SONNETS

by William Shakespeare

  From fairest. creatures we desire increase,
    That thereby beauty's rose might never die,
    But as the riper should by time decease,
  Two loves. I have of comfort and despair
    one
    two

1606


THE TRAGEDY OF MACBETH


by William Shakespeare


Dramatis Personae

  DUNCAN, King of Scotland

{NOTICE}
ACT I. SCENE I.
A desert place.

  FIRST WITCH. When shall we three meet   again?
    In thunder, lightning, or in rain?
  Second Witch. When the hurlyburly's done,
    When the battle's lost and won.
                                        Exeunt.
  DUNCAN. What bloody man is that?
{NOTICE}
    This is said by nobody.
  SECOND WITCH. Once more.
  FIRST WITCH. Where the place?

1593

THE COMEDY OF ERRORS

by William Shakespeare

AEGEON. Proceed, Solinus, to procure my fall,
  And by the doom of death
  end woes and all.
<Exit
ACT II. SCENE 1
  Nobody says this.
DUKE. Merchant of Syracuse, plead no more;
  I am not partial

THE END
"""

MACBETH, ERRORS = "THE_TRAGEDY_OF_MACBETH", "THE_COMEDY_OF_ERRORS"
ROLES = {
    f"{MACBETH}_FIRST_WITCH": [
        "When shall we three meet again?",
        "In thunder, lightning, or in rain?",
        "Where the place?",
    ],
    f"{MACBETH}_SECOND_WITCH": [
        "When the hurlyburly's done,",
        "When the battle's lost and won.",
        " Exeunt.",
        "Once more.",
    ],
    f"{ERRORS}_AEGEON": [
        "Proceed, Solinus, to procure my fall,",
        "And by the doom of death",
        "end woes and all.",
    ],
}


def put(place: Path, name: str, content: bytes) -> Path:
    (place / "shakespeare").mkdir(exist_ok=True)
    (place / "shakespeare" / name).write_bytes(content)
    return place


def as_text(place: Path) -> Path:
    return put(place, "raw_data.txt", TEXT.encode())


def as_xz(place: Path) -> Path:
    return put(place, "raw_data.txt.xz", lzma.compress(TEXT.encode()))


def leaf(roles: dict[str, list[str]]) -> dict[str, dict[str, list[str]]]:
    """Of every character of a line, with its end, the 80 before it, blanks before the first."""
    found: dict[str, dict[str, list[str]]] = {}
    for role, lines in roles.items():
        padded = [" " * 80 + line + "\n" for line in lines]
        pairs = [(line[i : i + 80], line[i + 80]) for line in padded for i in range(len(line) - 80)]
        found[role] = {"x": [x for x, _ in pairs], "y": [y for _, y in pairs]}
    return found


def as_json(place: Path) -> Path:
    """Two files, as LEAF cuts large ones."""
    for at, (role, data) in enumerate(leaf(ROLES).items()):
        whole = {"users": [role], "num_samples": [len(data["y"])], "user_data": {role: data}}
        put(place, f"all_data_{at}.json", json.dumps(whole).encode())
    return place


FORMS = pytest.mark.parametrize("form", [as_text, as_xz, as_json])


def said(examples: Examples, role: str, test: bool) -> str:
    """What the labels of a role spell, one sequence after another."""
    assert examples.client is not None
    assert examples.test is not None
    labels = examples.y[(examples.client == role) & (examples.test == test)]
    return "".join(ALPHABET[label] for label in labels.ravel() if label >= 0)


@FORMS
def test_every_role_says_its_lines_the_last_fifth_in_the_test(tmp_path, form):
    """Of three or four lines one: a fifth is less than one."""
    examples = shakespeare.load(form(tmp_path))
    assert set(examples.client) == set(ROLES)
    for role, lines in ROLES.items():
        assert said(examples, role, False) == "".join(f"{line}\n" for line in lines[:-1])
        assert said(examples, role, True) == f"{lines[-1]}\n"


def test_a_fifth_of_many_lines_is_the_test(tmp_path):
    lines = [f"line {i}" for i in range(16)]
    whole = {"user_data": leaf({"A": lines})}
    examples = shakespeare.load(put(tmp_path, "all_data.json", json.dumps(whole).encode()))
    assert said(examples, "A", True) == "line 13\nline 14\nline 15\n"


@FORMS
def test_inputs_are_the_text_one_character_back(tmp_path, form):
    examples = shakespeare.load(form(tmp_path))
    for role in ROLES:
        for test in (False, True):
            at = (examples.client == role) & (examples.test == test)
            x, y = examples.x[at].ravel().astype(int), examples.y[at].ravel()
            length = (y >= 0).sum()
            assert x[0] == 0
            assert (x[1:length] == y[: length - 1] + 1).all()
            assert (y[length:] == -1).all()


def test_a_text_is_cut_every_eighty_characters(tmp_path):
    """161 characters and the end of the line are 80 + 80 + 2; each part begins with the one before it."""
    line = (string.ascii_letters * 4)[:161]
    whole = {"user_data": leaf({"A": [line, "x"]})}
    examples = shakespeare.load(put(tmp_path, "all_data.json", json.dumps(whole).encode()))
    train = np.flatnonzero(~examples.test)
    assert examples.x.shape[1:] == examples.y.shape[1:] == (80,)
    assert (examples.y[train] >= 0).sum(1).tolist() == [80, 80, 2]
    firsts = [0, 1 + ALPHABET.index(line[79]), 1 + ALPHABET.index(line[159])]
    assert examples.x[train][:, 0].tolist() == firsts


def test_the_alphabet_is_leafs(tmp_path):
    assert len(ALPHABET) == len(set(ALPHABET)) == 80
    examples = shakespeare.load(as_text(tmp_path))
    assert examples.classes == len(examples.label_names) == 80
    assert examples.x.dtype == np.int8  # bytes would be taken for pixels


def test_other_characters_are_blanks(tmp_path):
    whole = {"user_data": leaf({"A": ["naïve → ok", "x"]})}
    examples = shakespeare.load(put(tmp_path, "all_data.json", json.dumps(whole).encode()))
    assert said(examples, "A", False) == "na ve   ok\n"


# What is wrong is told


def test_missing_files(tmp_path):
    with pytest.raises(ApieceError, match=r"Shakespeare is not in the data folder .*LEAF"):
        shakespeare.load(tmp_path)


def test_a_text_without_plays(tmp_path):
    with pytest.raises(ApieceError, match="there is no role of a play in it"):
        shakespeare.load(put(tmp_path, "raw_data.txt", b"Sing, O goddess, the anger of Achilles\n"))


@pytest.mark.parametrize(("name", "content"), [("raw_data.txt", b"\xff"), ("raw_data.txt.xz", b"plain")])
def test_files_that_cannot_be_read(tmp_path, name, content):
    with pytest.raises(ApieceError, match="cannot be read"):
        shakespeare.load(put(tmp_path, name, content))


def sampled() -> dict[str, dict[str, list[str]]]:
    found = leaf({"A": ["To be, or not to be", "that is the question"]})
    return {"A": {name: values[::3] for name, values in found["A"].items()}}


@pytest.mark.parametrize(
    ("whole", "message"),
    [
        ({}, "is no all_data.json"),
        ([1], "is no all_data.json"),
        ({"user_data": {"A": {"x": ["short"], "y": ["c"]}}}, "not 80 characters"),
        ({"user_data": {"A": {"x": ["x" * 80], "y": ["cd"]}}}, "not 80 characters"),
        ({"user_data": {}}, "there is no role of a play in it"),
        ({"user_data": sampled()}, "examples of A are missing: sample whole roles"),
    ],
)
def test_json_that_is_something_else(tmp_path, whole, message):
    with pytest.raises(ApieceError, match=message):
        shakespeare.load(put(tmp_path, "all_data.json", json.dumps(whole).encode()))
