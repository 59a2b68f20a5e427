"""A swarm's progress for a person: a live view on a terminal, a few lines elsewhere. All of it on stderr."""

import time
from collections import deque
from collections.abc import Sequence

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tpuswarm.swarm.status import SwarmStatus
from tpuswarm.train.display import PLAIN_WIDTH, REFRESH_HZ, WIDTH, sparkline

EVENTS = 6
"""Newest events in the live view."""
QUIET = 5.0
"""Seconds between two lines of progress."""


class Screen:
    """Lines on stderr: every event, and now and then how the run stands."""

    def __init__(self, console: Console | None = None):
        self.console = console or Console(stderr=True, highlight=False, width=PLAIN_WIDTH)
        self._began, self._said = time.monotonic(), 0.0

    def open(self, title: str, run: str, sentences: Sequence[str]) -> None:
        """Say what is about to be trained."""
        self.console.print(f"{title}, in {run}", soft_wrap=True, markup=False)
        for each in sentences:
            self.note(each)

    def note(self, text: str) -> None:
        """Say what happened."""
        self.console.print(f"{time.monotonic() - self._began:6.1f} s  {text}", markup=False, soft_wrap=True)

    def status(self, status: SwarmStatus, losses: Sequence[float]) -> None:
        """Take in how the run stands; losses: of the newest steps of all members, in order."""
        now = time.monotonic()
        if now - self._said >= QUIET and losses:
            self._said = now
            self.note(status_sentence(status, losses[-1]))

    def show(self, label: str, text: str) -> None:
        """Show a text under a label, for example a sample."""
        self.note(f"{label}: {text}")

    def close(self) -> None:
        """Leave the screen; may be called twice."""


class LiveScreen(Screen):
    """One panel that is drawn anew twice a second."""

    def __init__(self, console: Console | None = None):
        super().__init__(console)
        self._live: Live | None = None
        self._title = self._run = self._label = self._text = ""
        self._events: deque[str] = deque(maxlen=EVENTS)
        self._status: SwarmStatus | None = None
        self._losses: Sequence[float] = ()

    def open(self, title: str, run: str, sentences: Sequence[str]) -> None:
        """Say what is about to be trained, then draw the panel."""
        super().open(title, run, sentences)
        self._title, self._run = title, run
        self._live = Live(
            console=self.console, get_renderable=self._draw, refresh_per_second=REFRESH_HZ, redirect_stdout=False
        )
        self._live.start()

    def note(self, text: str) -> None:
        """Say what happened, inside the panel once there is one."""
        if self._live is None:
            super().note(text)
        else:
            self._events.append(f"{time.monotonic() - self._began:6.1f} s  {text}")

    def status(self, status: SwarmStatus, losses: Sequence[float]) -> None:
        """Take in how the run stands."""
        self._status, self._losses = status, losses

    def show(self, label: str, text: str) -> None:
        """Show a text under a label inside the panel."""
        self._label, self._text = label, text

    def close(self) -> None:
        """Draw once more and leave the panel on the screen."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _draw(self) -> RenderableType:
        parts: list[RenderableType] = []
        if self._status is None:
            parts.append(Text("processes start …"))
        else:
            done = min(self._status.tokens.applied, self._status.horizon)
            parts = [
                facts_table(self._status),
                Columns([ProgressBar(total=self._status.horizon, completed=done, width=WIDTH)]),
                Text(sparkline(self._losses), style="cyan"),
                members_table(self._status),
                *(Text(f"alarm: {each}", style="red") for each in self._status.alarms),
            ]
        parts.append(Text("\n".join(self._events), style="dim"))
        if self._text:
            parts += [Text(f"\n{self._label}", style="bold"), Text(self._text)]
        return Panel(Group(*parts), title=f"tpuswarm: {self._title}", subtitle=self._run)


def auto_screen() -> Screen:
    """The live view on a terminal or in a notebook, else lines."""
    console = Console(stderr=True, highlight=False)
    return LiveScreen(console) if console.is_terminal or console.is_jupyter else Screen()


def facts_table(status: SwarmStatus) -> Table:
    """The run in two lines."""
    tokens, table = status.tokens, Table.grid(padding=(0, 2))
    goodput = "–" if status.goodput is None else f"{status.goodput:.1%}"
    version = "–" if status.version is None else f"{status.version}"
    table.add_row("version", version, "counted", f"{tokens.applied:,} of {status.horizon:,} tokens")
    table.add_row("goodput", goodput, "tokens/s", f"{status.tokens_per_s:,.0f}")
    table.add_row("lost", f"{tokens.lost:,}", "under way", f"{tokens.outstanding:,}; dropped {tokens.dropped:,}")
    table.add_row("round", status.phase)
    return table


def members_table(status: SwarmStatus) -> Table:
    """One row for each member."""
    table = Table(box=None, pad_edge=False)
    for name in ("member", "state", "incarnation", "version", "tokens", "tokens/s", "loss"):
        table.add_column(name, justify="left" if name in ("member", "state", "incarnation") else "right")
    for each in status.members:
        state = f"{each.state}, pid {each.pid}" if each.pid and each.state == "alive" else each.state
        table.add_row(
            each.id,
            state,
            (each.incarnation or "–")[:8],
            "–" if each.base is None else str(each.base),
            f"{each.tokens:,}",
            "–" if each.tokens_per_s is None else f"{each.tokens_per_s:,.0f}",
            "–" if each.loss is None else f"{each.loss:.4f}",
        )
    return table


def status_sentence(status: SwarmStatus, loss: float) -> str:
    """How a run stands, in one line."""
    alive = sum(each.state == "alive" for each in status.members)
    share = status.tokens.applied / max(status.horizon, 1)
    return (
        f"version {status.version}, {share:.0%} of the tokens counted, loss {loss:.4f}, "
        f"{status.tokens_per_s:,.0f} tokens/s, {alive} of {len(status.members)} members alive"
    )
