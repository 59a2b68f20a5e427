"""What all benchmarks share: settings, the median with its interval, the machine in one line, the markdown table."""

import math
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Settings:
    """What the command line asked for."""

    quick: bool
    """Counts so small that the figures mean nothing: does it run at all?"""
    data: Path
    """The text of the `shakespeare` and `quality` benchmarks."""
    device_size: str = "small"
    """Of the models of the `quality` benchmark: `small` or `35m`."""
    hours: float = math.inf
    """After which the `ladder` benchmark begins no other run."""


class Skipped(Exception):
    """A benchmark that cannot run here, with the reason in a sentence."""


@dataclass(frozen=True)
class Table:
    """The result of one benchmark."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    notes: Sequence[str] = ()

    def markdown(self) -> str:
        """The table and, under it, a line for each note."""
        lines = [self.columns, ("---",) * len(self.columns), *self.rows]
        return "\n".join([*(f"| {' | '.join(line)} |" for line in lines), "", *(f"- {note}" for note in self.notes)])


class Median(NamedTuple):
    """A median and its interval."""

    low: float
    middle: float
    high: float

    def show(self, form: str) -> str:
        """`middle (low to high)`, each in a format such as `.1f`."""
        return f"{self.middle:{form}} ({self.low:{form}} to {self.high:{form}})"


def median(values: Sequence[float]) -> Median:
    """The median and the tightest pair of order statistics that holds it with at least 95% confidence.

    No distribution is assumed. With fewer than 6 values the interval is the whole range, and less confident.
    """
    ordered, count = sorted(values), len(values)
    tail, rank = 2.0**-count, 0
    while tail <= (1 - CONFIDENCE) / 2:
        rank += 1
        tail += math.comb(count, rank) * 2.0**-count
    cut = max(rank - 1, 0)
    middle = (ordered[(count - 1) // 2] + ordered[count // 2]) / 2
    return Median(ordered[cut], middle, ordered[count - 1 - cut])


def verdict(ok: bool) -> str:
    """What a table says beside a limit."""
    return "met" if ok else "**missed**"


def machine() -> str:
    """CPU model, cores, memory, Python, jax, date."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        f"{_cpu()}, {len(os.sched_getaffinity(0))} cores, {memory:.0f} GiB; {platform.system()}, "
        f"Python {platform.python_version()}, jax {version('jax')}, jaxlib {version('jaxlib')}; {date.today()}"
    )


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
