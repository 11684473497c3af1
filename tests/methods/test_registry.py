import json
import tomllib
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path

import pytest

import apiece
from apiece import catalog, check_method, descent
from apiece.methods import METHODS
from apiece.methods.fedavg import FedAvg
from apiece.settings import nested
from apiece.wrappers import WRAPPERS

SOURCE = Path(apiece.__file__).parent
EVERY_METHOD = [*map(catalog.example, catalog.names()), "elastic(elastic(reptile))"]


def test_every_file_has_its_line() -> None:
    files = {
        f"apiece.{folder}.{path.stem}"
        for folder in ("methods", "wrappers")
        for path in (SOURCE / folder).glob("[!_]*.py")
    }
    lines = METHODS | WRAPPERS
    assert {line.split(":")[0] for line in lines.values()} == files
    assert all(name == line.split(":")[0].rpartition(".")[2] for name, line in lines.items())


def test_the_layer_contract_knows_every_method() -> None:
    contracts = tomllib.loads((SOURCE.parents[1] / "pyproject.toml").read_text())["tool"]["importlinter"][
        "contracts"
    ]
    (independent,) = (c["modules"] for c in contracts if c["type"] == "independence")
    assert sorted(independent) == sorted(
        f"apiece.methods.{path.stem}" for path in (SOURCE / "methods").glob("[!_]*.py")
    )


@pytest.mark.parametrize("name", sorted(METHODS | WRAPPERS))
def test_each_is_a_described_frozen_dataclass(name: str) -> None:
    cls = catalog.lookup(name)
    assert is_dataclass(cls)
    assert cls.__dataclass_params__.frozen  # type: ignore[attr-defined]
    assert cls.__doc__
    assert cls.paper
    assert cls.kind in ("global", "meta", "personalized", "baseline")
    assert fields(cls)


@pytest.mark.parametrize("name", sorted(METHODS | WRAPPERS))
def test_what_is_searched_can_be_set(name: str) -> None:
    """Every setting of `search` takes the ends of its range, or each of its values."""
    cls, expression = catalog.lookup(name), catalog.example(name)
    for setting, values in cls.search.items():
        for value in values:
            catalog.build(expression, nested([f"{setting}={json.dumps(value)}"]))


@pytest.mark.parametrize("name", EVERY_METHOD)
def test_each_keeps_every_rule(name: str) -> None:
    check_method(catalog.build(name, {}))


@pytest.mark.parametrize("name", EVERY_METHOD)
def test_each_keeps_every_rule_with_large_layers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that a step keeps out of the gradient: here all are."""
    for threshold in ("SMALL", "SMALL_ALONE"):
        monkeypatch.setattr(descent, threshold, 0)
    check_method(catalog.build(name, {}))


def test_methods_are_final() -> None:
    with pytest.raises(TypeError, match="methods are final"):

        @dataclass(frozen=True)
        class Better(FedAvg):
            pass
