"""Progress for a person: a live view on a terminal or in a notebook, a few lines elsewhere. All of it on stderr."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tpuswarm.config.formatting import format_duration, format_figure, format_step_rate
from tpuswarm.train.diagnose.phases import summary_rows
from tpuswarm.train.look.describe import ParameterRow
from tpuswarm.train.look.live import Column, Curve, Pace, bar, can_draw, region, sparkline, table
from tpuswarm.train.process.terminal import echo_on_console
from tpuswarm.train.process.timestamps import writes_timestamped_log
from tpuswarm.train.process.waiting import stderr_console

if TYPE_CHECKING:  # a tenth of a second that no command waits for
    import numpy as np

PLAIN_WIDTH = 120
"""Columns of a log file or pipe."""
LINES = 6
"""Of the view of a run without what its model makes."""
LOOK = 0.25
"""Seconds between two pictures that are made of the rows."""


@dataclass(frozen=True)
class Opening:
    """What is known when training starts."""

    title: str
    devices: str
    run: str
    step: int
    """Done before."""
    steps: int
    tokens_per_step: int
    unit: str
    """What these tokens are: tokens, or rows where a row counts for one."""
    parameters: Sequence[ParameterRow]
    sentences: Sequence[str]
    seconds: float = 0.0
    """Of this process, before."""


class Display:
    """Lines on stderr: the opening, notes, evaluations, and every tenth of the way."""

    def __init__(self, console: Console | None = None):
        self.console = console or Console(stderr=True, highlight=False, width=PLAIN_WIDTH, force_jupyter=False)
        self._opening: Opening | None = None
        self._tenth = 0

    def open(self, opening: Opening) -> None:
        """Say what is about to be trained."""
        self._opening = opening
        echo_on_console(
            self.console, f"{opening.title} on {opening.devices}, {opening.steps:,} steps, in {opening.run}"
        )
        if not writes_timestamped_log():
            self.console.print(parameter_table(opening.parameters, self.console.width))
        for sentence in opening.sentences:
            self.note(sentence)

    def note(self, text: str) -> None:
        """Say one sentence."""
        echo_on_console(self.console, text)

    def row(self, row: Mapping[str, Any]) -> None:
        """Take in a row of metrics.jsonl."""
        assert self._opening is not None
        tenth = row["step"] * 10 // self._opening.steps
        if "eval_loss" in row or ("loss" in row and tenth > self._tenth):
            self._tenth = max(tenth, self._tenth)
            self.note(row_sentence(row, self._opening))

    def picture(self, picture: "np.ndarray") -> None:
        """Take in what the model makes, uint8 (height, width, 3); lines do without."""

    def summary(self, facts: Mapping[str, Any]) -> None:
        """Say where the time went; facts: of diagnose/phases.py."""
        self.close()
        columns = Column("where the time went"), Column("", right=True), Column("share", right=True)
        self.console.print(table(columns, summary_rows(facts), self.console.width))

    def close(self) -> None:
        """Leave the screen; may be called twice."""


@dataclass(frozen=True)
class Picture:
    """What the live view draws."""

    title: str
    run: str
    step: int
    steps: int
    tokens_per_step: int
    unit: str
    per_second: float | None = None
    """Steps."""
    loss: float | None = None
    eval_loss: float | None = None
    eval_step: int | None = None
    losses: Sequence[float] = ()
    """Of all steps that this process saw."""
    made: "np.ndarray | None" = None
    """By the model, uint8 (height, width, 3)."""
    ended: bool = False
    """Nothing goes on, so there is no speed and no time left."""


class LiveDisplay(Display):
    """A view that is drawn anew twice a second, under what is said."""

    def __init__(self, console: Console | None = None):
        super().__init__(console)
        self._live: Live | None = None
        self._picture: Picture | None = None
        self._pace, self._curve = Pace(), Curve()
        self._newest: tuple[int, float | None] | None = None
        """Step and loss of the newest row."""
        self._began = self._drawn_at = 0.0

    def open(self, opening: Opening) -> None:
        """Say what is about to be trained, then draw the view."""
        super().open(opening)
        self._picture = Picture(
            f"{opening.title} on {opening.devices}", opening.run, opening.step, opening.steps,
            opening.tokens_per_step, opening.unit,
        )  # fmt: skip
        self._began = time.monotonic() - opening.seconds
        if opening.step < opening.steps:
            self._live = region(self.console, self._draw)

    def row(self, row: Mapping[str, Any]) -> None:
        """Take in a row of metrics.jsonl."""
        assert self._picture is not None
        if "eval_loss" in row:
            self._picture = replace(self._picture, eval_loss=row["eval_loss"], eval_step=row["step"])
        if "loss" not in row:
            return
        now = time.monotonic()
        self._newest = row["step"], row["loss"]
        self._pace.add(now, row["step"])
        if row["loss"] is not None:
            self._curve.add(row["loss"])
        if now - self._drawn_at >= LOOK or row["step"] == self._picture.steps:
            self._drawn_at = now
            self._draw_newest()

    def _draw_newest(self) -> None:
        if self._picture is not None and self._newest is not None:
            step, loss = self._newest
            self._picture = replace(
                self._picture, step=step, per_second=self._pace.per_second, loss=loss, losses=self._curve.means
            )

    def picture(self, picture: "np.ndarray") -> None:
        """Show the newest of what the model makes, where there are colours to show it in."""
        assert self._picture is not None
        if self.console.color_system and not self.console.no_color:
            self._picture = replace(self._picture, made=picture)

    def close(self) -> None:
        """Draw once more and leave the view on the screen."""
        if self._live is not None:
            self._draw_newest()
            self._live.stop()
            self._live = None

    def _draw(self, width: int, height: int) -> RenderableType:
        assert self._picture is not None
        return draw(self._picture, time.monotonic() - self._began, width, height)


def draw(picture: Picture, elapsed: float, width: int, height: int) -> RenderableType:
    """The view of a run, after so many seconds."""
    speed = picture.per_second
    left = None if speed is None else (picture.steps - picture.step) / speed
    at = "" if picture.eval_step is None else f" at step {picture.eval_step:,}"
    now = (
        f"   {format_duration(left)} left   {format_step_rate(speed):>15}   "
        f"{speed_text((speed or 0.0) * picture.tokens_per_step, picture.unit):>18}"
    )
    return Group(
        Text(f"{picture.title}: {picture.run}", overflow="fold"),
        bar(picture.step, picture.steps, "steps", width),
        Text(f"{format_duration(elapsed)} elapsed{'' if picture.ended else now}"),
        Text(f"loss {format_figure(picture.loss):9}   held-out loss {format_figure(picture.eval_loss)}{at}"),
        *([Text(sparkline(picture.losses, width), style="cyan")] if picture.losses else []),
        *_made(picture, width, height - LINES),
    )


def _made(picture: Picture, width: int, height: int) -> list[RenderableType]:
    if picture.made is None or height < 1:
        return []
    from tpuswarm.train.look.mosaic import mosaic

    return [mosaic(picture.made, width, height)]


def auto_display(quiet: bool = False) -> Display:
    """The live view on a terminal or in a notebook, else lines; or nothing, at a host that another one speaks for."""
    if quiet:
        return Display(Console(quiet=True))
    console = stderr_console()
    return LiveDisplay(console) if can_draw(console) else Display()


def parameter_table(rows: Sequence[ParameterRow], width: int) -> Table:
    """Every parameter with shape, dtype, sharding, frozen, decayed, tied, whether it is a statistic, and memory.

    A column in which nothing stands is left out; what is the same of all parameters is said once, under the table.
    """
    same = [word for word in ("dtype", "sharding") if len({getattr(row, word) for row in rows}) == 1]
    names = ("parameter", "shape", "dtype", "sharding", "frozen", "decayed", "tied", "statistic", "KiB/device")
    cells = [
        (
            row.path,
            "x".join(map(str, row.shape)) or "scalar",
            "" if "dtype" in same else row.dtype,
            "" if "sharding" in same else row.sharding,
            "yes" if row.frozen else "",
            "yes" if row.decayed else "",
            row.tied,
            "yes" if row.statistic else "",
            f"{row.bytes_per_device / 1024:,.1f}",
        )
        for row in rows
    ]
    made = table([Column(name, right=name == "KiB/device") for name in names], cells, width)
    if same:
        made.caption = f"all {', '.join(getattr(rows[0], word) for word in same)}"
        made.caption_justify = "left"
    return made


def row_sentence(row: Mapping[str, Any], opening: Opening) -> str:
    """A metrics row in words."""
    where = f"step {row['step']:,} of {opening.steps:,}"
    if "eval_loss" in row:
        there = f" of {row['eval_rows_total']:,}" if "eval_rows_total" in row else ""
        return f"{where}: held-out loss {format_figure(row['eval_loss'])} over {row['eval_rows']:,}{there} rows"
    return f"{where}: loss {format_figure(row['loss'])}, {speed_text(row['tokens_per_s'], opening.unit)}"


def speed_text(per_second: float, unit: str) -> str:
    """How fast it goes, in words."""
    return f"{per_second:,.0f} {unit}/s"
