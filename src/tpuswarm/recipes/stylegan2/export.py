"""Export a StyleGAN2 for other programs: scaled weights in torch's order of axes, and a description in words."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from tpuswarm.recipes.stylegan2.config import MIN_RESOLUTION, Config
from tpuswarm.recipes.stylegan2.convolution import FIR_TAPS
from tpuswarm.recipes.stylegan2.generator import MAPPING_RATE_FACTOR
from tpuswarm.recipes.stylegan2.layers import GAIN, LEAK

FLATTENED_LAYER = "discriminator.last.dense"
"""Its inputs are all channels of all pixels; torch flattens them as NCHW."""
WORDS = {
    "generator": "the moving average: use this one; mapping.N, constant, and blocks by their resolution",
    "weights": "scaled (the equalised learning rate is applied): convolutions OIHW, dense layers OI",
    "mapping": "z / root of the mean square of z, then dense layers, each with leaky ReLU",
    "block": "up (twice the size, then the filter), same, each: modulated convolution, + noise * N(0, 1) of each "
    "pixel, + bias, leaky ReLU; rgb: modulated without demodulation, + bias, added to the upsampled picture",
    "modulated": "style = dense(w); weights * style of each input, divided by the root of their sum of squares + 1e-8",
    "leaky ReLU": f"slope {LEAK}, times {GAIN:.4f}",
    "filter": f"{list(FIR_TAPS)} / {sum(FIR_TAPS):g} along both axes, times 4 after inserting zeros",
    "truncation": "w_mean + (w - w_mean) * truncation",
    "pixels": "-1 to 1, NCHW",
}
"""The description in config.json: how to make pictures from the weights."""


def write(state: Any, config: Config, folder: Path) -> None:
    """Write model.safetensors and config.json. Raises OSError if the disk is full."""
    tensors = {
        **_named("generator", state.average, MAPPING_RATE_FACTOR),
        **_named("discriminator", state.discriminator, 1.0),
        "w_mean": np.asarray(state.w_mean),
    }
    try:
        save_file(tensors, folder / "model.safetensors")
    except SafetensorError as error:  # raised for a full disk
        raise OSError(str(error)) from error
    description = {"model_type": "stylegan2", **vars(config), "words": WORDS}
    (folder / "config.json").write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")


def _named(prefix: str, params: Any, mapping_rate: float) -> dict[str, np.ndarray]:
    """Return a network's arrays by dotted path; layers of the mapping network are scaled by `mapping_rate`."""
    arrays: dict[str, np.ndarray] = {}
    for name, layer in params.items():
        path = f"{prefix}.{name}"
        if not isinstance(layer, dict):
            array = np.asarray(layer)
            arrays[path] = array.transpose(2, 0, 1) if array.ndim == 3 else array
        elif "w" in layer:
            rate = mapping_rate if prefix.endswith(".mapping") else 1.0
            w = np.asarray(layer["w"])
            w = w * np.float32((w.size // w.shape[-1]) ** -0.5 * rate)
            if path == FLATTENED_LAYER:
                pixels = (MIN_RESOLUTION, MIN_RESOLUTION, -1)
                w = w.reshape(*pixels, w.shape[-1]).transpose(2, 0, 1, 3).reshape(w.shape)
            arrays[f"{path}.weight"] = w.transpose(3, 2, 0, 1) if w.ndim == 4 else w.T
            if "b" in layer:
                arrays[f"{path}.bias"] = np.asarray(layer["b"]) * np.float32(rate)
            inner = {key: value for key, value in layer.items() if key not in ("w", "b")}
            arrays |= _named(path, inner, mapping_rate)
        else:
            arrays |= _named(path, layer, mapping_rate)
    return {name: np.ascontiguousarray(array) for name, array in arrays.items()}
