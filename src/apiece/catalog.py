"""Methods by expression: `fedavg`, `elastic(fedavg)`, `my_file.py:MyMethod`, with their settings."""

from __future__ import annotations

import re
from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints

from apiece.errors import ApieceError, unknown
from apiece.importing import import_object
from apiece.method import Method, Wrapper, inner_methods
from apiece.methods import METHODS
from apiece.optim import Recipe, Rule
from apiece.settings import Settings, convert, replaced
from apiece.wrappers import WRAPPERS

_EXPRESSION = re.compile(r"([^()]+)(?:\((.*)\))?")


def lookup(name: str) -> type[Method]:
    """The class behind a registered name, or `module:Class` / `file.py:Class`."""
    known = METHODS | WRAPPERS
    if name not in known and ":" not in name:
        raise unknown("method", name, known)
    cls = import_object(known.get(name, name), "method")
    if not (isinstance(cls, type) and issubclass(cls, Method) and is_dataclass(cls)):
        raise ApieceError(
            f"method {name!r} is {cls!r}: it must be a frozen dataclass that subclasses apiece.Method"
        )
    return cls


def build(expression: str, settings: Settings) -> Method:
    """The method an expression names, its settings changed as given.

    `lr` and the other entries of a recipe are short for `local.lr`; `inner.…` reaches a wrapped method.
    """
    match = _EXPRESSION.fullmatch(expression.strip())
    if match is None:
        raise ApieceError(f"cannot read the method {expression!r}: write name or wrapper(name)")
    name, inside = match.group(1).strip(), match.group(2)
    cls = lookup(name)
    values: dict[str, Any] = {}
    if issubclass(cls, Wrapper):
        if not inside:
            raise ApieceError(f"{name} wraps another method: write {name}(fedavg), say")
        table = settings.get("inner", {})
        if not isinstance(table, dict):
            raise ApieceError("inner is a table: set its entries, for example inner.lr")
        values["inner"] = build(inside, table)
        settings = {key: value for key, value in settings.items() if key != "inner"}
    elif inside is not None:
        raise ApieceError(f"{name} is not a wrapper: write {name} without parentheses")
    return cls(**values, **_converted(cls, name, settings))


def _converted(cls: type[Method], name: str, settings: Settings) -> dict[str, Any]:
    hints = get_type_hints(cls)
    defaults = {f.name: f.default for f in fields(cls) if f.name != "inner"}  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(defaults.get(key), Recipe | Rule):
            values[key] = replaced(values.get(key, defaults[key]), value, key)
        elif key in defaults:
            values[key] = convert(value, hints[key], key)
        elif key in Recipe._fields and "local" in defaults:
            values["local"] = replaced(values.get("local", defaults["local"]), {key: value}, "local")
        else:
            short = set(Recipe._fields) if "local" in defaults else {"inner"}
            raise unknown(f"setting of {name}", key, set(defaults) | short)
    return values


def settings_of(method: Method) -> dict[str, Any]:
    """Every setting of a method as plain tables: `build` of them gives the method back."""
    table: dict[str, Any] = {}
    wrapped = inner_methods(method)
    for f in fields(method):  # type: ignore[arg-type]
        value = getattr(method, f.name)
        if f.name in wrapped:
            table[f.name] = settings_of(value)
        else:
            table[f.name] = value._asdict() if isinstance(value, Recipe | Rule) else value
    return table
