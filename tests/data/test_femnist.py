"""FEMNIST in the compact layout, LEAF's json and TensorFlow Federated's h5, all of the same three writers."""

from __future__ import annotations

import json
import lzma
import string

import numpy as np
import pytest

from apiece.data import femnist, load, prepare
from apiece.errors import ApieceError

WRITERS = ("f0000_14", "f0001_41", "f0002_01")
LABELS = {"f0000_14": [0, 61, 10], "f0001_41": [36], "f0002_01": [5, 5]}


def image(label: int) -> np.ndarray:
    """Its first pixel tells the label, the others run through all shades."""
    pixels = np.arange(28 * 28).astype(np.uint8)
    pixels[0] = label
    return pixels.reshape(28, 28)


IMAGES = {writer: np.stack([image(label) for label in labels]) for writer, labels in LABELS.items()}


def read(folder, name="femnist"):
    return load(name, clients=1, key=0, data_dir=str(folder))


def write_compact(folder):
    place = folder / "femnist"
    place.mkdir(exist_ok=True)
    np.savez(
        place / "index.npz",
        labels=np.concatenate([LABELS[w] for w in WRITERS]).astype(np.uint8),
        writer_offsets=np.array([0, 3, 4, 6]),
        writer_ids=np.array(WRITERS),
        part_writers=np.array([0, 2, 3]),
    )
    for number, writers in enumerate((WRITERS[:2], WRITERS[2:])):
        with lzma.open(place / f"images_{number}.npy.xz", "wb") as file:
            np.save(file, np.concatenate([IMAGES[w] for w in writers]))
    return place


def leaf(writers, rows=slice(None)) -> str:
    """As LEAF writes it: pixels are shares of 255, in one list an image."""
    data = {
        w: {"x": (IMAGES[w][rows].reshape(-1, 784) / 255).tolist(), "y": LABELS[w][rows]} for w in writers
    }
    sizes = [len(one["y"]) for one in data.values()]
    return json.dumps({"users": list(writers), "num_samples": sizes, "user_data": data})


def write_leaf(folder):
    place = folder / "femnist" / "all_data"
    place.mkdir(parents=True)
    (place / "all_data_0.json").write_text(leaf(WRITERS[:2]))
    (place / "all_data_1.json").write_text(leaf(WRITERS[2:]))
    return place


def write_tff(folder):
    h5py = pytest.importorskip("h5py")
    place = folder / "femnist"
    place.mkdir(exist_ok=True)
    for part, rows in (("train", slice(1, None)), ("test", slice(0, 1))):
        with h5py.File(place / f"fed_emnist_{part}.h5", "w") as file:
            for writer in WRITERS:
                one = file.create_group(f"examples/{writer}")
                one["pixels"] = (IMAGES[writer][rows] / 255).astype(np.float32)
                one["label"] = np.array(LABELS[writer][rows], dtype=np.int32)
    return place


def assert_whole(found):
    assert found.x.dtype == np.uint8
    assert found.x.shape == (6, 1, 28, 28)
    assert found.classes == 62
    assert "".join(found.label_names) == string.digits + string.ascii_uppercase + string.ascii_lowercase
    for x, y in zip(found.x, found.y, strict=True):
        assert np.array_equal(x[0], image(y))
    for writer in WRITERS:
        assert sorted(found.y[found.client == writer].tolist()) == sorted(LABELS[writer])


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("write", [write_compact, write_leaf, write_tff])
def test_every_layout_gives_the_same_examples(tmp_path, write, again):
    write(tmp_path)
    if again:
        read(tmp_path)
    found = read(tmp_path)
    assert_whole(found)
    assert isinstance(found.x, np.memmap)
    assert (found.test is None) == (write is not write_tff)


def test_what_is_read_a_second_time_comes_from_the_cache(tmp_path, monkeypatch):
    place = write_leaf(tmp_path)
    read(tmp_path)
    monkeypatch.setattr(json, "loads", None)
    assert_whole(read(tmp_path))
    (place / "all_data_1.json").write_text("{}")
    with pytest.raises(ApieceError, match="is no file of LEAF's FEMNIST"):
        read(tmp_path)


def test_tffs_own_test_examples(tmp_path):
    write_tff(tmp_path)
    found = read(tmp_path)
    assert {w: found.y[found.test & (found.client == w)].tolist() for w in WRITERS} == {
        w: LABELS[w][:1] for w in WRITERS
    }
    data = prepare("femnist", clients=1, key=0, test=0.0, unseen=1, data_dir=str(tmp_path))
    assert data.names == WRITERS
    assert data.test.sizes.tolist() == [1, 1, 1]
    assert data.train.sizes.tolist() == [2, 0, 1]
    assert len(data.unseen_ids) == 1


def test_leafs_train_and_test_files_are_its_own_split(tmp_path):
    place = write_leaf(tmp_path).parent
    for part, rows in (("train", slice(1, None)), ("test", slice(0, 1))):
        (place / part).mkdir()
        (place / part / "all_data_0_niid_0.json").write_text(leaf(WRITERS, rows))
    found = read(tmp_path)
    assert_whole(found)
    assert found.test.sum() == 3


def test_where_there_are_several_layouts_one_is_named(tmp_path):
    write_leaf(tmp_path)
    write_compact(tmp_path)
    with pytest.raises(ApieceError, match=r"more than one layout: say femnist\(compact\) or femnist\(leaf\)"):
        read(tmp_path)
    for name in ("femnist(leaf)", "femnist(compact)"):
        assert_whole(read(tmp_path, name))
    with pytest.raises(
        ApieceError, match=r"FEMNIST is not in .*: looked for femnist/fed_emnist_\{train,test\}\.h5\."
    ):
        read(tmp_path, "femnist(tff)")
    with pytest.raises(ApieceError, match="in one layout at a time, not in leaf and tff"):
        read(tmp_path, "femnist(leaf,tff)")


def test_lower_case_a_to_j_are_the_classes_36_to_45(tmp_path):
    assert femnist.LABEL_NAMES[36:46] == tuple("abcdefghij")
    write_compact(tmp_path)
    found = read(tmp_path, "femnist(scaled)[36-45 from 0]")
    assert found.label_names == tuple("abcdefghij")
    assert found.y.tolist() == [0]
    assert found.client.tolist() == ["f0001_41"]
    assert found.x.dtype == np.float32


def spoil_index(place):
    (place / "index.npz").write_bytes(b"PK")


def spoil_part(place):
    (place / "images_0.npy.xz").write_bytes(b"no")


def spoil_shape(place):
    with lzma.open(place / "images_1.npy.xz", "wb") as file:
        np.save(file, np.zeros((2, 27, 28), np.uint8))


def lose_part(place):
    (place / "images_1.npy.xz").unlink()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (spoil_index, "index.npz cannot be read"),
        (spoil_part, r"images_0\.npy\.xz cannot be read"),
        (spoil_shape, r"images_1\.npy\.xz does not fit .*index\.npz"),
        (lose_part, "tells of 6 images and 3 writers, the parts hold 4"),
    ],
)
def test_damaged_compact_files_are_refused(tmp_path, spoil, message):
    spoil(write_compact(tmp_path))
    with pytest.raises(ApieceError, match=message):
        read(tmp_path)


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        ([[2.0] * 784], [1], "a pixel does not lie between 0 and 1"),
        ([[0.5] * 784], [62], "a label does not lie between 0 and 61"),
        ([[0.5] * 700], [1], "is no file of LEAF's FEMNIST"),
    ],
)
def test_damaged_json_files_are_refused(tmp_path, x, y, message):
    held = {"user_data": {"f": {"x": x, "y": y}}}
    (write_leaf(tmp_path) / "all_data_0.json").write_text(json.dumps(held))
    with pytest.raises(ApieceError, match=message):
        read(tmp_path)


def test_a_damaged_h5_file_is_refused(tmp_path):
    (write_tff(tmp_path) / "fed_emnist_test.h5").write_bytes(b"no")
    with pytest.raises(ApieceError, match=r"fed_emnist_test\.h5 is no file of TensorFlow Federated's EMNIST"):
        read(tmp_path)
