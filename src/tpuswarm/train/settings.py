"""Compare and check run settings."""

import math
from collections.abc import Mapping
from typing import Any

from tpuswarm.config.limits import option_name
from tpuswarm.config.units import MAX_COUNT, check_number
from tpuswarm.errors import InputError

FIXED_SETTINGS = (
    "steps", "batch", "precision", "accumulate", "clip", "freeze", "decay", "ema", "seed", "deterministic", "init_from",
    "init_only", "data", "overfit_batches",
)  # fmt: skip
"""Settings that a resumed run cannot change."""

REMEMBERED_SETTINGS = ("save_every", "keep", "keep_best", "eval_every", "eval_batch")
"""Settings that a resumed run takes over unless the user names another value."""

CHANGEABLE_SETTINGS = ("devices", "shard", *REMEMBERED_SETTINGS, "grace")


def differences(stored: Mapping[str, Any], asked: Mapping[str, Any]) -> list[str]:
    """Return a phrase for each setting that differs from the stored one; None in `asked` means not set."""
    return [
        f"{name} was {_shorten(stored.get(name))}, now {_shorten(value)}"
        for name, value in asked.items()
        if value is not None and stored.get(name) != value
    ]


def _shorten(value: Any) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def refuse_differences(where: Any, found: list[str]) -> None:
    """Raise InputError that names all `found` differences of a run's configuration; none if there are none."""
    if not found:
        return
    if found[0].startswith("steps was ") and len(found) == 1:
        raise InputError(
            f"{where}: {found[0]}; a run can only become longer, and only if its learning rate has no schedule. "
            f"To train its parameters further, begin another run with --init-from {where}"
        )
    raise InputError(
        f"{where} has a different configuration: {'; '.join(found)}; "
        f"only {', '.join(f'--{option_name(name)}' for name in CHANGEABLE_SETTINGS)} may change on resume; "
        "use another --run"
    )


def count_steps(
    steps: int | None,
    tokens: int | None,
    epochs: float | None,
    tokens_per_step: int,
    rows_per_epoch: int | None,
    batch: int,
) -> int | None:
    """Return the length of the whole run in steps from `steps`, `tokens` or `epochs`; None if none is given.

    Tokens and epochs are rounded up to whole steps. Raises InputError for more than one of them, for a number that is
    not above 0, and for epochs of endless data.
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


def check_batch(batch: int, devices: int, accumulate: int, can_use_fewer: bool = True, name: str = "batch") -> None:
    """Raise InputError, with valid values, unless every device gets whole rows in every micro-batch.

    can_use_fewer: whether the error may suggest fewer devices; name: of the setting.
    """
    for setting, value in ((name, batch), ("accumulate", accumulate)):
        if value < 1:
            raise InputError(f"{setting} must be 1 or more, not {value}")
    unit = devices * accumulate
    if batch % unit == 0:
        return
    counts = range(devices, 0 if can_use_fewer else devices - 1, -1)
    valid = ((d, a) for d in counts for a in range(accumulate, 0, -1) if batch % (d * a) == 0)
    fewer, smaller = next(valid, (devices, accumulate))
    other = [f"--devices {fewer}"] * (fewer != devices) + [f"--accumulate {smaller}"] * (smaller != accumulate)
    raise InputError(
        f"a batch of {batch} rows does not divide evenly over devices ({devices}) x micro-batches ({accumulate}) = "
        f"{unit}; use --{option_name(name)} {math.ceil(batch / unit) * unit}{' or ' * bool(other)}{' '.join(other)}"
    )
