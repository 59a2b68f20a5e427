"""The built-in recipes by name.

Most lines of this room are mathematics, file formats and refusals of damaged files, so that it can hardly shrink.
"""

import json
from pathlib import Path

from tpuswarm.catalog import public_models
from tpuswarm.config.nearest import did_you_mean
from tpuswarm.errors import InputError

GPT2 = "tpuswarm.recipes.gpt2.recipe:GPT2"
DECODER = "tpuswarm.recipes.decoder.recipe:Decoder"
STYLEGAN2 = "tpuswarm.recipes.stylegan2.recipe:StyleGAN2"

BUILT_IN: dict[str, tuple[str, dict[str, str]]] = {
    "gpt2-tiny": (GPT2, {"size": "tiny"}),
    "gpt2-124m": (GPT2, {"size": "124m"}),
    "gpt2-355m": (GPT2, {"size": "355m"}),
    "gpt2-774m": (GPT2, {"size": "774m"}),
    "gpt2-1558m": (GPT2, {"size": "1558m"}),
    "llama-tiny": (DECODER, {"size": "tiny"}),
    "llama-300m": (DECODER, {"size": "300m"}),
    "stylegan2-32": (STYLEGAN2, {"resolution": "32", "lr": "0.004", "r1": "1", "average": "2000"}),
    **{f"stylegan2-{side}": (STYLEGAN2, {"resolution": f"{side}"}) for side in (64, 128, 256, 512, 1024)},
}
"""Name → the recipe's class and the options that the name implies."""

ALIASES = {
    "gpt2-117m": "gpt2-124m", "gpt2-345m": "gpt2-355m",
    "gpt2": "gpt2-124m", "gpt2-small": "gpt2-124m", "gpt2-medium": "gpt2-355m", "gpt2-large": "gpt2-774m",
    "gpt2-xl": "gpt2-1558m",
}  # fmt: skip
"""OpenAI's wrong labels of two sizes, and the names of the released models."""


def find(name: str) -> tuple[str, dict[str, str]]:
    """Return the class and preset options of a recipe; `module:Name` and `file.py:Name` are returned unchanged.

    hf:ORG/NAME and hf:DIR mean a published language model. The name of one in the catalog gives its shape, without
    weights, and no data.

    Raises InputError with the nearest name for an unknown one.
    """
    if name.startswith("hf:"):
        return DECODER, {"architecture": name}
    if ":" in name:
        return name, {}
    if name.endswith(".py"):
        if not Path(name).exists():
            raise InputError(f"there is no file {name}")
        raise InputError(f"{name} may hold several recipes; name the one you mean: {name}:NAME")
    key = name.lower()
    key = ALIASES.get(key, key)
    if key not in BUILT_IN and "/" in name:
        raise InputError(f"unknown recipe {name!r}; a published model or its folder is named hf:{name}")
    if model := public_models().get(key):
        return DECODER, {"architecture": json.dumps(model.config), "data": "fake"}
    if key not in BUILT_IN:
        raise InputError(f"unknown recipe {name!r}; {did_you_mean(name, [*BUILT_IN, *ALIASES, *public_models()])}")
    return BUILT_IN[key]
