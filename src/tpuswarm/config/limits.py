"""What the settings of a run can be, whoever gives them: a command, a file, a program."""

import re
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

from tpuswarm.config.units import MOST, check_number
from tpuswarm.errors import InputError

LIMITS: Mapping[str, Mapping[str, float]] = {
    "steps": {"least": 1, "below": 2**31},  # counted in int32 on a device, as rows are
    "epochs": {"above": 0, "most": MOST},
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
"""Of the settings that are numbers."""

FRACTIONS = ("epochs", "clip", "ema", "grace", "outer_lr")
"""Of those the ones that need not be whole."""

CHOICES: Mapping[str, Sequence[str]] = {
    "precision": ("bf16", "f32", "highest"),
    "shard": ("auto", "replicate", "fsdp"),
    "outer": ("average", "nesterov"),
    "quantize": ("int8", "int4"),
    "overlap": ("auto", "0"),
}
"""Of those that are one of a few words."""

PATTERNS = ("freeze", "decay")
"""Those that are regular expressions."""


def check(settings: Mapping[str, Any]) -> None:
    """Raise InputError, with the right ones, for a value that no run can have; None is not asked."""
    for name, value in settings.items():
        if value is None or (name == "batch" and value == "auto"):
            continue
        if name in LIMITS:
            check_number(value, flag(name), **LIMITS[name])
            if name not in FRACTIONS and not isinstance(value, Integral):
                raise InputError(f"{flag(name)} must be a whole number, not {value}")
        if name in CHOICES and value not in CHOICES[name]:
            *others, last = CHOICES[name]
            raise InputError(f"{flag(name)} is {', '.join(others)} or {last}, not {value!r}")
        if name in PATTERNS:
            try:
                re.compile(value)
            except re.error as error:
                raise InputError(f"{name} {value!r} is not a regular expression: {error}") from error
        if name == "devices":
            parse_devices(value)


def flag(name: str) -> str:
    """A setting as the command line calls it, without its dashes."""
    return name.replace("_", "-")


def parse_devices(which: str | int | Sequence[int]) -> int | list[int] | None:
    """How many devices, or which, from 0; None for `all`. InputError for what is neither, such as [1, 1] and 0."""
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
