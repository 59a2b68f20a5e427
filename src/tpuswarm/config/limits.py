"""Check the settings of a run, whether they come from a command, a file or a program."""

import re
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

from tpuswarm.config.units import MAX_COUNT, check_number
from tpuswarm.errors import InputError

NUMBER_LIMITS: Mapping[str, Mapping[str, float]] = {
    "steps": {"least": 1, "below": 2**31},  # devices count steps and rows in int32
    "epochs": {"above": 0, "most": MAX_COUNT},
    "batch": {"least": 1, "below": 2**31},
    "eval_batch": {"least": 1, "below": 2**31},
    "accumulate": {"least": 1},
    "overfit_batches": {"least": 1},
    "clip": {"above": 0},
    "ema": {"above": 0, "below": 1},
    "seed": {"least": 0, "below": 2**32},  # JAX takes no more bits
    "keep": {"least": 1},
    "grace": {"least": 0},
    "members": {"least": 0},
    "expect": {"least": 0},
    "devices_per_member": {"least": 1},
    "cycle": {"least": 1},
    "outer_lr": {"above": 0},
}

FRACTIONAL = ("epochs", "clip", "ema", "grace", "outer_lr")

CHOICES: Mapping[str, Sequence[str]] = {
    "precision": ("bf16", "f32", "highest"),
    "shard": ("auto", "replicate", "fsdp"),
    "outer": ("average", "nesterov"),
    "quantize": ("int8", "int4"),
    "overlap": ("auto", "0"),
}

REGEX_SETTINGS = ("freeze", "decay")


def check_settings(settings: Mapping[str, Any]) -> None:
    """Raise InputError for an invalid value; None means not set."""
    for name, value in settings.items():
        if value is None or (name == "batch" and value == "auto"):
            continue
        if name in NUMBER_LIMITS:
            check_number(value, option_name(name), **NUMBER_LIMITS[name])
            if name not in FRACTIONAL and not isinstance(value, Integral):
                raise InputError(f"{option_name(name)} must be a whole number, not {value}")
        if name in CHOICES and value not in CHOICES[name]:
            *others, last = CHOICES[name]
            raise InputError(f"{option_name(name)} is {', '.join(others)} or {last}, not {value!r}")
        if name in REGEX_SETTINGS:
            try:
                re.compile(value)
            except re.error as error:
                raise InputError(f"{name} {value!r} is not a regular expression: {error}") from error
        if name == "devices":
            parse_devices(value)


def option_name(name: str) -> str:
    """Return the name of a setting on the command line, without dashes: `eval-batch`."""
    return name.replace("_", "-")


def parse_devices(which: str | int | Sequence[int]) -> int | list[int] | None:
    """Return a number of devices, their indices, or None for `all`; raise InputError for anything else."""
    if isinstance(which, str):
        text = which.strip()
        if text == "all":
            return None
        if re.fullmatch(r"-?\d{1,9}", text):
            which = int(text)
        elif re.fullmatch(r"\[\s*\d{1,9}(\s*,\s*\d{1,9})*\s*\]", text):
            which = [int(number) for number in re.findall(r"\d+", text)]
        else:
            raise InputError(f"devices is all, a number such as 8, or indices such as [5], not {text!r}")
    if isinstance(which, int):
        if which < 1:
            raise InputError(f"devices must be 1 or more, not {which}")
        return which
    if len(set(which)) != len(which):
        raise InputError(f"devices {list(which)} names a device twice")
    return list(which)
