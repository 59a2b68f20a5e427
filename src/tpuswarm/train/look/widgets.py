"""Parts of terminal views: a live region, a progress bar, a curve, and tables that fit and do not jump."""

import importlib.util
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from rich.cells import cell_len
from rich.console import Console, Group, JustifyMethod, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from tpuswarm.train.process.live_region import LiveRegion

REFRESH_HZ = 2
"""Drawing takes time from a CPU that trains."""
ROWS_ABOVE, MIN_ROWS = 8, 8
"""Terminal rows for messages above a view, and rows of the smallest view."""
SPARK_CHARACTERS = "▁▂▃▄▅▆▇█"
COLUMN_GAP = 2
MAX_BAR_WIDTH = 120
"""Columns of a bar and of a curve."""
MAX_CURVE_POINTS = 256
PACE_WINDOW_S = 120.0

STATE_COLORS = {
    "running": "green", "alive": "green", "evaluating": "green", "joining": "yellow",
    "stopped": "yellow", "failed": "red", "killed": "red", "lost": "red",
}  # fmt: skip
"""States of runs and members."""

Draw = Callable[[int, int], RenderableType]
"""Draws a view for a width and a maximum height, in its own thread: it may only read a snapshot."""


def can_draw(console: Console) -> bool:
    """Return whether rich can redraw there: on a terminal, or in a notebook that has ipywidgets."""
    return console.is_terminal or (console.is_jupyter and importlib.util.find_spec("ipywidgets") is not None)


def start_live_region(console: Console, draw: Draw) -> Live:
    """Redraw the end of a terminal twice a second; printed lines scroll above it."""

    def draw_sized() -> RenderableType:
        return Group(Rule(style="dim"), draw(console.width, max(MIN_ROWS, console.height - ROWS_ABOVE)))

    live = LiveRegion(
        get_renderable=draw_sized,
        console=console,
        refresh_per_second=REFRESH_HZ,
        redirect_stdout=sys.stdout.isatty(),  # the region would overwrite printed lines
    )
    live.start()
    return live


class Pace:
    """The speed over the last PACE_WINDOW_S."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float]] = deque()

    def add(self, now: float, done: float) -> None:
        """Add the amount that is done at a time in seconds."""
        if len(self._samples) > 1 and now - self._samples[-2][0] < PACE_WINDOW_S / 100:
            self._samples.pop()
        self._samples.append((now, done))
        while len(self._samples) > 2 and now - self._samples[0][0] > PACE_WINDOW_S:
            self._samples.popleft()

    @property
    def per_second(self) -> float | None:
        if len(self._samples) < 2:
            return None
        (start, before), (now, done) = self._samples[0], self._samples[-1]
        return (done - before) / (now - start) if now > start and done > before else None


class Curve:
    """A curve of any length in constant memory: means of equally many values; the last mean may have fewer."""

    def __init__(self) -> None:
        self._sums: list[float] = []
        self._size, self._last_size = 1, 0

    def add(self, value: float) -> None:
        if not self._sums or self._last_size == self._size:
            if len(self._sums) == MAX_CURVE_POINTS:
                self._sums = [first + second for first, second in zip(self._sums[::2], self._sums[1::2], strict=True)]
                self._size *= 2
            self._sums.append(0.0)
            self._last_size = 0
        self._sums[-1] += value
        self._last_size += 1

    @property
    def means(self) -> tuple[float, ...]:
        """At most MAX_CURVE_POINTS."""
        return (
            *(total / self._size for total in self._sums[:-1]),
            *(total / self._last_size for total in self._sums[-1:]),
        )


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw values as bars, averaged down to `width` bars and at most MAX_BAR_WIDTH."""
    if not values:
        return ""
    count = min(len(values), width, MAX_BAR_WIDTH)
    ends = [len(values) * index // count for index in range(count + 1)]
    means = [sum(values[start:end]) / (end - start) for start, end in pairwise(ends)]
    low, high = min(means), max(means)
    span = (high - low) or 1.0
    return "".join(SPARK_CHARACTERS[round((mean - low) / span * (len(SPARK_CHARACTERS) - 1))] for mean in means)


def lay_out(facts: Sequence[str], width: int) -> list[Text]:
    """Put facts beside each other, in as many lines as they need."""
    lines: list[str] = []
    for fact in facts:
        joined = f"{lines[-1]}   {fact}" if lines else fact
        if lines and cell_len(joined) <= width:
            lines[-1] = joined
        else:
            lines.append(fact.lstrip())
    return [Text(line, overflow="fold") for line in lines]


def draw_bar(done: int, total: int, unit: str, width: int) -> RenderableType:
    """Draw the percentage, a progress bar, and the amounts."""
    share = min(1.0, done / max(total, 1))
    line = Table.grid(padding=(0, 1), expand=True)
    line.width = min(width, MAX_BAR_WIDTH)
    line.add_column(no_wrap=True)
    line.add_column(ratio=1)
    line.add_column(no_wrap=True, justify="right")
    amount = f"{done:>{len(f'{total:,}')},} of {total:,} {unit}"
    line.add_row(f"{int(share * 100):>3}%", ProgressBar(total=1.0, completed=share), amount)
    return line


FOLDED_WIDTH = 8
"""Minimum width of a text column, in characters, when a table does not fit otherwise."""


@dataclass(frozen=True)
class Column:
    name: str
    right: bool = False
    """Align to the right."""
    width: int = 0
    """Minimum width, so that columns do not move when a figure grows."""
    rank: int = 0
    """Drop columns of the highest rank first; never drop rank 0."""
    wraps: int = 0
    """Minimum width of wrapped text; 0: never wrap."""


def make_table(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int, colors: Sequence[str] | None = None
) -> Table:
    """Fit a table without cutting text: wrap text, then drop columns, then fold all text.

    Leaves out empty columns. colors: of each row's `state` instead of STATE_COLORS.
    """
    widths = [
        max(column.width, cell_len(column.name), *(cell_len(row[number]) for row in rows), 0)
        for number, column in enumerate(columns)
    ]
    shown = [number for number in range(len(columns)) if not rows or any(row[number] for row in rows)]
    while (fitted := _fit_widths(columns, widths, shown, width)) is None:
        last = max(shown, key=lambda number: columns[number].rank)
        if not columns[last].rank:
            break
        shown.remove(last)
    if fitted is None:
        folding = [column if column.right else replace(column, wraps=FOLDED_WIDTH) for column in columns]
        fitted = _fit_widths(folding, widths, shown, width)
    table = Table(box=None, pad_edge=False, padding=(0, COLUMN_GAP, 0, 0))
    for number in shown:
        justify: JustifyMethod = "right" if columns[number].right else "left"
        size = fitted[number] if fitted else None if number == shown[0] else widths[number]
        table.add_column(columns[number].name, justify=justify, overflow="fold", width=size)
    for index, row in enumerate(rows):
        cells = []
        for number in shown:
            is_state = columns[number].name == "state"
            color = (colors[index] if colors else STATE_COLORS.get(row[number], "")) if is_state else ""
            cells.append(Text(row[number], color))
        table.add_row(*cells)
    return table


def _fit_widths(
    columns: Sequence[Column], widths: Sequence[int], shown: Sequence[int], width: int
) -> dict[int, int] | None:
    """Wrap the widest text first; return None if the columns do not fit."""
    fitted = {number: widths[number] for number in shown}
    excess = sum(fitted.values()) + COLUMN_GAP * (len(shown) - 1) - width
    for _ in range(excess):
        wrappable = [number for number in shown if columns[number].wraps and fitted[number] > columns[number].wraps]
        if not wrappable:
            return None
        fitted[max(wrappable, key=lambda number: fitted[number])] -= 1
    return fitted
