"""MNIST, Fashion-MNIST, CIFAR-10 and CIFAR-100 in their official formats, and the words behind the names."""

from __future__ import annotations

import gzip
import struct

import numpy as np
import pytest

from apiece.data import cifar, load, prepare
from apiece.data.federated import Examples
from apiece.data.images import prepared
from apiece.errors import ApieceError


def read(name, folder):
    return load(name, clients=1, key=0, data_dir=str(folder))


# --- idx ------------------------------------------------------------------------------------------------


def write_idx(folder, name="MNIST", packed=False, train=3, test=2):
    """Pixel (i, j) of image n is n + i + 2 j mod 256; its label is n mod 10, test images counted from 0."""
    raw = folder / name / "raw"
    raw.mkdir(parents=True)
    for part, count in (("train", train), ("t10k", test)):
        pixels = bytes((n + i + 2 * j) % 256 for n in range(count) for i in range(28) for j in range(28))
        files = {
            "images-idx3": struct.pack(">iiii", 2051, count, 28, 28) + pixels,
            "labels-idx1": struct.pack(">ii", 2049, count) + bytes(n % 10 for n in range(count)),
        }
        for kind, held in files.items():
            path = raw / f"{part}-{kind}-ubyte{'.gz' if packed else ''}"
            path.write_bytes(gzip.compress(held) if packed else held)
    return raw


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("name", "inside"), [("mnist", "MNIST"), ("fashion_mnist", "FashionMNIST")])
def test_idx_files(tmp_path, name, inside, packed):
    write_idx(tmp_path, inside, packed)
    found = read(name, tmp_path)
    assert found.x.dtype == np.uint8
    assert found.x.shape == (5, 1, 28, 28)
    assert found.x[1, 0, 3, 4] == 1 + 3 + 8
    assert found.y.tolist() == [0, 1, 2, 0, 1]
    assert found.test.tolist() == [False] * 3 + [True] * 2
    assert found.client is None
    assert found.classes == len(found.label_names) == 10
    assert (found.label_names[0], found.label_names[9]) == (
        ("0", "9") if name == "mnist" else ("T-shirt/top", "Ankle boot")
    )


def test_what_is_there_unpacked_is_read_first(tmp_path):
    raw = write_idx(tmp_path)
    (raw / "train-labels-idx1-ubyte.gz").write_bytes(b"nothing")
    assert len(read("mnist", tmp_path).y) == 5


@pytest.mark.parametrize(
    ("held", "message"),
    [
        (b"", "train-labels-idx1-ubyte is no idx file of 1-dimensional bytes"),
        (struct.pack(">iii", 2051, 3, 1), "is no idx file of 1-dimensional bytes"),
        (struct.pack(">ii", 2049, 3) + b"ab", r"cut short or too long: 2 values for the shape \(3,\)"),
        (struct.pack(">ii", 2049, 2) + b"\0\0", "has 3 images, .* 2 labels"),
        (struct.pack(">ii", 2049, 3) + b"\0\0\x0a", "a label is 10, the largest there is 9"),
    ],
)
def test_damaged_idx_files_are_refused(tmp_path, held, message):
    (write_idx(tmp_path) / "train-labels-idx1-ubyte").write_bytes(held)
    with pytest.raises(ApieceError, match=message):
        read("mnist", tmp_path)


def test_a_damaged_gz_file_is_refused(tmp_path):
    path = write_idx(tmp_path, packed=True) / "t10k-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ApieceError, match=r"t10k-images-idx3-ubyte\.gz cannot be read"):
        read("mnist", tmp_path)


# --- CIFAR ----------------------------------------------------------------------------------------------


def write_cifar(folder, name="cifar10", label=3):
    """Two images a file; image n of a file has red n + 1, green 10 and blue the file's number everywhere."""
    ten = name == "cifar10"
    inside = folder / ("cifar-10-batches-bin" if ten else "cifar-100-binary")
    inside.mkdir(parents=True)
    names = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"] if ten else ["train", "test"]
    for number, file in enumerate(names):
        images = [bytes([n + 1] * 1024 + [10] * 1024 + [number] * 1024) for n in range(2)]
        labels = bytes([label]) if ten else bytes([7, label])
        (inside / f"{file}.bin").write_bytes(b"".join(labels + image for image in images))
    return inside


def test_cifar_10(tmp_path):
    write_cifar(tmp_path)
    found = read("cifar10", tmp_path)
    assert found.x.dtype == np.uint8
    assert found.x.shape == (12, 3, 32, 32)
    assert found.x[:, :, 5, 9].tolist() == [[n + 1, 10, file] for file in range(6) for n in range(2)]
    assert found.y.tolist() == [3] * 12
    assert found.test.tolist() == [False] * 10 + [True] * 2
    assert " ".join(found.label_names) == "airplane automobile bird cat deer dog frog horse ship truck"


def test_cifar_100_has_fine_labels(tmp_path):
    write_cifar(tmp_path, "cifar100", label=99)
    found = read("cifar100", tmp_path)
    assert found.y.tolist() == [99] * 4
    assert found.test.tolist() == [False, False, True, True]
    assert found.classes == len(set(found.label_names)) == 100
    assert list(found.label_names) == sorted(found.label_names)
    assert [found.label_names[i] for i in (0, 23, 47, 99)] == ["apple", "cloud", "maple_tree", "worm"]


def test_damaged_cifar_files_are_refused(tmp_path):
    inside = write_cifar(tmp_path, label=10)
    with pytest.raises(ApieceError, match="a label is 10, the largest there is 9"):
        read("cifar10", tmp_path)
    (inside / "data_batch_2.bin").write_bytes(b"a")
    with pytest.raises(ApieceError, match=r"data_batch_2\.bin is cut short or not binary: 1 bytes"):
        read("cifar10", tmp_path)


def test_the_python_version_is_not_read(tmp_path):
    (tmp_path / "cifar-10-batches-py").mkdir()
    with pytest.raises(ApieceError, match=r"apiece download cifar10 .*the python version is pickled"):
        cifar.load_10(tmp_path)


# --- Words ----------------------------------------------------------------------------------------------


def images(x, test=None) -> Examples:
    x = np.asarray(x, dtype=np.uint8)
    own = None if test is None else np.asarray(test)
    return Examples(x, np.zeros(len(x), np.int64), 1, ("a",), test=own)


def test_train_leaves_the_own_test_examples_out(tmp_path):
    write_idx(tmp_path)
    found = read("mnist(train)", tmp_path)
    assert found.y.tolist() == [0, 1, 2]
    assert len(found.x) == 3
    assert found.test is None
    with pytest.raises(ApieceError, match="no test examples of its own to leave out"):
        prepared(found, ["train"])


def test_grey_is_the_luma(tmp_path):
    """0.299 · 200 + 0.587 · 101 + 0.114 · 50 = 124.787; pure red 255 gives 76.245, white stays white."""
    pixels = [[200, 101, 50], [255, 0, 0], [255, 255, 255]]
    found = prepared(images(np.array(pixels).reshape(3, 3, 1, 1).repeat(2, 3)), ["grey"])
    assert found.x.dtype == np.uint8
    assert found.x.tolist() == [[[[125, 125]]], [[[76, 76]]], [[[255, 255]]]]
    with pytest.raises(ApieceError, match="grey already"):
        prepared(found, ["grey"])


def test_standardized_is_by_pixel_over_the_training_examples():
    """Training pixels 0 and 10: mean 5, deviation 5; the test pixel 20 becomes 3. A constant: 0."""
    found = prepared(images([[[[0, 7]]], [[[10, 7]]], [[[20, 9]]]], [False, False, True]), ["standardized"])
    assert found.x.dtype == np.float32
    assert found.x.tolist() == [[[[-1, 0]]], [[[1, 0]]], [[[3, 2]]]]


def test_standardized_in_blocks_is_standardized(monkeypatch):
    x = np.random.default_rng(0).integers(0, 256, (12_345, 1, 2, 2), dtype=np.uint8)
    found = prepared(images(x), ["standardized"]).x
    np.testing.assert_allclose(found, (x - x.mean(0)) / x.std(0), atol=1e-5)


def test_normalized_is_over_all_pixels_of_the_training_examples():
    """0, 4, 10 and 10: mean 6, mean square 54, deviation √18; the test pixels 6 and 15 become 0 and 9/√18."""
    found = prepared(images([[[[0, 4]]], [[[10, 10]]], [[[6, 15]]]], [False, False, True]), ["normalized"])
    assert found.x.dtype == np.float32
    np.testing.assert_allclose(found.x.reshape(3, 2) * 18**0.5, [[-6, -2], [4, 4], [0, 9]], atol=1e-6)
    assert prepared(images([[[[7, 7]]]]), ["normalized"]).x.tolist() == [[[[0, 0]]]]


def test_scaled_lies_between_minus_one_and_one():
    found = prepared(images([[[[0, 51, 255]]]]), ["scaled"])
    assert found.x.dtype == np.float32
    np.testing.assert_allclose(found.x, [[[[-1, -0.6, 1]]]], atol=1e-7)


def test_words_are_carried_out_in_one_order_however_written(tmp_path):
    write_cifar(tmp_path)
    a, b = (read(f"cifar10({words})", tmp_path) for words in ("train, grey,scaled", "scaled,grey,train"))
    assert np.array_equal(a.x, b.x)
    assert a.x.shape == (10, 1, 32, 32)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cifar10(gray)", "unknown word behind cifar10 'gray': did you mean 'grey'"),
        ("cifar10()", "unknown word behind cifar10 ''"),
        ("cifar10(scaled,standardized)", "either scaled or standardized"),
        ("cifar10(normalized,scaled)", "either normalized or scaled"),
        ("vehicle(grey)", "nothing stands in parentheses behind vehicle: write vehicle"),
    ],
)
def test_other_words_are_refused(tmp_path, name, message):
    write_cifar(tmp_path)
    with pytest.raises(ApieceError, match=message):
        read(name, tmp_path)


# --- Classes and splits ---------------------------------------------------------------------------------


def test_chosen_classes_keep_their_numbers_or_count_from_zero(tmp_path):
    write_idx(tmp_path, train=20, test=10)
    kept, renumbered = read("mnist[3,5-6]", tmp_path), read("mnist[3,5-6 from 0]", tmp_path)
    assert kept.y.tolist() == [3, 5, 6, 3, 5, 6, 3, 5, 6]
    assert kept.classes == 10
    assert renumbered.y.tolist() == [0, 1, 2, 0, 1, 2, 0, 1, 2]
    assert (renumbered.classes, renumbered.label_names) == (3, ("3", "5", "6"))
    for found in (kept, renumbered):
        assert found.test.tolist() == [False] * 6 + [True] * 3
        assert found.x[:, 0, 0, 0].tolist() == [3, 5, 6, 13, 15, 16, 3, 5, 6]
    with pytest.raises(ApieceError, match=r"classes \[8-12\]: there are 10, from 0 to 9"):
        read("mnist[8-12]", tmp_path)


def test_the_own_test_examples_are_the_test_examples_at_share_zero(tmp_path):
    """Of 10 classes with 4 training and 2 test images, 4 clients have half of each of 5 classes: 2 and 1."""
    write_idx(tmp_path, train=40, test=20)
    data = prepare("mnist", "classes:5", clients=4, key=0, test=0.0, unseen=0.0, data_dir=str(tmp_path))
    assert data.x.dtype.itemsize == 1
    assert data.train.sizes.tolist() == [10] * 4
    assert data.test.sizes.tolist() == [5] * 4
    for client in range(4):
        assert data.train[client].max() < 40 <= data.test[client].min()
        assert set(data.labels[data.train[client]]) == set(data.labels[data.test[client]])
    mixed = prepare("mnist", "classes:5", clients=4, key=0, test=0.5, unseen=0.0, data_dir=str(tmp_path))
    assert mixed.test.sizes.tolist() == [8] * 4  # a half of 15, to the even number
    assert mixed.test.rows.min() < 40
