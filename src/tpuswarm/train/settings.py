"""Run settings: what was asked, what the run has, what the recipe wants, and which of them win."""

import math
from collections.abc import Mapping
from typing import Any

from tpuswarm.config.limits import option_name
from tpuswarm.config.units import MAX_COUNT, check_number
from tpuswarm.errors import InputError

FIXED = (
    "steps",
    "batch",
    "precision",
    "accumulate",
    "clip",
    "freeze",
    "decay",
    "ema",
    "seed",
    "deterministic",
    "init_from",
    "init_only",
    "data",
    "overfit_batches",
)
"""Settings that make a run what it is; the others may change when it is resumed."""

HABITS = ("save_every", "keep", "keep_best", "eval_every", "eval_batch")
"""Those that may change, but only where another is named."""

FREE = ("devices", "shard", *HABITS, "grace")


def differences(stored: Mapping[str, Any], asked: Mapping[str, Any]) -> list[str]:
    """A phrase for each asked setting (None is not asked) that is not the stored one."""
    return [
        f"{name} was {_shown(stored.get(name))}, now {_shown(value)}"
        for name, value in asked.items()
        if value is not None and stored.get(name) != value
    ]


def _shown(value: Any) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def refuse_differences(where: Any, found: list[str]) -> None:
    """Raise InputError for a run directory of another recipe or configuration, naming all that differs."""
    if not found:
        return
    if found[0].startswith("steps was ") and len(found) == 1:
        raise InputError(
            f"{where}: {found[0]}, and a run can only become longer, and only where its learning rate has no schedule; "
            f"to train its parameters further, begin another run with --init-from {where}"
        )
    raise InputError(
        f"{where} has a different configuration: {'; '.join(found)}; "
        f"only {', '.join(f'--{option_name(each)}' for each in FREE)} may change on resume; use another --run"
    )


def count_steps(
    steps: int | None,
    tokens: int | None,
    epochs: float | None,
    tokens_per_step: int,
    rows_per_epoch: int | None,
    batch: int,
) -> int | None:
    """The length of the whole run in steps, from whichever one was given; None where none was.

    Tokens and epochs are rounded up to whole steps. Raises InputError for two of them, numbers below 1 and epochs of
    data without an end.
    """
    given = {
        name: value for name, value in (("steps", steps), ("tokens", tokens), ("epochs", epochs)) if value is not None
    }
    if len(given) > 1:
        raise InputError(f"give one of steps, tokens and epochs, not {' and '.join(given)}")
    for name, value in given.items():
        check_number(value, name, above=0, most=MAX_COUNT)
    if tokens is not None:
        return -(-tokens // tokens_per_step)
    if epochs is not None:
        if rows_per_epoch is None:
            raise InputError("this data has no epochs (its source gives no rows_per_epoch); use --steps")
        return max(1, -(-int(epochs * rows_per_epoch) // batch))
    return steps


def check_batch(batch: int, devices: int, accumulate: int, fewer: bool = True, name: str = "batch") -> None:
    """Raise InputError, with the ways out, unless every device gets whole rows in every micro-batch.

    fewer: whether some of the devices may be left out; name: of the setting.
    """
    for each, value in ((name, batch), ("accumulate", accumulate)):
        if value < 1:
            raise InputError(f"{each} must be 1 or more, not {value}")
    unit = devices * accumulate
    if batch % unit == 0:
        return
    counts = range(devices, 0 if fewer else devices - 1, -1)
    ways = ((d, a) for d in counts for a in range(accumulate, 0, -1) if batch % (d * a) == 0)
    some, smaller = next(ways, (devices, accumulate))
    other = [f"--devices {some}"] * (some != devices) + [f"--accumulate {smaller}"] * (smaller != accumulate)
    raise InputError(
        f"a batch of {batch} rows does not divide evenly over devices ({devices}) x micro-batches ({accumulate}) = "
        f"{unit}; use --{option_name(name)} {math.ceil(batch / unit) * unit}{' or ' * bool(other)}{' '.join(other)}"
    )
