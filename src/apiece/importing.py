"""Objects by name: `package.module:attribute` or `path/to/file.py:attribute`."""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import re
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from apiece import random
from apiece.errors import ApieceError, unknown

_IN_FILE = r"[^(),]+\.py(?=:)"
FILES: dict[str, Path] = {}  # imported so far, by the name of their module


def import_object(spec: str, kind: str) -> Any:
    """What `spec` names; `kind` says in error messages what it was to be.

    The current folder comes first on sys.path, as with `python -m`, and stays there for later imports.
    """
    source, _, attribute = spec.rpartition(":")
    if not source or not attribute:
        raise ApieceError(f"{kind} {spec!r}: write package.module:name or path/to/file.py:name")
    try:
        module = _import(source)
    except Exception as error:  # whatever the module's own code raises
        reason = f"{type(error).__name__}: {error}"
        raise ApieceError(f"cannot import {source!r} for the {kind} {spec!r}: {reason}") from error
    try:
        return getattr(module, attribute)
    except AttributeError:
        public = [name for name, value in vars(module).items() if callable(value) and name[0] != "_"]
        raise unknown(f"{kind} in {source}", attribute, public) from None


def anchored(expression: str) -> str:
    """An expression with every `file.py:name` in it made absolute, so that it can be read from anywhere."""
    return re.sub(_IN_FILE, lambda match: str(Path(match[0].strip()).resolve()), expression)


def code(*expressions: str) -> str:
    """A hash of the files in expressions: of what they do, not of comments and layout. Empty: no files."""
    files = sorted({Path(name) for text in expressions for name in re.findall(_IN_FILE, anchored(text))})
    if not files:
        return ""
    parsed = [ast.dump(ast.parse(file.read_text(encoding="utf-8"))) for file in files]
    return hashlib.sha256("\n".join(parsed).encode()).hexdigest()[:16]


def own_lines(error: BaseException) -> list[str]:
    """Where an error came by in files imported here: file, line and what stands there."""
    own = {str(path): path.name for path in FILES.values()}
    return [
        f"{own[frame.filename]}:{frame.lineno} in {frame.name}: {frame.line}"
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename in own
    ]


def _import(source: str) -> ModuleType:
    _search(Path.cwd())
    if source.endswith(".py"):
        return import_file(Path(source).resolve())
    return importlib.import_module(source)


def _search(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def import_file(path: Path) -> ModuleType:
    """The module of a file, run once, under a name that no other file has; it finds its neighbours."""
    name = f"{path.stem}_{random.fold(0, str(path)) % 2**32:08x}"
    if name in sys.modules:
        return sys.modules[name]
    _search(path.parent)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    FILES[name] = path
    return module
