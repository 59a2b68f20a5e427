"""What every live view is made of: a region that is drawn anew, a bar, a curve, tables that fit and do not jump."""

import importlib.util
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, JustifyMethod, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from tpuswarm.train.process.live_region import LiveRegion

REFRESH_HZ = 2
"""The view is drawn on the processor that trains; more often would be felt."""
ABOVE, LEAST = 8, 8
"""Rows of a terminal that are left to what is said, and those that a view takes at least."""
BARS = "▁▂▃▄▅▆▇█"
GAP = 2
"""Columns between those of a table."""
WIDEST = 120
"""Columns of a bar and of a curve."""
POINTS = 256
"""Of a curve."""
WINDOW = 120.0
"""Seconds over which a pace is told."""

STATES = {
    "running": "green", "alive": "green", "evaluating": "green", "joining": "yellow",
    "stopped": "yellow", "failed": "red", "killed": "red", "lost": "red",
}  # fmt: skip
"""Colours of those of runs and members in a column `state`."""

Draw = Callable[[int, int], RenderableType]
"""A picture for so many columns and at most so many rows. Called in a thread of its own: it draws from a snapshot."""


@dataclass
class _Sized:
    draw: Draw

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        yield Rule(style="dim")
        yield self.draw(options.max_width, max(LEAST, console.height - ABOVE))


def can_draw(console: Console) -> bool:
    """Whether a view can be drawn anew there: on a terminal, and in a notebook that has ipywidgets, which rich uses."""
    return console.is_terminal or (console.is_jupyter and importlib.util.find_spec("ipywidgets") is not None)


def region(console: Console, draw: Draw) -> Live:
    """The end of a terminal, drawn anew twice a second; what is printed scrolls above it."""
    to_terminal = sys.stdout.isatty()  # then what is printed would be drawn over
    live = LiveRegion(_Sized(draw), console=console, refresh_per_second=REFRESH_HZ, redirect_stdout=to_terminal)
    live.start()
    return live


class Pace:
    """How fast something goes: what was done in the last WINDOW seconds."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, float]] = deque()

    def add(self, now: float, done: float) -> None:
        """So much is done, at a time in seconds."""
        if len(self._seen) > 1 and now - self._seen[-2][0] < WINDOW / 100:
            self._seen.pop()
        self._seen.append((now, done))
        while len(self._seen) > 2 and now - self._seen[0][0] > WINDOW:
            self._seen.popleft()

    @property
    def per_second(self) -> float | None:
        """None before anything was done."""
        if len(self._seen) < 2:
            return None
        (start, before), (now, done) = self._seen[0], self._seen[-1]
        return (done - before) / (now - start) if now > start and done > before else None


class Curve:
    """A line of any length in little memory: means of equally many values, the last one of those that are left."""

    def __init__(self) -> None:
        self._sums: list[float] = []
        self._size, self._last = 1, 0

    def add(self, value: float) -> None:
        """One more value."""
        if not self._sums or self._last == self._size:
            if len(self._sums) == POINTS:
                self._sums = [first + second for first, second in zip(self._sums[::2], self._sums[1::2], strict=True)]
                self._size *= 2
            self._sums.append(0.0)
            self._last = 0
        self._sums[-1] += value
        self._last += 1

    @property
    def means(self) -> tuple[float, ...]:
        """At most POINTS."""
        return tuple(
            each / (self._last if number == len(self._sums) else self._size)
            for number, each in enumerate(self._sums, 1)
        )


def sparkline(values: Sequence[float], width: int) -> str:
    """Values as bars, averaged into `width` of them where there are more, but never more than WIDEST."""
    if not values:
        return ""
    count = min(len(values), width, WIDEST)
    ends = [len(values) * each // count for each in range(count + 1)]
    means = [sum(values[start:end]) / (end - start) for start, end in pairwise(ends)]
    low, high = min(means), max(means)
    span = (high - low) or 1.0
    return "".join(BARS[round((value - low) / span * (len(BARS) - 1))] for value in means)


def bar(done: int, whole: int, what: str, width: int) -> RenderableType:
    """The share that is done, a bar as wide as there is room, and how much of what that is."""
    share = min(1.0, done / max(whole, 1))
    line = Table.grid(padding=(0, 1), expand=True)
    line.width = min(width, WIDEST)
    line.add_column(no_wrap=True)
    line.add_column(ratio=1)
    line.add_column(no_wrap=True, justify="right")
    amount = f"{done:>{len(f'{whole:,}')},} of {whole:,} {what}"
    line.add_row(f"{int(share * 100):>3}%", ProgressBar(total=1.0, completed=share), amount)
    return line


@dataclass(frozen=True)
class Column:
    """A column of a table that has to fit."""

    name: str
    right: bool = False
    width: int = 0
    """It is at least so wide, so that it does not move when a figure grows."""
    rank: int = 0
    """Where there is no room, the columns of the highest rank are left out first; those of rank 0 never are."""
    wraps: int = 0
    """It may be as narrow as this, its text in several lines; 0 where it may not."""


def table(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int, colors: Sequence[str] | None = None
) -> Table:
    """A table in which nothing is cut: where there is no room, text is wrapped, then columns are left out.

    In the end the first column, which has the names, is folded. A column in which nothing stands is left out as well.
    colors: of each row's `state`, where STATES does not say.
    """
    wide = [
        max(each.width, cell_len(each.name), *(cell_len(row[number]) for row in rows), 0)
        for number, each in enumerate(columns)
    ]
    shown = [number for number in range(len(columns)) if not rows or any(row[number] for row in rows)]
    while (needed := _shrunk(columns, wide, shown, width)) is None:
        last = max(shown, key=lambda each: columns[each].rank)
        if not columns[last].rank:
            break
        shown.remove(last)
    made = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0))
    for each in shown:
        justify: JustifyMethod = "right" if columns[each].right else "left"
        size = needed[each] if needed else None if each == shown[0] else wide[each]
        made.add_column(columns[each].name, justify=justify, overflow="fold", width=size)
    for number, row in enumerate(rows):
        color = [colors[number] if colors else STATES.get(cell, "") for cell in row]
        styles = (color[each] if columns[each].name == "state" else "" for each in shown)
        made.add_row(*(Text(row[each], style) for each, style in zip(shown, styles, strict=True)))
    return made


def _shrunk(columns: Sequence[Column], wide: Sequence[int], shown: Sequence[int], width: int) -> dict[int, int] | None:
    """Widths that fit, the widest text wrapped first; None where there are none."""
    found = {each: wide[each] for each in shown}
    over = sum(found.values()) + GAP * (len(shown) - 1) - width
    for _ in range(over):
        narrower = [each for each in shown if columns[each].wraps and found[each] > columns[each].wraps]
        if not narrower:
            return None
        found[max(narrower, key=lambda each: found[each])] -= 1
    return found
