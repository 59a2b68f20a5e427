"""Progress for a person: a live view on a terminal or in a notebook, a few lines elsewhere. All of it on stderr."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tpuswarm.train.describe import ParameterRow
from tpuswarm.train.diagnose.summary import rows as summary_rows

BARS = "▁▂▃▄▅▆▇█"
WIDTH = 60
PLAIN_WIDTH = 120
"""Columns of a log file or pipe."""
REFRESH_HZ = 2
"""The view is drawn on the processor that trains; more often would be felt."""


@dataclass(frozen=True)
class Opening:
    """What is known when training starts."""

    title: str
    devices: str
    run: str
    steps: int
    parameters: Sequence[ParameterRow]
    sentences: Sequence[str]


class Display:
    """Lines on stderr: the opening, notes, evaluations, and every tenth of the way."""

    def __init__(self, console: Console | None = None):
        self.console = console or Console(stderr=True, highlight=False, width=PLAIN_WIDTH)
        self._steps, self._tenth = 1, 0

    def open(self, opening: Opening) -> None:
        """Say what is about to be trained."""
        self._steps = opening.steps
        self.console.print(
            f"{opening.title} on {opening.devices}, {opening.steps} steps, in {opening.run}", soft_wrap=True
        )
        self.console.print(parameter_table(opening.parameters))
        for sentence in opening.sentences:
            self.note(sentence)

    def note(self, text: str) -> None:
        """Say one sentence."""
        self.console.print(text, markup=False, soft_wrap=True)

    def row(self, row: Mapping[str, Any]) -> None:
        """Take in a row of metrics.jsonl."""
        tenth = row["step"] * 10 // self._steps
        if "eval_loss" in row or tenth > self._tenth:
            self._tenth = max(tenth, self._tenth)
            self.note(row_sentence(row, self._steps))

    def show(self, label: str, text: str) -> None:
        """Show a text under a label, for example a sample."""
        self.note(f"{label}: {text}")

    def summary(self, facts: Mapping[str, Any]) -> None:
        """Say where the time went; facts: of diagnose.summary.Summary."""
        self.close()
        self.console.print(summary_table(facts))

    def close(self) -> None:
        """Leave the screen; may be called twice."""


@dataclass
class _Seen:
    """What the live view draws."""

    opening: Opening
    row: Mapping[str, Any] = field(default_factory=dict)
    evaluation: Mapping[str, Any] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    speeds: deque[float] = field(default_factory=lambda: deque(maxlen=20))
    label: str = ""
    text: str = ""


class LiveDisplay(Display):
    """One panel that is drawn anew twice a second; notes scroll above it."""

    def __init__(self, console: Console | None = None):
        super().__init__(console)
        self._live: Live | None = None
        self._seen: _Seen | None = None

    def open(self, opening: Opening) -> None:
        """Say what is about to be trained, then draw the panel."""
        super().open(opening)
        self._seen = _Seen(opening)
        self._live = Live(
            console=self.console, get_renderable=self._draw, refresh_per_second=REFRESH_HZ, redirect_stdout=False
        )
        self._live.start()

    def row(self, row: Mapping[str, Any]) -> None:
        """Take in a row of metrics.jsonl."""
        assert self._seen is not None
        if "eval_loss" in row:
            self._seen.evaluation = row
            return
        self._seen.row = row
        self._seen.losses.append(row["loss"])
        self._seen.speeds.append(row["tokens_per_s"])

    def show(self, label: str, text: str) -> None:
        """Show a text under a label inside the panel."""
        assert self._seen is not None
        self._seen.label, self._seen.text = label, text

    def close(self) -> None:
        """Draw once more and leave the panel on the screen."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _draw(self) -> RenderableType:
        seen = self._seen
        assert seen is not None
        row, opening = seen.row, seen.opening
        if not row:
            return Panel(Text(f"{opening.title} on {opening.devices}: first step …"), title="tpuswarm")
        facts = Table.grid(padding=(0, 2))
        facts.add_row("model", opening.title, "devices", opening.devices)
        facts.add_row("step", f"{row['step']:,} of {opening.steps:,}", "tokens/s", f"{median(seen.speeds):,.0f}")
        held_out = f"{seen.evaluation['eval_loss']:.4f}" if seen.evaluation else "–"
        facts.add_row("loss", f"{row['loss']:.4f}", "held-out loss", held_out)
        parts: list[RenderableType] = [
            facts,
            Columns([ProgressBar(total=opening.steps, completed=row["step"], width=WIDTH)]),
            Text(sparkline(seen.losses), style="cyan"),
        ]
        if seen.text:
            parts += [Text(f"\n{seen.label}", style="bold"), Text(seen.text)]
        return Panel(Group(*parts), title="tpuswarm", subtitle=opening.run)


def auto_display(quiet: bool = False) -> Display:
    """The live view on a terminal or in a notebook, else lines; or nothing, at a host that another one speaks for."""
    if quiet:
        return Display(Console(quiet=True))
    console = Console(stderr=True, highlight=False)
    return LiveDisplay(console) if console.is_terminal or console.is_jupyter else Display()


def parameter_table(rows: Sequence[ParameterRow]) -> Table:
    """Every parameter group with shape, dtype, sharding, frozen, decayed, tied and memory."""
    table = Table(box=None, pad_edge=False)
    for name in ("parameter", "shape", "dtype", "sharding", "frozen", "decayed", "tied", "KiB/device"):
        table.add_column(name, justify="right" if name.startswith("KiB") else "left", no_wrap=True)
    for row in rows:
        marks = ["yes" if flag else "" for flag in (row.frozen, row.decayed)]
        shape = "x".join(map(str, row.shape)) or "scalar"
        table.add_row(row.path, shape, row.dtype, row.sharding, *marks, row.tied, f"{row.bytes_per_device / 1024:,.1f}")
    return table


def summary_table(facts: Mapping[str, Any]) -> Table:
    """Where the time went, tokens/s and MFU."""
    table = Table(box=None, pad_edge=False)
    for name in ("where the time went", "", "share"):
        table.add_column(name, justify="left" if name.startswith("where") else "right")
    for row in summary_rows(facts):
        table.add_row(*row)
    return table


def row_sentence(row: Mapping[str, Any], steps: int) -> str:
    """A metrics row in words."""
    if "eval_loss" in row:
        return f"step {row['step']} of {steps}: held-out loss {row['eval_loss']:.4f} over {row['eval_rows']} rows"
    return f"step {row['step']} of {steps}: loss {row['loss']:.4f}, {row['tokens_per_s']:,.0f} tokens/s"


def sparkline(values: Sequence[float], width: int = WIDTH) -> str:
    """Values as bars, averaged into at most `width` of them."""
    if not values:
        return ""
    size = max(1, -(-len(values) // width))
    means = [sum(values[i : i + size]) / len(values[i : i + size]) for i in range(0, len(values), size)]
    low, high = min(means), max(means)
    span = (high - low) or 1.0
    return "".join(BARS[round((value - low) / span * (len(BARS) - 1))] for value in means)
