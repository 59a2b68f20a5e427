"""Make the configuration that a run records, and the facts that its hosts compare."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tpuswarm.errors import InputError
from tpuswarm.train.data.source import rows_of
from tpuswarm.train.program.compiled import Compiled
from tpuswarm.train.recipe import Recipe, Source
from tpuswarm.train.run.checkpoint import Saved
from tpuswarm.train.settings import CHANGEABLE_SETTINGS, FIXED_SETTINGS
from tpuswarm.train.user_code import blame, file_digest

LR_SCALE = "lr_scale"
"""The event of a hook that scales the learning rate; `total` is the product of all factors so far."""


def run_config(recipe: Recipe, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of config.toml; raise InputError for options that are not plain values."""
    options = recipe.options()
    try:
        json.dumps(options)
    except TypeError as error:
        raise InputError(f"the options of {recipe.name} must be plain values: {error}") from error
    return {
        "recipe": {"name": recipe.name, "target": recipe.target, "options": options},
        "train": {name: settings[name] for name in FIXED_SETTINGS if settings[name] is not None},
        "may_change": {name: settings[name] for name in CHANGEABLE_SETTINGS if settings[name] is not None},
    }


def chosen_form(compiled: Compiled) -> dict[str, Any]:
    """Return how a program runs on its devices, and with which versions: `chosen` in config.toml."""
    device = compiled.mesh.devices.flat[0]
    return {
        "platform": device.platform,
        "device": device.device_kind,
        "devices": compiled.mesh.size,
        "hosts": len({device.process_index for device in compiled.mesh.devices.flat}),
        "sharding": compiled.choice.shard,
        "remat": compiled.choice.remat,
        "attention": compiled.options.attention,
        "micro_batches": compiled.choice.accumulate,
        "reason": compiled.choice.why,
        "tokens_per_row": compiled.program.tokens_per_row,
        "jax": jax.__version__,
        "tpuswarm": version("tpuswarm"),
    }


def shared_facts(recipe: Recipe, settings: Mapping[str, Any], source: Source) -> dict[str, str]:
    """Return the facts that must be equal on all hosts of a run, by name."""
    options = {name: value for name, value in recipe.options().items() if name != "data"}  # a path may differ
    return {
        "recipe": recipe.name,
        "recipe file": file_digest(recipe.target),
        **{f"{name} of {recipe.name}": str(value) for name, value in options.items()},
        **{name: str(value) for name, value in settings.items()},
        "first row of the data": first_row_digest(source),
    }


def first_row_digest(source: Source) -> str:
    """Return the SHA-256 of the first row; not every source has a digest of all rows."""
    digest = hashlib.sha256()
    with blame("the data source failed"):
        for name, array in sorted(rows_of(source, 0, 1).items()):
            digest.update(f"{name} {array.dtype} {array.shape}".encode() + np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def checked_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what each checkpoint repeats of config.toml, to show damage: all that no resumed run may change."""
    options = {name: value for name, value in config["recipe"]["options"].items() if name != "data"}  # it may move
    return options | {name: value for name, value in config["train"].items() if name != "steps"}  # may grow


def refuse_damaged_settings(file: Path, config: Mapping[str, Any], saved: Saved) -> None:
    """Raise InputError, naming a setting, if config.toml has others than its checkpoint."""
    here = checked_settings(config)
    there = saved.about.get("settings", here)
    for name in sorted(there):  # a newer version may have more
        if here.get(name) != there.get(name):
            raise InputError(
                f"{file} is damaged: it has {name} {here.get(name)}, and the checkpoint of step {saved.step} was "
                f"saved with {there.get(name)}; put that back, or restore a copy of {file.name}"
            )


def restored_lr_scale(events: Sequence[Mapping[str, Any]], saved: Saved) -> tuple[float, str]:
    """Return the product of the learning-rate factors after a checkpoint, and a note if the events lack one."""
    found = lr_scale_after(events, saved.step)
    recorded = saved.about.get("lr_scale", found)  # before or after the hooks of its step
    if recorded in (found, lr_scale_after(events, saved.step - 1)):
        return found, ""
    note = f"events.jsonl has lost changes of the learning rate; its factor is {recorded:g}, as the checkpoint says"
    return recorded, note


def lr_scale_after(events: Iterable[Mapping[str, Any]], step: int) -> float:
    """Return the product of the learning-rate factors after `step` updates; a start undoes later factors."""
    scales: list[tuple[int, float]] = []
    for row in events:
        if row["event"] == "started":
            scales = [scale for scale in scales if scale[0] <= row.get("step", 0)]
        elif row["event"] == LR_SCALE:
            scales.append((row["step"], row["total"]))
    return next((total for at, total in reversed(scales) if at <= step), 1.0)
