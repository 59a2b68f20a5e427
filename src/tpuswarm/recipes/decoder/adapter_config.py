"""Read and write adapter_config.json, in which peft describes adapters."""

import json
from pathlib import Path
from typing import Any

from tpuswarm.errors import InputError
from tpuswarm.recipes.decoder.config import TARGETS, Lora
from tpuswarm.recipes.language.hub import PREFIX, Published

FILE = "adapter_config.json"
PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",), "use_dora": (None, False), "bias": (None, "none"),
    "modules_to_save": (None, []), "rank_pattern": (None, {}), "alpha_pattern": (None, {}),
    "layers_to_transform": (None, []), "fan_in_fan_out": (None, False), "lora_bias": (None, False),
    "exclude_modules": (None, []), "target_parameters": (None, []), "trainable_token_indices": (None, []),
    "layer_replication": (None, []), "alora_invocation_tokens": (None, []),
    "init_lora_weights": (None, True, False, "gaussian"),
}  # fmt: skip
"""Fields of adapter_config.json that change the computation → the values with which it is supported."""


def write(lora: Lora, base: str, folder: Path) -> None:
    """Describe adapters of the published model `base`."""
    facts = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base.removeprefix(PREFIX),
        "r": lora.rank, "lora_alpha": lora.alpha, "use_rslora": lora.by_root, "lora_dropout": lora.dropout,
        "bias": "none", "inference_mode": True, "target_modules": list(lora.targets),
    }  # fmt: skip
    (folder / FILE).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def read_options(place: Published) -> dict[str, Any] | None:
    """Return the options of the recipe for the adapters at `place`; None if it holds a whole model.

    Without lora_base if they do not say which model they belong to.
    Raises InputError naming what is damaged or not supported.
    """
    if place.find("config.json") or not (path := place.find(FILE)):  # only adapters are asked for the second file
        return None
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
        rank, alpha, by_root = int(about["r"]), float(about["lora_alpha"]), about.get("use_rslora")
        base: str | None = about.get("base_model_name_or_path")
        modules = about["target_modules"]
        unknown = isinstance(modules, str) or set(modules) - set(TARGETS)
        refused = {name: about[name] for name, plain in PLAIN.items() if about.get(name) not in plain}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"the {FILE} of {place.name} is damaged: {error!r}") from error
    if by_root not in (None, True, False) or not isinstance(base, str | None):
        raise InputError(f"the {FILE} of {place.name} is damaged: use_rslora is {by_root}, its base {base}")
    if unknown:
        refused["target_modules"] = modules
    for name, value in refused.items():
        raise InputError(f"the adapters of {place.name} have {name} {value}, which is not supported")
    targets = [name for name in TARGETS if name in modules]
    options = {"lora": rank, "lora_alpha": alpha, "lora_targets": ",".join(targets), "rslora": bool(by_root)}
    return options | ({"lora_base": f"{PREFIX}{base}"} if base else {})
