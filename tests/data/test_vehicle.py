import numpy as np
import pytest
from scipy.io import savemat

from apiece.data import vehicle
from apiece.errors import ApieceError


def cells(arrays):
    out = np.empty((len(arrays), 1), dtype=object)
    out[:, 0] = [np.asarray(array) for array in arrays]
    return out


def write_mat(folder, x, y):
    (folder / "vehicle").mkdir()
    savemat(folder / "vehicle" / "vehicle.mat", {"X": cells(x), "Y": cells([np.c_[part] for part in y])})


def write_npz(folder):
    (folder / "vehicle").mkdir(exist_ok=True)
    arrays = {
        "x": np.arange(8.0).reshape(4, 2),
        "y": np.array([1, -1, -1, 1], dtype=np.int8),
        "offsets": np.array([0, 1, 4]),
        "users": np.array(["f_00000", "f_00001"]),
    }
    np.savez(folder / "vehicle" / "vehicle_1860.npz", **arrays)


def test_the_whole_set_is_standardised_sensor_by_sensor(tmp_path):
    """Feature 0 of sensor 0 is 1, 3: mean 2, deviation 1, so −1, 1. Feature 1 does not vary: 0."""
    write_mat(tmp_path, [[[1.0, 7.0], [3.0, 7.0]], [[0.0, 2.0], [4.0, 6.0]]], [[1, -1], [-1, -1]])
    examples = vehicle.load(tmp_path)
    assert examples.x.dtype == np.float32
    np.testing.assert_allclose(examples.x, [[-1, 0], [1, 0], [-1, -1], [1, 1]])
    assert examples.y.tolist() == [1, 0, 0, 0]
    assert examples.client.tolist() == ["f_00000", "f_00000", "f_00001", "f_00001"]
    assert (examples.classes, examples.label_names) == (2, ("-1", "1"))


def test_the_part_is_taken_as_it_is(tmp_path):
    write_npz(tmp_path)
    examples = vehicle.load(tmp_path)
    np.testing.assert_array_equal(examples.x, np.arange(8.0).reshape(4, 2))
    assert examples.y.tolist() == [1, 0, 0, 1]
    assert examples.client.tolist() == ["f_00000", "f_00001", "f_00001", "f_00001"]


def test_the_whole_set_goes_before_the_part(tmp_path):
    write_mat(tmp_path, [np.eye(5)], [[1, -1, 1, 1, 1]])
    write_npz(tmp_path)
    assert len(vehicle.load(tmp_path).y) == 5


def test_what_is_missing_is_told(tmp_path):
    with pytest.raises(ApieceError, match=r"Vehicle is not in the data folder .*vehicle\.mat"):
        vehicle.load(tmp_path)


@pytest.mark.parametrize("content", [b"not a matrix", b""])
def test_a_file_that_is_no_mat_file_is_told(tmp_path, content):
    (tmp_path / "vehicle").mkdir()
    (tmp_path / "vehicle" / "vehicle.mat").write_bytes(content)
    with pytest.raises(ApieceError, match=r"vehicle\.mat"):
        vehicle.load(tmp_path)


def test_other_labels_are_told(tmp_path):
    write_mat(tmp_path, [np.eye(2)], [[0, 1]])
    with pytest.raises(ApieceError, match="−1 and 1"):
        vehicle.load(tmp_path)


def test_unequal_numbers_are_told(tmp_path):
    write_mat(tmp_path, [np.eye(2)], [[1, 1, -1]])
    with pytest.raises(ApieceError, match="unequal"):
        vehicle.load(tmp_path)
