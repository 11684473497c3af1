import tomllib
from typing import Any

import pytest

from apiece import ApieceError, Experiment
from apiece.optim import Recipe
from apiece.settings import convert, nested, parse_flag, replaced, to_toml


@pytest.mark.parametrize(
    ("flag", "path", "value"),
    [
        ("lr=0.1", ["lr"], 0.1),
        ("inner.local.epochs=3", ["inner", "local", "epochs"], 3),
        ("optimizer=adam", ["optimizer"], "adam"),
        ('optimizer="adam"', ["optimizer"], "adam"),
        ("exact=true", ["exact"], True),
        ("heads=['a', 'b']", ["heads"], ["a", "b"]),
        ("name=a=b", ["name"], "a=b"),
    ],
)
def test_a_flag_is_read_as_toml_or_as_a_plain_string(flag: str, path: list[str], value: object) -> None:
    assert parse_flag(flag) == (path, value)


@pytest.mark.parametrize("flag", ["lr", "=3", "  =3"])
def test_a_flag_needs_a_key_and_a_value(flag: str) -> None:
    with pytest.raises(ApieceError, match=r"takes KEY=VALUE.*for example --set lr=0.1"):
        parse_flag(flag)


def test_flags_go_over_a_base_and_leave_it_alone() -> None:
    base = {"alpha": 0.5, "inner": {"lr": 0.1, "epochs": 2}}
    assert nested(["inner.lr=0.3", "beta=1"], base) == {
        "alpha": 0.5,
        "inner": {"lr": 0.3, "epochs": 2},
        "beta": 1,
    }
    assert base == {"alpha": 0.5, "inner": {"lr": 0.1, "epochs": 2}}


def test_a_value_is_no_table() -> None:
    with pytest.raises(ApieceError, match="'lr' is a single value, not a table"):
        nested(["lr=1", "lr.x=2"])


@pytest.mark.parametrize(
    ("value", "wanted", "result"),
    [
        (1, float, 1.0),
        (1, int, 1),
        ("a", str, "a"),
        (True, bool, True),
        ([1, 2], tuple[float, ...], (1.0, 2.0)),
    ],
)
def test_values_become_what_fields_declare(value: object, wanted: Any, result: object) -> None:
    found = convert(value, wanted, "x")
    assert (found, type(found)) == (result, type(result))


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        ("0.1", float),
        (True, float),
        (float("nan"), float),
        (1.5, int),
        (True, int),
        (1, str),
        (1, tuple[int, ...]),
    ],
)
def test_nothing_else_is_bent(value: object, wanted: Any) -> None:
    with pytest.raises(ApieceError, match=r"x must be (of type|a list)"):
        convert(value, wanted, "x")


def test_a_record_of_settings() -> None:
    assert replaced(Recipe(lr=0.1), {"epochs": 3}, "local") == Recipe(lr=0.1, epochs=3, steps=0)
    with pytest.raises(ApieceError, match=r"unknown setting of local 'epoch': did you mean 'epochs'\?"):
        replaced(Recipe(), {"epoch": 3}, "local")
    with pytest.raises(ApieceError, match=r"local is a table: set its entries, for example local.optimizer"):
        replaced(Recipe(), 3, "local")


def test_toml_is_read_back_as_it_was() -> None:
    value = {
        "name": 'a "quoted" \\ path, ü',
        "small": 1e-08,
        "large": 1e20,
        "none": float("inf"),
        "whole": 3,
        "yes": True,
        "heads": ["a", "b"],
        "sizes": [],
        "settings": {"alpha": 0.5, "inner": {"local": {"lr": 0.1}}, "empty": {}},
    }
    read = tomllib.loads(to_toml(value))
    value["settings"].pop("empty")  # type: ignore[attr-defined]
    assert read == value


def test_a_run_has_one_id_however_its_numbers_are_written() -> None:
    assert Experiment(unseen=5, test=0).id == Experiment(unseen=5.0, test=0.0).id
