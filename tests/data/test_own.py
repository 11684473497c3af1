from __future__ import annotations

import sys

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet

from apiece.data import from_arrays, from_path
from apiece.data.federated import federate
from apiece.data.partition import deal
from apiece.errors import ApieceError

X = [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]


def write(path, text: str):
    path.write_text(text, encoding="utf-8")
    return path


def npz(path, **arrays):
    np.savez(path, **{name: np.asarray(array) for name, array in arrays.items()})
    return path


def table(path, **columns):
    parquet.write_table(pa.table(columns), path)
    return path


# --- arrays ---------------------------------------------------------------------------------------------


def test_int_labels_stay_as_they_are():
    data = from_arrays(X, [4, 0, 2], [7, 7, 3])
    assert data.x.dtype == np.float32
    assert data.x.tolist() == X
    assert data.y.tolist() == [4, 0, 2]
    assert data.y.dtype == np.int64
    assert data.classes == 5
    assert data.label_names == ("0", "1", "2", "3", "4")
    assert deal("natural", data, 0, 0)[1] == ["3", "7"]


def test_given_classes_may_exceed_those_seen():
    assert from_arrays(X, [0, 1, 0], [0, 0, 0], classes=4).label_names == ("0", "1", "2", "3")


def test_string_labels_are_numbered_in_sorted_order():
    data = from_arrays(X, ["dog", "ant", "dog"], ["b", "a", "b"], classes=2)
    assert data.y.tolist() == [1, 0, 1]
    assert data.label_names == ("ant", "dog")


@pytest.mark.parametrize("kind", [np.asarray, torch.as_tensor, list, lambda v: np.array(v, dtype=object)])
def test_what_looks_like_an_array_is_one(kind):
    data = from_arrays(kind(X), kind([1, 0, 1]), kind([5, 5, 6]))
    assert data.x.tolist() == X
    assert data.y.tolist() == [1, 0, 1]
    assert data.client.tolist() == [5, 5, 6]


def test_object_arrays_of_strings_and_bools_are_labels():
    assert from_arrays(X, np.array(["b", "a", "b"], dtype=object), [0, 0, 0]).y.tolist() == [1, 0, 1]
    assert from_arrays(X, [True, False, True], [0, 0, 0]).y.tolist() == [1, 0, 1]


def test_images_keep_their_shape():
    assert from_arrays(np.zeros((3, 2, 4), np.uint8), [0, 1, 0], [0, 0, 1]).x.shape == (3, 2, 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((X, [0, 1], [0, 0, 0]), "equally many rows, got 3, 2, 3"),
        ((X, [0, 1, 0], [0, 0]), "equally many rows, got 3, 3, 2"),
        ((np.zeros((0, 2)), [], []), "there are no examples"),
        (([1.0, 2.0, 3.0], [0, 1, 0], [0, 0, 0]), r"at least one feature, got shape \(3,\)"),
        ((np.zeros((3, 0)), [0, 1, 0], [0, 0, 0]), r"at least one feature, got shape \(3, 0\)"),
        (([["a"], ["b"], ["c"]], [0, 1, 0], [0, 0, 0]), "x must be an array of numbers, got <U1"),
        ((np.zeros((3, 1), complex), [0, 1, 0], [0, 0, 0]), "x must be an array of numbers, got complex128"),
        (([[1.0], [2.0, 3.0], [1.0]], [0, 1, 0], [0, 0, 0]), "x must be an array of numbers: "),
        (([[1.0], [None], [1.0]], [0, 1, 0], [0, 0, 0]), "x must be finite: row 1"),
        (
            ([[1, 2], [3, np.nan], [np.inf, 1]], [0, 1, 0], [0, 0, 0]),
            r"row 1 \(from 0\) holds NaN or infinity",
        ),
        (([[1, 2], [3, 4], [1e300, 1]], [0, 1, 0], [0, 0, 0]), r"row 2 \(from 0\) holds NaN or infinity"),
        ((X, [0, -1, 2], [0, 0, 0]), r"labels out of range: -1 in row 1 \(from 0\); known: 0 to 2"),
        ((X, [-1, -1, -1], [0, 0, 0]), "labels out of range: -1 in row 0"),
        ((X, [0, 1, 3], [0, 0, 0], 3), r"labels out of range: 3 in row 2 \(from 0\); known: 0 to 2"),
        ((X, [0, 10**9, 1], [0, 0, 0]), "labels out of range: 1000000000 in row 1 .*known: 0 to 999999"),
        ((X, [0, 1, 0], [0, 0, 0], 0), "classes must be at least 1, got 0"),
        ((X, ["a", "b", "c"], [0, 0, 0], 2), "classes is 2, but y holds 3 different strings"),
        ((X, [0.5, 1.0, 0.0], [0, 0, 0]), "y must be all ints or all strings, none missing, got float64"),
        ((X, ["a", None, "b"], [0, 0, 0]), "y must be all ints or all strings"),
        ((X, ["a", float("nan"), "b"], [0, 0, 0]), "y must be all ints or all strings"),
        ((X, ["a", 1, "b"], [0, 0, 0]), "y must be all ints or all strings"),
        ((X, [[0], [1], [0]], [0, 0, 0]), r"y must have one entry per row, got shape \(3, 1\)"),
        ((X, [0, 1, 0], [0.5, 0, 0]), "client ids must be all ints or all strings"),
        ((X, [0, 1, 0], 3), r"client ids must have one entry per row, got shape \(\)"),
    ],
)
def test_bad_arrays_are_explained(arguments, message):
    with pytest.raises(ApieceError, match=message):
        from_arrays(*arguments)


# --- one file -------------------------------------------------------------------------------------------


def three_formats(folder):
    """The same three examples in each format."""
    yield npz(folder / "a.npz", x=X, y=["u", "v", "u"], client=["p", "q", "q"])
    yield write(folder / "a.csv", "f1,label,client,f2\n1,u,p,2\n3,v,q,4.0\n5,u,q,6e0\n")
    columns = {"f1": [1, 3, 5], "label": ["u", "v", "u"], "client": ["p", "q", "q"], "f2": [2.0, 4.0, 6.0]}
    yield table(folder / "a.parquet", **columns)


def test_the_formats_agree(tmp_path):
    for path in three_formats(tmp_path):
        data = from_path(path)
        assert data.x.tolist() == X, path
        assert data.x.dtype == np.float32
        assert data.y.tolist() == [0, 1, 0]
        assert data.label_names == ("u", "v")
        assert data.client.tolist() == ["p", "q", "q"]


def test_columns_may_be_called_otherwise(tmp_path):
    write(tmp_path / "a.csv", "who,f,what\n2,0.5,1\n10,1.5,0\n")
    data = from_path(str(tmp_path / "a.csv"), client_column="who", label_column="what")
    assert data.x.tolist() == [[0.5], [1.5]]
    assert data.y.tolist() == [1, 0]
    # whole numbers sort as numbers
    assert deal("natural", data, 0, 0)[1] == ["2", "10"]
    npz(tmp_path / "a.npz", x=X, y=[0, 1, 0], who=[1, 1, 2])
    assert from_path(tmp_path / "a.npz", client_column="who").client.tolist() == [1, 1, 2]


def test_csv_as_spreadsheets_write_it(tmp_path):
    path = tmp_path / "a.CSV"
    path.write_bytes('\ufeffclient, f ,label\r\n"a, b", 1 , x\r\n\r\nc,-2.5,y\r\n'.encode())
    data = from_path(path)
    assert data.client.tolist() == ["a, b", "c"]
    assert data.x.tolist() == [[1.0], [-2.5]]
    assert data.label_names == ("x", "y")


def test_numbers_that_are_not_plainly_written_are_names(tmp_path):
    data = from_path(write(tmp_path / "a.csv", "client,f,label\n01,1,1\n1,1,02\n"))
    assert data.label_names == ("02", "1")
    assert deal("natural", data, 0, 0)[1] == ["01", "1"]


def test_parquet_of_several_kinds(tmp_path):
    labels = pa.array(["u", "v"]).dictionary_encode()
    path = table(tmp_path / "a.parquet", client=[1, 2], label=labels, b=[True, False], i=[2**40, 3])
    data = from_path(path)
    assert data.x.tolist() == [[1.0, 2.0**40], [0.0, 3.0]]
    assert data.y.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "a.csv: the file is empty: its first line must name the columns"),
        ("client,f\na,1\n", "a.csv: no 'label': the file has client, f"),
        ("who,f,label\na,1,0\n", "a.csv: no 'client': the file has who, f, label"),
        ("client,label\na,1\n", "a.csv: no feature column beside client and label"),
        ("client,f,f,label\na,1,1,0\n", "a.csv: more than one column is called 'f'"),
        ("client,f,label\na,1,0\nb,two,0\n", "a.csv: line 3, column 'f': 'two' is not a finite number"),
        ("client,f,label\n\na,,0\n", "a.csv: line 3, column 'f': '' is not a finite number"),
        ("client,f,g,label\na,1,nan,0\n", "a.csv: line 2, column 'g': 'nan' is not a finite number"),
        ("client,f,label\na,1e99,0\n", "a.csv: line 2, column 'f': '1e99' is not a finite number"),
        ("client,f,label\na,1,0\nb,1\n", "a.csv: line 3 has 2 cells, the header 3"),
        ("client,f,label\na,1,\n", "a.csv: line 2, column 'label': the cell is empty"),
        ("client,f,label\na,1,0\n,1,0\n", "a.csv: line 3, column 'client': the cell is empty"),
        ("client,f,label\na,1,yes\na,1,NA\n", "a.csv: line 3, column 'label': 'NA' stands for nothing"),
        ("client,f,label\n?,1,yes\n", r"a.csv: line 2, column 'client': '\?' stands for nothing"),
        ("client,f,label\na,1,0\na,1,-2\n", "a.csv: labels out of range: -2 in row 1"),
        ("client,f,label\n", "a.csv: there are no examples"),
        ('client,f,label\na,1,"0\n', "a.csv: cannot be read: "),
    ],
)
def test_bad_csv_is_explained(tmp_path, text, message):
    with pytest.raises(ApieceError, match=message):
        from_path(write(tmp_path / "a.csv", text))


def test_csv_of_another_encoding_is_explained(tmp_path):
    (tmp_path / "a.csv").write_bytes("client,f,label\nJosé,1,0\n".encode("latin-1"))
    with pytest.raises(ApieceError, match=r"a\.csv: is not text in UTF-8: save it as that"):
        from_path(tmp_path / "a.csv")


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"images": X, "y": [0, 1, 0]}, "a.npz: no 'x' and no 'client': the file has images, y"),
        ({"x": X, "labels": [0, 1, 0], "w": [1]}, "a.npz: no 'y' and no 'client': the file has x, labels, w"),
        ({"x": X, "y": [0, 1, 0], "id": [1]}, "a.npz: no 'client': the file has x, y, id"),
        ({"x": X, "y": [0, 1], "client": [0, 0, 0]}, "a.npz: x, y and clients .* got 3, 2, 3"),
        (
            {"x": X, "y": np.array([0, "a", None], dtype=object), "client": [0, 0, 0]},
            "a.npz: cannot be read: ",
        ),
        ({"x": [[1.0], [np.nan]], "y": [0, 1], "client": [0, 0]}, "a.npz: x must be finite: row 1"),
        ({"x": X, "y": [0, 1, -3], "client": [0, 0, 0]}, "a.npz: labels out of range: -3 in row 2"),
        ({"x": X, "y": [0.0, 1.0, 2.0], "client": [0, 0, 0]}, "a.npz: y must be all ints or all strings"),
    ],
)
def test_bad_npz_is_explained(tmp_path, arrays, message):
    with pytest.raises(ApieceError, match=message):
        from_path(npz(tmp_path / "a.npz", **arrays))


@pytest.mark.parametrize("content", [b"", b"no archive", b"PK\x03\x04 no archive either"])
def test_what_is_no_archive_is_explained(tmp_path, content):
    (tmp_path / "a.npz").write_bytes(content)
    with pytest.raises(ApieceError, match=r"a\.npz: not a \.npz archive"):
        from_path(tmp_path / "a.npz")


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"client": [1], "f": [1.0]}, "a.parquet: no 'label': the file has client, f"),
        ({"f": [1.0], "label": [0]}, "a.parquet: no 'client': the file has f, label"),
        ({"client": [1], "f": ["x"], "label": [0]}, "a.parquet: column 'f' is not numeric but string"),
        ({"client": [1, 1], "f": [1.0, None], "label": [0, 1]}, "a.parquet: x must be finite: row 1"),
        (
            {"client": [1, 1], "f": [1, 2], "label": ["a", None]},
            "a.parquet: column 'label' must be all ints or",
        ),
        (
            {"client": [1, None], "f": [1, 2], "label": [0, 1]},
            "a.parquet: column 'client' must be all ints or",
        ),
        ({"client": [1, 1], "f": [1, 2], "label": [0, -4]}, "a.parquet: labels out of range: -4 in row 1"),
    ],
)
def test_bad_parquet_is_explained(tmp_path, columns, message):
    with pytest.raises(ApieceError, match=message):
        from_path(table(tmp_path / "a.parquet", **columns))


def test_what_is_no_parquet_is_explained(tmp_path):
    with pytest.raises(ApieceError, match=r"a\.parquet: cannot be read: "):
        from_path(write(tmp_path / "a.parquet", "nothing"))


def test_parquet_without_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    path = table(tmp_path / "a.parquet", client=[1], f=[1.0], label=[0])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ApieceError, match=r"pip install apiece\[parquet\]"):
        from_path(path)


def test_a_path_that_is_not_there_or_unknown(tmp_path):
    with pytest.raises(ApieceError, match=r"no such file or folder: .*nowhere\.csv"):
        from_path(tmp_path / "nowhere.csv")
    with pytest.raises(ApieceError, match=r"a\.txt: the suffix must be one of \.npz, \.csv, \.parquet"):
        from_path(write(tmp_path / "a.txt", "x"))


# --- one client's file ----------------------------------------------------------------------------------


def test_a_newcomer_brings_a_file_without_clients(tmp_path):
    data = from_path(
        npz(tmp_path / "eve.npz", x=X, y=[2, 0, 2]), client_column=None, label_names=list("01234")
    )
    assert data.classes == 5
    assert data.y.tolist() == [2, 0, 2]
    parts, names = deal("natural", data, 0, 0)
    assert names == ["eve"]
    assert parts[0].tolist() == [0, 1, 2]


def test_a_newcomers_labels_get_the_runs_numbers(tmp_path):
    """Alone, cow and dog would be 0 and 1; in the run they are 2 and 1, whatever the order of its names."""
    path = write(tmp_path / "eve.csv", "f,label\n1,cow\n2,dog\n")
    assert from_path(path, client_column=None).y.tolist() == [0, 1]
    data = from_path(path, client_column=None, label_names=("ant", "dog", "cow"))
    assert data.y.tolist() == [2, 1]
    assert data.label_names == ("ant", "dog", "cow")


def test_a_newcomers_numbers_may_be_the_runs_names(tmp_path):
    path = write(tmp_path / "eve.csv", "f,label\n1,30\n2,20\n")
    assert from_path(path, client_column=None, label_names=("10", "20", "30")).y.tolist() == [2, 1]


def test_a_newcomers_strange_labels_are_refused(tmp_path):
    path = write(tmp_path / "eve.csv", "f,label\n1,dog\n2,cat\n")
    with pytest.raises(ApieceError, match=r"eve.csv: labels out of range: 'cat' in row 1 .*known: ant, dog"):
        from_path(path, client_column=None, label_names=("ant", "dog"))
    path = npz(tmp_path / "eve.npz", x=X, y=[0, 3, 1])
    with pytest.raises(ApieceError, match=r"eve.npz: labels out of range: 3 in row 1 .*known: 0 to 2"):
        from_path(path, client_column=None, label_names=("0", "1", "2"))


# --- a folder -------------------------------------------------------------------------------------------


def test_a_folder_has_a_file_per_client(tmp_path):
    write(tmp_path / "10.csv", "f,g,label\n1,2,b\n3,4,a\n")
    write(tmp_path / "9.csv", "f,g,label\n")
    table(tmp_path / "2.parquet", f=[5.0], g=[6.0], label=["c"])
    npz(tmp_path / "11.npz", x=[[7.0, 8.0]], y=["a"])
    write(tmp_path / "README.md", "about")
    write(tmp_path / ".hidden.csv", "nothing")
    data = from_path(tmp_path)
    parts, names = deal("natural", data, 0, 0)
    assert names == ["2", "9", "10", "11"]
    assert data.label_names == ("a", "b", "c")
    held = [(data.x[part].tolist(), data.y[part].tolist()) for part in parts]
    assert held == [([[5, 6]], [2]), ([], []), ([[1, 2], [3, 4]], [1, 0]), ([[7, 8]], [0])]


def test_an_empty_client_has_an_empty_shard(tmp_path):
    npz(tmp_path / "a.npz", x=X, y=[0, 1, 0])
    npz(tmp_path / "b.npz", x=np.zeros((0, 2)), y=[])
    data = from_path(tmp_path)
    shared = federate(data, *deal("natural", data, 0, 0), key=0, test=0.4, unseen=0.0)
    assert shared.names == ("a", "b")
    assert shared.train.sizes.tolist() == [2, 0]
    assert shared.test.sizes.tolist() == [1, 0]


def test_years_are_names(tmp_path):
    """Numbers of 2,021 classes, two of which are there, would be all but phantoms."""
    place = tmp_path / "a.csv"
    place.write_text("client,f,label\na,1,2019\na,2,2020\nb,3,2019\n")
    found = from_path(place)
    assert (found.classes, found.label_names, found.y.tolist()) == (2, ("2019", "2020"), [0, 1, 0])


def test_measurements_are_no_classes(tmp_path):
    place = tmp_path / "a.csv"
    place.write_text("client,f,label\n" + "".join(f"a,{k},{k / 8}\n" for k in range(30)))
    with pytest.raises(ApieceError, match=r"a\.csv: the labels are 30 different numbers in 30 rows, 0"):
        from_path(place)
    place.write_text("client,f,label\n" + "".join(f"a,{k},{k % 20 / 8}\n" for k in range(60)))
    assert from_path(place).classes == 20, "steps of a scale"


def test_int_labels_of_a_folder_are_united(tmp_path):
    npz(tmp_path / "a.npz", x=X, y=[0, 1, 0])
    npz(tmp_path / "b.npz", x=X, y=[6, 1, 6])
    data = from_path(tmp_path)
    assert data.classes == 7
    assert data.y.tolist() == [0, 1, 0, 6, 1, 6]


def test_a_string_in_one_file_makes_names_of_all(tmp_path):
    write(tmp_path / "a.csv", "f,label\n1,10\n1,9\n")
    write(tmp_path / "b.csv", "f,label\n1,x\n1,10\n")
    data = from_path(tmp_path)
    assert data.label_names == ("10", "9", "x")
    assert data.y.tolist() == [0, 1, 2, 0]


def test_a_client_column_in_a_folder_is_no_feature(tmp_path):
    write(tmp_path / "a.csv", "client,f,label\n7,1,0\n")
    data = from_path(tmp_path)
    assert data.x.tolist() == [[1.0]]
    assert data.client.tolist() == ["a"]


def test_bad_folders_are_explained(tmp_path):
    with pytest.raises(ApieceError, match=r"no file with one of the suffixes \.npz, \.csv, \.parquet"):
        from_path(tmp_path)
    write(tmp_path / "a.csv", "f,g,label\n")
    with pytest.raises(ApieceError, match="there are no examples"):
        from_path(tmp_path)
    other = write(tmp_path / "b.csv", "g,f,label\n1,2,0\n")
    with pytest.raises(
        ApieceError, match=r"b.csv: feature columns \('g', 'f'\), other files have \('f', 'g'\)"
    ):
        from_path(tmp_path)
    write(other, "f,label\n1,0\n")
    with pytest.raises(ApieceError, match=r"b.csv: features of shape \(1,\), .*a.csv has \(2,\)"):
        from_path(tmp_path)
    write(other, "f,g,label\n1,2,0\n1,2,-1\n")
    with pytest.raises(ApieceError, match=r"b\.csv: labels out of range: -1 in row 1"):
        from_path(tmp_path)
    npz(tmp_path / "b.npz", x=X, y=[0, 1, 0])
    with pytest.raises(ApieceError, match="more than one file of client 'b'"):
        from_path(tmp_path)
