"""Parse counts, durations and intervals as people write them: 10M, 5m, 500."""

import math
import re
from dataclasses import dataclass
from decimal import Decimal
from numbers import Real

from tpuswarm.errors import InputError

GIB = 2**30
COUNT_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}
SECONDS_PER_UNIT = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}

MAX_PORT = 65535
MAX_COUNT = 10**15


def parse_count(text: str | int, what: str) -> int:
    """Parse a whole number above 0: 500, 1e3, or with K, M, B or T (powers of 1,000): `10M` is 10,000,000.

    Raise InputError with the name `what` for anything else.
    """
    match = re.fullmatch(r"(-?\d{1,30}(?:\.\d{1,30})?(?:E\+?\d{1,2})?)\s*([KMBGT]?)", str(text).strip().upper())
    if not match:
        raise InputError(f"{what} is a number such as 500, 20K or 10M, not {text!r}")
    value = Decimal(match[1]) * COUNT_UNITS[match[2]]
    if value <= 0 or value != int(value):
        raise InputError(f"{what} must be a whole number above 0, not {text!r}")
    check_number(int(value), what, most=MAX_COUNT)
    return int(value)


def parse_seconds(text: str | float, what: str) -> float:
    """Parse `10`, `10s`, `5m`, `2h` or `1d`; 0 is allowed."""
    match = re.fullmatch(r"(\d{1,12}(?:\.\d+)?)\s*([smhd]?)", str(text).strip())
    if not match:
        raise InputError(f"{what} is a duration such as 30s, 5m, 2h or 7d, not {text!r}")
    return float(match[1]) * SECONDS_PER_UNIT[match[2] or "s"]


def check_number(
    value: float,
    what: str,
    *,
    above: float | None = None,
    least: float | None = None,
    below: float | None = None,
    most: float | None = None,
) -> None:
    """Raise InputError with the name `what` and the bounds unless the number is finite and within them."""
    if not isinstance(value, Real):
        raise InputError(f"{what} must be a number, not {value!r}")
    within = (
        math.isfinite(value)
        and (above is None or value > above)
        and (least is None or value >= least)
        and (below is None or value < below)
        and (most is None or value <= most)
    )
    if within:
        return
    bounds = [(above, "above {:,}"), (least, "at least {:,}"), (below, "below {:,}"), (most, "at most {:,}")]
    words = [text.format(bound) for bound, text in bounds if bound is not None]
    raise InputError(f"{what} must be {' and '.join(words) or 'a finite number'}, not {value}")


def parse_address(text: str, what: str) -> tuple[str, int]:
    """Parse HOST:PORT."""
    match = re.fullmatch(r"(.+):([0-9]{1,5})", text)
    if not match or int(match[2]) > MAX_PORT:
        raise InputError(f"{what} is HOST:PORT, with a port up to {MAX_PORT}, not {text!r}")
    return match[1], int(match[2])


@dataclass(frozen=True)
class Interval:
    """A period in steps or in seconds; exactly one is set."""

    steps: int | None = None
    seconds: float | None = None

    def due(self, step: int, elapsed: float) -> bool:
        """Return whether it is time at `step` (counted from 1), `elapsed` seconds after the last time."""
        if self.steps is not None:
            return step % self.steps == 0
        return self.seconds is not None and elapsed >= self.seconds


def parse_every(text: str | int, what: str) -> Interval:
    """Parse `500` as every 500 steps, `5m` as every five minutes."""
    try:
        if re.fullmatch(r".*[smhd]", str(text).strip()):
            seconds = parse_seconds(text, what)
            check_number(seconds, what, above=0)
            return Interval(seconds=seconds)
        return Interval(steps=parse_count(text, what))
    except InputError as error:
        raise InputError(f"{what} is steps such as 500, or a time such as 30s or 5m, not {text!r}") from error
