"""Values from flags and TOML, turned into the types that dataclass fields declare."""

from __future__ import annotations

import copy
import json
import math
import re
import tomllib
from collections.abc import Mapping
from typing import Any, get_args, get_origin, get_type_hints

from apiece.errors import ApieceError, unknown

Settings = Mapping[str, Any]


def parse_flag(text: str) -> tuple[list[str], Any]:
    """`inner.lr=0.1` → (["inner", "lr"], 0.1): the value as TOML reads it, else as a plain string."""
    path, equals, value = text.partition("=")
    if not equals or not path.strip():
        raise ApieceError(f"--set takes KEY=VALUE, got {text!r}; for example --set lr=0.1")
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value
    return path.strip().split("."), parsed


def parse_seeds(text: str) -> list[int]:
    """`0-2,7` → [0, 1, 2, 7]."""
    seeds: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part)
        if match is None or (match[2] and int(match[2]) < int(match[1])):
            raise ApieceError(f"--seeds takes 0-4 or 0,3,7, got {text!r}")
        seeds += range(int(match[1]), int(match[2] or match[1]) + 1)
    return list(dict.fromkeys(seeds))


def nested(flags: list[str], base: Settings | None = None) -> dict[str, Any]:
    """`--set` flags as one nested table, over `base`."""
    table: dict[str, Any] = copy.deepcopy(dict(base or {}))
    for flag in flags:
        path, value = parse_flag(flag)
        place = table
        for name in path[:-1]:
            place = place.setdefault(name, {})
            if not isinstance(place, dict):
                raise ApieceError(f"--set {flag}: {name!r} is a single value, not a table")
        place[path[-1]] = value
    return table


def merged(base: Settings, over: Settings) -> dict[str, Any]:
    """`over` on top of `base`, table by table."""
    table = dict(base)
    for key, value in over.items():
        below = table.get(key)
        if isinstance(below, Mapping) and isinstance(value, Mapping):
            value = merged(below, value)
        table[key] = value
    return table


def convert(value: Any, wanted: Any, name: str) -> Any:
    """`value` as the type `wanted`; an int passes for a float, nothing else is bent. NaN is no number."""
    if get_origin(wanted) is tuple:
        inside = get_args(wanted)[0]
        if isinstance(value, list | tuple):
            return tuple(convert(item, inside, name) for item in value)
        raise ApieceError(f"{name} must be a list, written [...], got {value!r}")
    if wanted is float and isinstance(value, int | float) and not isinstance(value, bool):
        if not math.isnan(value):
            return float(value)
    elif isinstance(value, wanted) and not (wanted is int and isinstance(value, bool)):
        return value
    kind = getattr(wanted, "__name__", str(wanted))
    raise ApieceError(f"{name} must be of type {kind}, got {value!r}")


def replaced(record: Any, values: Any, name: str) -> Any:
    """A NamedTuple of settings (Recipe, Rule) with some of its fields replaced."""
    if not isinstance(values, Mapping):
        raise ApieceError(f"{name} is a table: set its entries, for example {name}.{record._fields[0]}")
    hints = get_type_hints(type(record))
    for key in values:
        if key not in hints:
            raise unknown(f"setting of {name}", key, hints)
    changes = {k: convert(v, hints[k], f"{name}.{k}") for k, v in values.items()}
    # Whoever sets epochs wants epochs, whatever number of steps stood there.
    return record._replace(**({"steps": 0} if "epochs" in changes else {}) | changes)


def to_toml(table: Mapping[str, Any], path: str = "") -> str:
    """TOML text of strings, numbers, bools, arrays of them and tables."""
    plain = {
        key: value for key, value in table.items() if not isinstance(value, Mapping) and value is not None
    }
    lines = [f"{key} = {_toml(value)}" for key, value in plain.items()]
    head = [f"\n[{path}]"] if path and lines else []
    tables = [
        to_toml(value, f"{path}.{key}" if path else key)
        for key, value in table.items()
        if isinstance(value, Mapping)
    ]
    return "\n".join([*head, *lines, *(text for text in tables if text)])


def _toml(value: Any) -> str:
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(_toml(item) for item in value)}]"
    return json.dumps(value, ensure_ascii=False)
