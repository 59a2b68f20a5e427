"""Figures as people read them: losses, times, speeds."""

import math
from datetime import timedelta

SMALL = 1e-4
"""Below it a number is shown with an exponent."""
LEAST_SHARE = 0.01
"""What is less would be 0%, and what lacks less to the whole 100%."""


def significant(value: float | None) -> str:
    """Four significant digits, for losses and their like: `2.103`, `0.01234`, `1.200e-05`; a dash for none."""
    if value is None:
        return "–"
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    text = f"{value:#.4g}".rstrip(".")
    return f"{value:.3e}" if "e" in text or abs(value) < SMALL else text


def clock(seconds: float | None) -> str:
    """`0:01:05`, `1 day, 2:00:00`; dashes for none."""
    return "-:--:--" if seconds is None else str(timedelta(seconds=round(seconds)))


def age(seconds: float) -> str:
    """The largest unit alone: `12 s`, `5 min`, `3 h`, `2 days`."""
    for unit, size in (("day", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            count = int(seconds // size)
            return f"{count} {unit}{'s' * (unit == 'day' and count > 1)}"
    return f"{max(0, int(seconds))} s"


def pace(per_second: float | None) -> str:
    """How fast steps are: `12.3 steps/s`, or `4.56 s/step` where that is less than one a second."""
    if not per_second:
        return "– steps/s"
    return f"{per_second:,.1f} steps/s" if per_second >= 1 else f"{1 / per_second:,.1f} s/step"


def share(part: float) -> str:
    """A part of the whole: `6%`, `1/7,282` of what would be 0%, `nearly all` of what would be 100%."""
    if 0 < part < LEAST_SHARE:
        return f"1/{1 / part:,.0f}"
    return "nearly all" if 1 - LEAST_SHARE < part < 1 else f"{part:.0%}"


def unit(tokens_per_row: int) -> str:
    """What the tokens of a run are: rows, where a row counts for one."""
    return "tokens" if tokens_per_row > 1 else "rows"
