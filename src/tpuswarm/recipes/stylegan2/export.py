"""A StyleGAN2 of ours as files that other programs read: weights as they are used, in torch's order of axes."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from tpuswarm.recipes.stylegan2.config import FIRST, Config
from tpuswarm.recipes.stylegan2.generator import MAPPING_RATE
from tpuswarm.recipes.stylegan2.layers import GAIN, LEAK
from tpuswarm.recipes.stylegan2.resample import TAPS

WEIGHTS, ABOUT = "model.safetensors", "config.json"
FLATTENED = "discriminator.last.dense"
"""Reads all channels of all pixels: in the order of NCHW, in torch."""
WORDS = {
    "generator": "the moving average, which is what one wants; mapping.N, constant, and blocks by their resolution",
    "weights": "as they are used, with the equalised learning rate in them: convolutions OIHW, dense layers OI",
    "mapping": "z / root of the mean square of z, then dense layers, each with leaky ReLU",
    "block": "up (twice the size, then the filter), same, each: modulated convolution, + noise * N(0, 1) of each "
    "pixel, + bias, leaky ReLU; rgb: modulated without demodulation, + bias, added to what there is, twice its size",
    "modulated": "style = dense(w); weights * style of each input, divided by the root of their sum of squares + 1e-8",
    "leaky ReLU": f"slope {LEAK}, times {GAIN:.4f}",
    "filter": f"{list(TAPS)} / {sum(TAPS):g} along both axes, times 4 after zeros are put between",
    "truncation": "w_mean + (w - w_mean) * truncation",
    "pixels": "-1 to 1, NCHW",
}
"""What a program needs to know that makes pictures of the weights."""


def write(state: Any, config: Config, folder: Path) -> None:
    """model.safetensors and config.json; OSError where they do not fit."""
    tensors = {
        **_named("generator", state.average, MAPPING_RATE),
        **_named("discriminator", state.discriminator, 1.0),
        "w_mean": np.asarray(state.w_mean),
    }
    try:
        save_file(tensors, folder / WEIGHTS)
    except SafetensorError as error:  # the library's word for a full disk
        raise OSError(str(error)) from error
    about = {"model_type": "stylegan2", **vars(config), "words": WORDS}
    (folder / ABOUT).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")


def _named(prefix: str, params: Any, mapping_rate: float) -> dict[str, np.ndarray]:
    """A network's arrays; rates of a layer of its own are those of the mapping network."""
    found: dict[str, np.ndarray] = {}
    for name, each in params.items():
        path = f"{prefix}.{name}"
        if not isinstance(each, dict):
            array = np.asarray(each)
            found[path] = array.transpose(2, 0, 1) if array.ndim == 3 else array
        elif "w" in each:
            rate = mapping_rate if prefix.endswith(".mapping") else 1.0
            w = np.asarray(each["w"])
            w = w * np.float32((w.size // w.shape[-1]) ** -0.5 * rate)
            if path == FLATTENED:
                w = w.reshape(FIRST, FIRST, -1, w.shape[-1]).transpose(2, 0, 1, 3).reshape(w.shape)
            found[f"{path}.weight"] = w.transpose(3, 2, 0, 1) if w.ndim == 4 else w.T
            if "b" in each:
                found[f"{path}.bias"] = np.asarray(each["b"]) * np.float32(rate)
            found |= _named(path, {key: more for key, more in each.items() if key not in ("w", "b")}, mapping_rate)
        else:
            found |= _named(path, each, mapping_rate)
    return {name: np.ascontiguousarray(array) for name, array in found.items()}
