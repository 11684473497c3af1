"""Methods by expression: `fedavg`, `elastic(fedavg)`, `my_file.py:MyMethod`, with their settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass, replace
from typing import Any, NamedTuple, get_type_hints

from apiece.errors import ApieceError, unknown
from apiece.importing import import_object
from apiece.method import Method, inner_methods
from apiece.methods import METHODS, VARIANTS
from apiece.optim import Recipe, Rule
from apiece.settings import Settings, convert, merged, replaced
from apiece.wrappers import WRAPPERS


class Described(NamedTuple):
    kind: str
    paper: str
    what: str


def names() -> list[str]:
    """Everything that has a name: methods and their variants, then wrappers."""
    return [*sorted(METHODS | VARIANTS), *sorted(WRAPPERS)]


def describe(name: str) -> Described:
    cls = lookup(name)
    if name in VARIANTS:
        return Described(cls.kind, VARIANTS[name].paper, VARIANTS[name].what)
    return Described(cls.kind, cls.paper, (cls.__doc__ or "").strip().splitlines()[0])


def lookup(name: str) -> type[Method]:
    """The class behind a registered name, or `module:Class` / `file.py:Class`."""
    if name in VARIANTS:
        name = VARIANTS[name].method
    known = METHODS | WRAPPERS
    if name.endswith(".py"):
        raise ApieceError(f"method {name!r} is a file: say which class of it, {name}:MyMethod")
    if name not in known and ":" not in name:
        raise unknown("method", name, known | VARIANTS)
    cls = import_object(known.get(name, name), "method")
    frozen = is_dataclass(cls) and cls.__dataclass_params__.frozen  # type: ignore[union-attr]
    if not (isinstance(cls, type) and issubclass(cls, Method) and frozen):
        raise ApieceError(
            f"method {name!r} is {cls!r}: it must be a frozen dataclass that subclasses apiece.Method"
        )
    return cls


def build(expression: str, settings: Settings) -> Method:
    """The method an expression names, its settings changed as given.

    `lr` and the other entries of a recipe are short for `local.lr`; `inner.…` reaches a wrapped method.
    """
    name, inside = _split(expression)
    cls = lookup(name)
    slots = _slots(cls)
    if inside and not slots:
        raise ApieceError(f"{name} is not a wrapper: write {name} without parentheses")
    if len(inside) != len(slots):
        wants = "another method" if len(slots) == 1 else f"{len(slots)} methods"
        raise ApieceError(f"{name} wraps {wants}: write {example(name)}, say")
    values = {slot: build(inner, _table(settings, slot)) for slot, inner in zip(slots, inside, strict=True)}
    if name in VARIANTS:
        settings = merged(VARIANTS[name].settings, settings)
    rest = {key: value for key, value in settings.items() if key not in slots}
    defaults = {f.name: f.default for f in fields(cls) if f.name not in slots}  # type: ignore[arg-type]
    values |= _converted(cls, name, rest, defaults)
    try:
        return cls(**values)
    except (TypeError, ValueError) as error:  # a setting that must be given, or that the method refuses
        raise ApieceError(f"method {name}: {error}") from error


def example(name: str) -> str:
    """An expression with that name that can be built: a wrapper around something."""
    slots = _slots(lookup(name))
    return f"{name}({','.join(['fedavg', 'reptile'][: len(slots)])})" if slots else name


def _slots(cls: type[Method]) -> list[str]:
    """The fields that hold the methods an expression must name."""
    hints = get_type_hints(cls)
    return [f.name for f in fields(cls) if f.default is MISSING and _is_method(hints[f.name])]  # type: ignore[arg-type]


def expressions(text: str) -> list[str]:
    """Expressions between commas outside parentheses."""
    found, depth = [""], 0
    for letter in text:
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if letter == "," and depth == 0:
            found.append("")
        else:
            found[-1] += letter
    return [one.strip() for one in found]


def _split(expression: str) -> tuple[str, list[str]]:
    """`elastic(fedavg)` → (elastic, [fedavg]); `fedavg` → (fedavg, [])."""
    expression = expression.strip()
    if expression.count("(") != expression.count(")"):
        raise ApieceError(f"method {expression!r}: parentheses are opened or closed too often")
    name, opened, rest = expression.partition("(")
    if expression.endswith(")") and opened:
        return name.strip(), [inner for inner in expressions(rest[:-1]) if inner]
    return expression, []


def _is_method(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, Method)


def _table(settings: Settings, name: str) -> Settings:
    table = settings.get(name, {})
    if not isinstance(table, Mapping):
        raise ApieceError(f"{name} is a table: set its entries, for example {name}.lr")
    return table


def _converted(cls: type[Method], name: str, settings: Settings, defaults: Settings) -> dict[str, Any]:
    """The settings as the types that the method's fields declare."""
    hints = get_type_hints(cls)
    short = isinstance(defaults.get("local"), Recipe)
    values: dict[str, Any] = {}
    for key, value in settings.items():
        default = values.get(key, defaults.get(key))
        if isinstance(default, Recipe | Rule):
            values[key] = replaced(default, value, key)
        elif isinstance(default, Method):
            values[key] = _changed(default, _table(settings, key), key)
        elif key in defaults:
            values[key] = convert(value, hints[key], key)
        elif key in Recipe._fields and short:
            values["local"] = replaced(values.get("local", defaults["local"]), {key: value}, "local")
        elif key in Recipe._fields:
            inside = next(f.name for f in fields(cls) if _is_method(hints[f.name]))  # type: ignore[arg-type]
            raise ApieceError(f"{key} is a setting of the method inside {name}: write {inside}.{key}")
        else:
            raise unknown(f"setting of {name}", key, {*defaults, *(Recipe._fields if short else _slots(cls))})
    return values


def _changed(method: Method, settings: Settings, name: str) -> Method:
    """A finished method with some settings changed; what its `personal` had from `local` follows `local`."""
    now = {f.name: getattr(method, f.name) for f in fields(method)}  # type: ignore[arg-type]
    values = _converted(type(method), name, settings, now)
    if "local" in values and "personal" not in values:
        old, new, personal = method.local, values["local"], method.personal
        same = {
            key: getattr(new, key) for key in Recipe._fields if getattr(personal, key) == getattr(old, key)
        }
        values["personal"] = personal._replace(**same)
    return replace(method, **values)  # type: ignore[type-var]


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
            if type(value) is tuple:  # as TOML reads it back
                table[f.name] = list(value)
    return table
