from __future__ import annotations

import subprocess
import sys

import numpy as np

from apiece.data import digits


def test_digits_are_images_scaled_to_one():
    data = digits.load()
    assert data.x.shape == (1797, 64)
    assert data.x.dtype == np.float32
    assert data.x.min() == 0.0
    assert data.x.max() == 1.0
    # pixels are whole sixteenths
    assert np.array_equal(data.x * 16, np.round(data.x * 16))
    assert data.y.shape == (1797,)
    assert data.y.dtype == np.int64
    assert sorted(set(data.y.tolist())) == list(range(10))
    assert data.classes == 10
    assert data.label_names == tuple("0123456789")
    assert data.client is None


def test_importing_the_package_is_light():
    heavy = ("sklearn", "matplotlib", "typer", "pyarrow")
    code = f"import sys, apiece, apiece.data; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
