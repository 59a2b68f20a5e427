"""Counts, durations and intervals as people write them: 10M, 5m, 500."""

import re
from dataclasses import dataclass

from tpuswarm.errors import InputError

GIB = 2**30
COUNT_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}
SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_count(text: str | int, what: str) -> int:
    """A positive whole number, with an optional K, M, B or T (powers of 1,000): `10M` is 10,000,000.

    Raises InputError naming `what` for anything else, zero and negative numbers included.
    """
    match = re.fullmatch(r"(-?\d+(?:\.\d+)?)\s*([KMBGT]?)", str(text).strip().upper())
    if not match:
        raise InputError(f"{what} is a number such as 500, 20K or 10M, not {text!r}")
    value = float(match[1]) * COUNT_UNITS[match[2]] if "." in match[1] else int(match[1]) * COUNT_UNITS[match[2]]
    if value <= 0 or value != int(value):
        raise InputError(f"{what} must be a whole number above 0, not {text!r}")
    return int(value)


def parse_seconds(text: str | float, what: str) -> float:
    """Seconds in `10`, `10s`, `5m`, `2h` or `1d`; 0 is allowed. Raises InputError naming `what`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhd]?)", str(text).strip())
    if not match:
        raise InputError(f"{what} is a duration such as 30s, 5m or 2h, not {text!r}")
    return float(match[1]) * SECONDS[match[2] or "s"]


@dataclass(frozen=True)
class Every:
    """An interval either in steps or in seconds; exactly one is set."""

    steps: int | None = None
    seconds: float | None = None

    def due(self, step: int, elapsed: float) -> bool:
        """Whether it is time: at `step` (counted from 1), `elapsed` seconds after the last time."""
        if self.steps is not None:
            return step % self.steps == 0
        return self.seconds is not None and elapsed >= self.seconds


def parse_every(text: str | int, what: str) -> Every:
    """`500` is every 500 steps, `5m` every five minutes. Raises InputError naming `what`."""
    if re.fullmatch(r"[\d.]+\s*[smhd]", str(text).strip()):
        seconds = parse_seconds(text, what)
        if seconds <= 0:
            raise InputError(f"{what} must be above 0, not {text!r}")
        return Every(seconds=seconds)
    return Every(steps=parse_count(text, what))
