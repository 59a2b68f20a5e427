"""Settings, medians with intervals, the machine in one line, and markdown tables of all benchmarks."""

import math
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

CONFIDENCE_RATIO = 0.95


@dataclass(frozen=True)
class Settings:
    """Options of the command line.

    quick: tiny counts, to see that it runs. data: the text of the `shakespeare` and `quality` benchmarks. peers: a
    folder with clones of other projects.
    """

    quick: bool
    data: Path
    peers: Path = Path(".peers")


class Skipped(Exception):
    """A benchmark cannot run here; the message gives the reason."""


@dataclass(frozen=True)
class Table:
    """The result of one benchmark."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    notes: Sequence[str] = ()

    def markdown(self) -> str:
        lines = [self.columns, ("---",) * len(self.columns), *self.rows]
        return "\n".join([*(f"| {' | '.join(line)} |" for line in lines), "", *(f"- {note}" for note in self.notes)])


class Median(NamedTuple):
    low: float
    middle: float
    high: float

    def show(self, form: str) -> str:
        """Return `middle (low to high)`, each in a format such as `.1f`."""
        return f"{self.middle:{form}} ({self.low:{form}} to {self.high:{form}})"


def median(values: Sequence[float]) -> Median:
    """Return the median and the tightest pair of order statistics that contains it with at least 95% confidence.

    No distribution is assumed. With fewer than 6 values the interval is the whole range, and less confident.
    """
    ordered, count = sorted(values), len(values)
    tail, rank = 2.0**-count, 0
    while tail <= (1 - CONFIDENCE_RATIO) / 2:
        rank += 1
        tail += math.comb(count, rank) * 2.0**-count
    cut = max(rank - 1, 0)
    middle = (ordered[(count - 1) // 2] + ordered[count // 2]) / 2
    return Median(ordered[cut], middle, ordered[count - 1 - cut])


def verdict(ok: bool) -> str:
    return "met" if ok else "**missed**"


def machine() -> str:
    """Return CPU model, cores, memory, Python, jax and date."""
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
