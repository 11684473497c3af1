"""Your own data: arrays, one file (.npz, .csv, .parquet) or a folder with one such file per client.

- .npz: arrays `x` (one row per example), `y` and `client` (or as client_column says); no pickled objects.
  `label_names`, if there, lists all labels in order, those that do not occur too.
- .csv and .parquet: a client column, a label column, and a feature in each other column.
- a folder: a file's name without its suffix is the client; a file without rows is a client without examples.

Labels are ints from 0, taken as they are, or strings, numbered in sorted order.
"""

from __future__ import annotations

import csv
import math
import re
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from apiece.data.federated import Examples, Ints
from apiece.errors import ApieceError

_MOST_CLASSES = 1_000_000  # a label beyond is an identifier, and a model's head would not fit in memory
SPARSE = 10  # labels beyond so many times the classes that are there, and as many more, are names
# What tables write for nothing.
MISSING = {"", "NA", "N/A", "#N/A", "<NA>", "NaN", "nan", "null", "NULL", "?"}
FEW = 20  # classes that nobody takes for measurements


def from_arrays(x: Any, y: Any, client_ids: Any, classes: int | None = None) -> Examples:
    """Row i is the example x[i] with label y[i] of client client_ids[i]; ids are ints or strings."""
    features, labels, client = _features(x), _column(y, "y"), _column(client_ids, "client ids")
    _same_length(features, labels, client)
    _some_rows(len(features))
    names = _label_names([labels])
    if classes is not None and labels.dtype.kind == "U" and classes != len(names):
        raise ApieceError(
            f"classes is {classes}, but y holds {len(names)} different strings: leave classes out"
        )
    if classes is not None and labels.dtype.kind != "U":
        names = _numbers(classes)
    return Examples(features, _encode(labels, names), len(names), names, client)


def save(path: Path, examples: Examples) -> None:
    """Keep what `from_arrays` made: `from_path` of the .npz file gives it back."""
    if examples.client is None or examples.client_names is not None or examples.test is not None:
        raise ApieceError("only examples that from_arrays made can be saved: name a file in experiment.data")
    names = np.array(examples.label_names)
    np.savez(path, x=examples.x, y=names[examples.y], client=examples.client, label_names=names)


def from_path(
    path: str | Path,
    client_column: str | None = "client",
    label_column: str = "label",
    label_names: Sequence[str] | None = None,
    alone: bool = False,
) -> Examples:
    """The examples in a file or folder.

    alone: the file is one client's; it may have a client column, which is no feature. client_column None: it
    has none. label_names: those of a run the data must fit, in its order.
    """
    path = Path(path)
    if not path.exists():
        raise ApieceError(f"no such file or folder: {path}")
    paths = _files(path) if path.is_dir() else [path]
    columns = _Columns(
        client_column,
        label_column,
        needs_client=not path.is_dir() and client_column is not None and not alone,
    )
    tables = [_read(file, columns) for file in paths]
    _agree(paths, tables)
    with _about(path):
        _some_rows(sum(len(table.x) for table in tables))
        listed = label_names or next((table.label_names for table in tables if table.label_names), ())
        names = tuple(listed) or _label_names([table.y for table in tables])
    labels = []
    for file, table in zip(paths, tables, strict=True):
        with _about(file):
            labels.append(_encode(table.y, names))
    x, y = np.concatenate([table.x for table in tables]), np.concatenate(labels)
    features = next((table.features for table in tables if table.features), ())
    if columns.needs_client:
        return Examples(x, y, len(names), names, tables[0].client, features=features)
    stems = tuple(file.stem for file in paths)
    client = np.repeat(stems, [len(table.x) for table in tables])
    return Examples(x, y, len(names), names, client, stems, features=features)


class _Columns(NamedTuple):
    """What to look for in a file. A client column that is not needed is no feature either."""

    client: str | None
    label: str
    needs_client: bool

    def check(self, names: Sequence[str], *needed: str) -> None:
        wanted = [*needed, self.client] if self.needs_client else needed
        missing = [name for name in wanted if name not in names]
        if missing:
            raise ApieceError(f"no {' and no '.join(map(repr, missing))}: the file has {', '.join(names)}")

    def features(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """The columns of a table that are neither client nor label."""
        if not names:
            raise ApieceError("the file is empty: its first line must name the columns")
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ApieceError(f"more than one column is called {twice[0]!r}")
        self.check(names, self.label)
        features = tuple(name for name in names if name not in (self.client, self.label))
        if not features:
            raise ApieceError("no feature column beside client and label")
        return features


class _Table(NamedTuple):
    """One file, before its labels are numbered."""

    x: NDArray[np.float32]
    y: NDArray[Any]  # int64 or strings
    client: NDArray[Any] | None
    features: tuple[str, ...] = ()  # the columns in x, where the format names them
    label_names: tuple[str, ...] = ()  # where the file lists them


def _read(path: Path, columns: _Columns) -> _Table:
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise ApieceError(f"{path}: the suffix must be one of {', '.join(_READERS)}, or give a folder")
    with _about(path):
        table = reader(path, columns)
        _same_length(*(part for part in (table.x, table.y, table.client) if part is not None))
        return table


def _files(folder: Path) -> list[Path]:
    """One per client, in the order of the clients' names."""
    files = [p for p in sorted(folder.iterdir()) if p.is_file() and not p.name.startswith(".")]
    found = [p for p in files if p.suffix.lower() in _READERS]
    if not found:
        raise ApieceError(f"{folder}: no file with one of the suffixes {', '.join(_READERS)}")
    stems = [p.stem for p in found]
    twice = sorted({stem for stem in stems if stems.count(stem) > 1})
    if twice:
        raise ApieceError(f"{folder}: more than one file of client {twice[0]!r}")
    return [found[i] for i in np.argsort(_values(stems))]


def _agree(paths: list[Path], tables: list[_Table]) -> None:
    first = tables[0]
    named = next((table.features for table in tables if table.features), ())
    for path, table in zip(paths, tables, strict=True):
        if table.x.shape[1:] != first.x.shape[1:]:
            raise ApieceError(
                f"{path}: features of shape {table.x.shape[1:]}, {paths[0]} has {first.x.shape[1:]}"
            )
        if table.features and table.features != named:
            raise ApieceError(f"{path}: feature columns {table.features}, other files have {named}")


def _npz(path: Path, columns: _Columns) -> _Table:
    if not zipfile.is_zipfile(path):
        raise ApieceError("not a .npz archive")
    try:
        with np.load(path, allow_pickle=False) as file:
            columns.check(file.files, "x", "y")
            wanted = ("x", "y", columns.client, "label_names")
            arrays = {name: file[name] for name in file.files if name in wanted}
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise ApieceError(f"cannot be read: {error}") from None
    ids = _column(arrays[columns.client], "client ids") if columns.client in arrays else None
    names = tuple(str(name) for name in arrays.get("label_names", ()))
    return _Table(_features(arrays["x"]), _column(arrays["y"], "y"), ids, label_names=names)


def _csv(path: Path, columns: _Columns) -> _Table:
    rows, lines = [], []
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file, strict=True)
            names = tuple(name.strip() for name in next(reader, ()))
            features = columns.features(names)
            for row in reader:
                if row and len(row) != len(names):
                    raise ApieceError(f"line {reader.line_num} has {len(row)} cells, the header {len(names)}")
                if row:
                    rows.append([cell.strip() for cell in row])
                    lines.append(reader.line_num)
    except UnicodeDecodeError:
        raise ApieceError("is not text in UTF-8: save it as that") from None
    except (OSError, csv.Error) as error:
        raise ApieceError(f"cannot be read: {error}") from None

    def refuse(row: int, name: str, problem: str) -> ApieceError:
        return ApieceError(f"line {lines[row]}, column {name!r}: {problem}")

    def keys(name: str) -> NDArray[Any]:
        cells = [row[names.index(name)] for row in rows]
        for row, cell in enumerate(cells):
            if cell in MISSING:
                told = f"{cell!r} stands for nothing" if cell else "the cell is empty"
                raise refuse(row, name, f"{told}: leave the row out, or give it a name of its own")
        return _values(cells)

    places = [names.index(name) for name in features]
    x = _float32([[_number(row[place]) for place in places] for row in rows]).reshape(len(rows), len(places))
    bad = np.argwhere(~np.isfinite(x))
    if len(bad):
        row, feature = bad[0]
        raise refuse(
            row,
            features[feature],
            f"{rows[row][places[feature]]!r} is not a finite number: write words as numbers, fill gaps, "
            f"or leave the column out",
        )
    ids = keys(columns.client) if columns.client in names else None
    return _Table(x, keys(columns.label), ids, features)


def _number(cell: str) -> float:
    try:
        return float(cell)
    except ValueError:
        return math.nan


def _values(cells: list[str]) -> NDArray[Any]:
    """As ints where every cell is one as Python writes it, so that turning them back loses nothing."""
    if all(re.fullmatch(r"0|-?[1-9][0-9]{0,17}", cell) for cell in cells):
        return np.array([int(cell) for cell in cells], dtype=np.int64)
    return np.array(cells, dtype=np.str_)


def _parquet(path: Path, columns: _Columns) -> _Table:
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError:
        raise ApieceError("a .parquet file needs pyarrow: pip install apiece[parquet]") from None
    try:
        table = parquet.ParquetFile(path).read()
    except (OSError, pa.ArrowException) as error:
        raise ApieceError(f"cannot be read: {error}") from None
    names: tuple[str, ...] = tuple(table.column_names)
    features = columns.features(names)
    x = []
    for name in features:
        kind = table.schema.field(name).type
        if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
            raise ApieceError(f"column {name!r} is not numeric but {kind}")
        x.append(table.column(name).cast(pa.float32(), safe=False).to_numpy())

    def keys(name: str) -> NDArray[Any]:
        return _column(table.column(name).to_pylist(), f"column {name!r}")

    ids = keys(columns.client) if columns.client in names else None
    return _Table(_features(np.stack(x, axis=1)), keys(columns.label), ids, features)


_READERS: dict[str, Callable[[Path, _Columns], _Table]] = {
    ".npz": _npz,
    ".csv": _csv,
    ".parquet": _parquet,
}


def _features(values: Any) -> NDArray[np.float32]:
    try:
        array = np.asarray(values)
        x = _float32(array) if array.dtype.kind in "biufO" else None
    except (TypeError, ValueError) as error:
        raise ApieceError(f"x must be an array of numbers: {error}") from None
    if x is None:
        raise ApieceError(f"x must be an array of numbers, got {array.dtype}")
    if x.ndim < 2 or 0 in x.shape[1:]:
        raise ApieceError(f"x must have one row per example and at least one feature, got shape {x.shape}")
    finite = np.isfinite(x).all(axis=tuple(range(1, x.ndim)))
    if not finite.all():
        raise ApieceError(f"x must be finite: row {int(finite.argmin())} (from 0) holds NaN or infinity")
    return x


def _float32(values: Any) -> NDArray[np.float32]:
    """A number too large becomes infinite, and is refused as such."""
    with np.errstate(over="ignore"):
        return np.asarray(values).astype(np.float32)


def _column(values: Any, what: str) -> NDArray[Any]:
    """Ints as int64, or strings."""
    array = np.asarray(values)
    if array.ndim != 1:
        raise ApieceError(f"{what} must have one entry per row, got shape {array.shape}")
    if array.dtype.kind in "biu" or not len(array):
        return array.astype(np.int64)
    # NumPy makes strings of a list in which a number or a NaN stands among strings
    items = list(values) if array.dtype.kind in "UO" else []
    if items and all(isinstance(item, str) for item in items):
        return np.array(items, dtype=np.str_)
    if items and all(isinstance(item, int | np.integer) for item in items):
        return np.array(items, dtype=np.int64)
    raise ApieceError(f"{what} must be all ints or all strings, none missing, got {array.dtype}")


def _numbers(classes: int) -> tuple[str, ...]:
    if classes < 1:
        raise ApieceError(f"classes must be at least 1, got {classes}")
    return tuple(str(label) for label in range(classes))


def _label_names(parts: list[NDArray[Any]]) -> tuple[str, ...]:
    """Of all parts together: strings anywhere make names of all; ints keep their numbers, for they count
    classes from 0, some of which nobody may have. Those that cannot, as years, are names.
    """
    parts = [part for part in parts if len(part)]
    if any(part.dtype.kind == "U" for part in parts):
        names = sorted({str(value) for part in parts for value in np.unique(part)})
    else:
        values = sorted({int(value) for part in parts for value in np.unique(part)})
        if values[0] < 0 or not SPARSE * (1 + len(values)) < values[-1] < _MOST_CLASSES:
            return _numbers(min(max(values[-1], 0) + 1, _MOST_CLASSES))
        names = [str(value) for value in values]
    _refuse_measurements(names, sum(map(len, parts)))
    return tuple(names)


def _refuse_measurements(labels: Sequence[str], rows: int) -> None:
    if 2 * len(labels) > rows and len(labels) > FEW and not any(math.isnan(_number(name)) for name in labels):
        raise ApieceError(
            f"the labels are {len(labels)} different numbers in {rows} rows, {labels[0]} among them: they "
            f"are to be classes. Write the class of each row, as a word or a whole number"
        )


def _encode(labels: NDArray[Any], names: tuple[str, ...]) -> Ints:
    """Each label's place in `names`; an int stands for its decimal form."""
    places = {name: place for place, name in enumerate(names)}
    values, inverse = np.unique(labels, return_inverse=True)
    numbered = np.array([places.get(str(value), -1) for value in values], dtype=np.int64)[inverse]
    if (numbered < 0).any():
        row = int((numbered < 0).argmax())
        counted = names == _numbers(len(names))
        known = f"0 to {len(names) - 1}" if counted else ", ".join(names)
        mend = ". Numbers count classes from 0; words may name them as well" if counted else ""
        raise ApieceError(
            f"labels out of range: {labels[row].item()!r} in row {row} (from 0); known: {known}{mend}"
        )
    return numbered


def _same_length(*parts: NDArray[Any]) -> None:
    lengths = [str(len(part)) for part in parts]
    if len(set(lengths)) > 1:
        raise ApieceError(f"x, y and clients must have equally many rows, got {', '.join(lengths)}")


def _some_rows(count: int) -> None:
    if count == 0:
        raise ApieceError("there are no examples")


@contextmanager
def _about(path: Path) -> Iterator[None]:
    try:
        yield
    except ApieceError as error:
        raise ApieceError(f"{path}: {error}") from None
