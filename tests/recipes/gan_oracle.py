"""StyleGAN2 written a second time, in NumPy float64, one picture and one output after the other: the tests' oracle."""

from typing import Any

import numpy as np
from scipy.signal import correlate, upfirdn

FILTER = np.outer([1, 3, 3, 1], [1, 3, 3, 1]) / 64


def resample(x: np.ndarray, up: int, down: int, low: int, high: int) -> np.ndarray:
    """scipy's upfirdn along rows, then columns, of one picture HxWxC padded after the zeros are put in."""
    taps = np.array([1.0, 3, 3, 1]) / 8 * up
    for axis in (0, 1):
        whole = upfirdn(taps, x, up, axis=axis)  # of which `low` zeros before it would have given 3 - low rows less
        length = x.shape[axis] * up + low + high - 3
        x = np.take(whole, range(3 - low, 3 - low + length, down), axis)
    return x


def convolution(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Of one picture HxWxI with KxKxIxO, zeros around it."""
    pad = w.shape[0] // 2
    x = np.pad(x, ((pad, pad), (pad, pad), (0, 0)))
    each = [correlate(x, w[..., output], mode="valid", method="direct")[..., 0] for output in range(w.shape[-1])]
    return np.stack(each, -1)


def scaled(w: np.ndarray) -> np.ndarray:
    return w / np.sqrt(np.prod(w.shape[:-1]))


def dense(x: np.ndarray, p: Any, rate: float = 1.0) -> np.ndarray:
    return x @ (scaled(p["w"]) * rate) + p["b"] * rate


def activate(x: np.ndarray) -> np.ndarray:
    return np.where(x > 0, x, 0.2 * x) * np.sqrt(2)


def doubled(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Zeros between the pixels, a convolution, then the filter."""
    H, W, C = x.shape
    wide = np.zeros((2 * H + 1, 2 * W + 1, C))
    wide[1 : 2 * H : 2, 1 : 2 * W : 2] = x
    wide = convolution(wide, w)
    return np.stack([correlate(np.pad(plane, 1), FILTER * 4, mode="valid") for plane in np.moveaxis(wide, -1, 0)], -1)


def modulated(x: np.ndarray, w: np.ndarray, p: Any, up: bool = False, demodulate: bool = True) -> np.ndarray:
    """Weights of the picture's own."""
    kernel = scaled(p["w"]) * dense(w, p["style"])[:, None]
    if demodulate:
        kernel = kernel / np.sqrt((kernel**2).sum((0, 1, 2)) + 1e-8)
    return doubled(x, kernel) if up else convolution(x, kernel)


def to_w(params: Any, z: np.ndarray) -> np.ndarray:
    x = z / np.sqrt((z**2).mean(-1, keepdims=True) + 1e-8)
    for layer in range(len(params["mapping"])):
        x = activate(dense(x, params["mapping"][f"{layer}"], 0.01))
    return x


def synthesize(params: Any, w_LxD: np.ndarray, resolutions: tuple[int, ...]) -> np.ndarray:
    """One picture, without noise."""
    x, picture, codes = params["constant"], None, list(w_LxD)
    for resolution in resolutions:
        block = params["blocks"][f"{resolution}"]
        for name in ("up", "same"):
            if name in block:
                x = activate(modulated(x, codes.pop(0), block[name], up=name == "up") + block[name]["b"])
        rgb = modulated(x, codes[0], block["rgb"], demodulate=False) + block["rgb"]["b"]
        picture = rgb if picture is None else resample(picture, 2, 1, 2, 1) + rgb
    assert len(codes) == 1
    return picture


def scores(params: Any, pictures: np.ndarray, resolutions: tuple[int, ...], group: int) -> np.ndarray:
    found = []
    for picture in pictures:
        x = activate(convolution(picture, scaled(params["rgb"]["w"])) + params["rgb"]["b"])
        for resolution in resolutions[:0:-1]:
            block = params["blocks"][f"{resolution}"]
            skip = convolution(resample(x, 1, 2, 1, 1), scaled(block["skip"]["w"]))
            x = activate(convolution(x, scaled(block["same"]["w"])) + block["same"]["b"])
            x = resample(x, 1, 1, 2, 2)
            x = convolution(x, scaled(block["down"]["w"]))[1:-1:2, 1:-1:2]
            x = (activate(x + block["down"]["b"]) + skip) / np.sqrt(2)
        found.append(x)
    last, out = params["last"], []
    for index, x in enumerate(found):
        first = index - index % group
        deviation = np.sqrt(np.var(found[first : first + group], axis=0) + 1e-8).mean()
        x = np.concatenate([x, np.full((*x.shape[:2], 1), deviation)], -1)
        x = activate(convolution(x, scaled(last["same"]["w"])) + last["same"]["b"])
        x = activate(dense(x.reshape(-1), last["dense"]))
        out.append(dense(x, last["score"])[0])
    return np.array(out)
