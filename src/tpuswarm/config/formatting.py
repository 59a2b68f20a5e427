"""Format figures and sentences for people."""

import math
import re
from datetime import timedelta
from unicodedata import category, east_asian_width

MIN_FIXED_POINT = 1e-4
"""Smaller figures have an exponent."""
MIN_SHOWN_SHARE = 0.01

WORD = re.compile(r"\s*((?:`[^`]*`|[^\s`]+|`)+)")
"""A word, or a command in backticks: a line never breaks inside, so that it can be pasted."""


CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Escape sequences, and single control characters but \\t and \\n."""


def format_figure(value: float | None) -> str:
    """Format with four significant digits: `2.103`, `0.01234`, `1.200e-05`; None is a dash."""
    if value is None:
        return "–"
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    text = f"{value:#.4g}".rstrip(".")
    return f"{value:.3e}" if "e" in text or abs(value) < MIN_FIXED_POINT else text


def format_duration(seconds: float | None) -> str:
    """Format as `0:01:05` or `1 day, 2:00:00`; None is dashes."""
    return "-:--:--" if seconds is None else str(timedelta(seconds=round(seconds)))


def format_age(seconds: float) -> str:
    """Format in the largest unit: `12 s`, `5 min`, `3 h`, `2 days`."""
    for unit, size in (("day", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            count = int(seconds // size)
            return f"{count} {unit}{'s' * (unit == 'day' and count > 1)}"
    return f"{max(0, int(seconds))} s"


def format_bytes(count: int) -> str:
    """Format as `1.2 GB`, `3.4 MB`, `5.6 kB` or `7 B`."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if round(count / size * 1000, 1) >= 1000:  # else 1,000.0 of the smaller unit
            return f"{count / size:,.1f} {unit}"
    return f"{count} B"


def format_step_rate(per_second: float | None) -> str:
    """Format as `12.3 steps/s`, or below one a second as `4.5 s/step`."""
    if not per_second:
        return "– steps/s"
    return f"{per_second:,.1f} steps/s" if per_second >= 1 else f"{1 / per_second:,.1f} s/step"


def format_share(part: float) -> str:
    """Format as `6%`; `1/7,282` instead of 0%, `nearly all` instead of 100%."""
    if 0 < part < MIN_SHOWN_SHARE:
        return f"1/{1 / part:,.0f}"
    return "nearly all" if 1 - MIN_SHOWN_SHARE < part < 1 else f"{part:.0%}"


def token_unit(tokens_per_row: int) -> str:
    """Return `tokens`, or `rows` if a row is one token."""
    return "tokens" if tokens_per_row > 1 else "rows"


def printable(text: str) -> str:
    """Remove what would control a terminal; line ends and tabs stay. Runs may hold the text of strangers."""
    return CONTROL.sub("", text)


def wrap_text(text: str, width: int, hang: int = 0) -> str:
    """Break lines wider than `width` between words.

    Continuation lines start at column `hang`, by default at the indent of their first line. A word or command wider
    than `width` gets a line of its own.
    """
    return "\n".join(_wrap_line(line, width, hang) for line in text.split("\n"))


def columns_of(text: str) -> int:
    """Return the columns of a terminal that a text takes: two for each wide character, none for a combining one."""
    if text.isascii():
        return len(text)
    wide = sum(east_asian_width(letter) in "WF" for letter in text)
    return len(text) + wide - sum(category(letter) in ("Mn", "Me", "Cf") for letter in text)


def _wrap_line(line: str, width: int, hang: int) -> str:
    if columns_of(line) <= width:
        return line
    indent = " " * (hang or len(line) - len(line.lstrip()))
    lines, start, end = [], 0, 0
    room = width
    for word in WORD.finditer(line):
        if columns_of(line[start : word.end()]) > room and end > start:
            lines.append(line[start:end])
            start, room = word.start(1), width - len(indent)
        end = word.end()
    return f"\n{indent}".join([*lines, line[start:end]])
