"""Errors a user can mend: what is wrong and what to do, shown without a traceback, exit code 2."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ApieceError(Exception):
    """A mistake in the input, the data or the folder, told in the user's words."""


def unknown(kind: str, name: str, known: Iterable[str]) -> ApieceError:
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return ApieceError(f"unknown {kind} {name!r}: {hint}known: {', '.join(names)}")
