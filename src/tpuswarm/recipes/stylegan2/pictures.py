"""Pictures as arrays of bytes."""

import numpy as np

from tpuswarm.errors import InputError

COUNT = 64
"""Of fake pictures."""


def digits(side: int) -> np.ndarray:
    """scikit-learn's 1,797 handwritten digits (8 x 8, grey), enlarged: uint8 (count, side, side, 3)."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise InputError("--data digits needs scikit-learn: pip install scikit-learn") from error
    grey = np.asarray(load_digits().images, np.float32) / 16 * 255
    grey = _enlarged(_enlarged(grey, side, 1), side, 2)
    return np.repeat(np.round(grey).astype(np.uint8)[..., None], 3, axis=-1)


def _enlarged(x: np.ndarray, size: int, axis: int) -> np.ndarray:
    """Linear interpolation along an axis, pixels being areas."""
    at = np.clip((np.arange(size) + 0.5) * x.shape[axis] / size - 0.5, 0, x.shape[axis] - 1)
    low = np.floor(at).astype(int)
    high = np.minimum(low + 1, x.shape[axis] - 1)
    share = np.expand_dims((at - low).astype(np.float32), tuple(range(1, x.ndim - axis)))
    return np.take(x, low, axis) * (1 - share) + np.take(x, high, axis) * share


def fake(side: int) -> np.ndarray:
    """Random pixels, for measurements: uint8 (count, side, side, 3), a view of one row of them that is moved on."""
    row = np.random.default_rng(0).integers(0, 256, side * side * 3 + COUNT, np.uint8)
    return np.lib.stride_tricks.as_strided(row, (COUNT, side, side, 3), (1, side * 3, 3, 1), writeable=False)
