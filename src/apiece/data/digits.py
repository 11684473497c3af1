"""scikit-learn's digits: 1,797 images of 8 × 8 pixels, 10 classes (Alpaydin and Kaynak 1998)."""

from __future__ import annotations

import numpy as np

from apiece.data.federated import Examples

_BRIGHTEST = 16.0


def load() -> Examples:
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    return Examples(
        x=(pixels / _BRIGHTEST).astype(np.float32),
        y=labels.astype(np.int64),
        classes=10,
        label_names=tuple(str(digit) for digit in range(10)),
    )
