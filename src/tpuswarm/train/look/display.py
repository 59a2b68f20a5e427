"""Show progress on stderr: a live view on a terminal or in a notebook, otherwise a few lines."""

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
from tpuswarm.train.look.widgets import (
    MAX_BAR_WIDTH,
    Column,
    Curve,
    Pace,
    can_draw,
    draw_bar,
    make_table,
    sparkline,
    start_live_region,
)
from tpuswarm.train.process.terminal import echo_on_console
from tpuswarm.train.process.timestamps import writes_timestamped_log
from tpuswarm.train.process.waiting import stderr_console

if TYPE_CHECKING:  # slow imports
    import numpy as np

    from tpuswarm.train.look.describe import ParameterRow

PLAIN_WIDTH = 120
"""Columns of a log file or pipe."""
FIXED_ROWS = 6
"""Rows of the view without the generated picture."""
REDRAW_INTERVAL_S = 0.25


@dataclass(frozen=True)
class RunHeader:
    title: str
    devices: str
    run: str
    step: int
    """The step of the resumed checkpoint."""
    steps: int
    tokens_per_step: int
    unit: str
    """tokens, or rows if a row counts as one."""
    parameters: "Sequence[ParameterRow]"
    sentences: Sequence[str]
    seconds: float = 0.0
    """Since the start of the process."""


class Display:
    """Print the header, notes, evaluations, and every tenth of the steps."""

    def __init__(self, console: Console | None = None):
        self.console = console or Console(stderr=True, highlight=False, width=PLAIN_WIDTH, force_jupyter=False)
        self._header: RunHeader | None = None
        self._printed_tenths = 0

    def open(self, header: RunHeader) -> None:
        self._header = header
        echo_on_console(self.console, f"{header.title} on {header.devices}, {header.steps:,} steps, in {header.run}")
        if not writes_timestamped_log():
            self.console.print(parameter_table(header.parameters, self.console.width))
        for sentence in header.sentences:
            self.note(sentence)

    def note(self, text: str) -> None:
        echo_on_console(self.console, text)

    def row(self, row: Mapping[str, Any]) -> None:
        """Receive a row of metrics.jsonl."""
        assert self._header is not None
        tenths = row["step"] * 10 // self._header.steps
        if "eval_loss" in row or ("loss" in row and tenths > self._printed_tenths):
            self._printed_tenths = max(tenths, self._printed_tenths)
            self.note(row_sentence(row, self._header))

    def picture(self, picture: "np.ndarray") -> None:
        """Receive a generated picture, uint8 (height, width, 3)."""

    def summary(self, facts: Mapping[str, Any]) -> None:
        """Print where the time went; facts: of diagnose/phases.py."""
        self.close()
        columns = Column("where the time went"), Column("", right=True), Column("share", right=True)
        self.console.print(make_table(columns, summary_rows(facts), self.console.width))

    def close(self) -> None:
        """Stop drawing; may be called twice."""


@dataclass(frozen=True)
class ViewState:
    """The content of the live view."""

    title: str
    run: str
    step: int
    steps: int
    tokens_per_step: int
    unit: str
    steps_per_s: float | None = None
    loss: float | None = None
    eval_loss: float | None = None
    eval_step: int | None = None
    losses: Sequence[float] = ()
    """Losses of this process."""
    generated: "np.ndarray | None" = None
    """The newest picture of the model, uint8 (height, width, 3)."""
    ended: bool = False
    """Show no speed and no remaining time."""


class LiveDisplay(Display):
    """Redraw a view below the printed lines."""

    def __init__(self, console: Console | None = None):
        super().__init__(console)
        self._live: Live | None = None
        self._state: ViewState | None = None
        self._pace, self._curve = Pace(), Curve()
        self._newest: tuple[int, float | None] | None = None
        """Step and loss."""
        self._started_at = self._updated_at = 0.0

    def open(self, header: RunHeader) -> None:
        super().open(header)
        self._state = ViewState(
            f"{header.title} on {header.devices}", header.run, header.step, header.steps,
            header.tokens_per_step, header.unit,
        )  # fmt: skip
        self._started_at = time.monotonic() - header.seconds
        if header.step < header.steps:
            self._live = start_live_region(self.console, self._draw)

    def row(self, row: Mapping[str, Any]) -> None:
        assert self._state is not None
        if "eval_loss" in row:
            self._state = replace(self._state, eval_loss=row["eval_loss"], eval_step=row["step"])
        if "loss" not in row:
            return
        now = time.monotonic()
        self._newest = row["step"], row["loss"]
        self._pace.add(now, row["step"])
        if row["loss"] is not None:
            self._curve.add(row["loss"])
        if now - self._updated_at >= REDRAW_INTERVAL_S or row["step"] == self._state.steps:
            self._updated_at = now
            self._update()

    def _update(self) -> None:
        if self._state is not None and self._newest is not None:
            step, loss = self._newest
            self._state = replace(
                self._state, step=step, steps_per_s=self._pace.per_second, loss=loss, losses=self._curve.means
            )

    def picture(self, picture: "np.ndarray") -> None:
        assert self._state is not None
        if self.console.color_system and not self.console.no_color:
            self._state = replace(self._state, generated=picture)

    def close(self) -> None:
        """Draw a last time and leave the view on the screen."""
        if self._live is not None:
            self._update()
            assert self._state is not None
            self._state = replace(self._state, ended=True)
            self._live.stop()
            self._live = None

    def _draw(self, width: int, height: int) -> RenderableType:
        assert self._state is not None
        return draw_run(self._state, time.monotonic() - self._started_at, width, height)


def draw_run(state: ViewState, elapsed_s: float, width: int, height: int) -> RenderableType:
    speed = state.steps_per_s
    left = None if speed is None else (state.steps - state.step) / speed
    eval_step = "" if state.eval_step is None else f" at step {state.eval_step:,}"
    pace = (
        f"   {format_duration(left)} left   {format_step_rate(speed):>15}   "
        f"{format_speed((speed or 0.0) * state.tokens_per_step, state.unit):>18}"
    )
    parts = [
        Text(f"{state.title}: {state.run}", overflow="fold"),
        draw_bar(state.step, state.steps, "steps", width),
        Text(f"{format_duration(elapsed_s)} elapsed{'' if state.ended else pace}"),
        Text(f"loss {format_figure(state.loss):9}   held-out loss {format_figure(state.eval_loss)}{eval_step}"),
    ]
    if state.losses:
        parts.append(Text(sparkline(state.losses, width), style="cyan"))
    if state.generated is not None and height > FIXED_ROWS:
        parts.append(draw_picture(state.generated, width, height - FIXED_ROWS))
    return Group(*parts)


def draw_picture(picture: "np.ndarray", width: int, height: int) -> Text:
    """Draw the upper part of a picture, uint8 (height, width, 3); each character shows two pixels."""
    import numpy as np
    from rich.color import Color
    from rich.style import Style

    step = max(1.0, picture.shape[1] / min(width, MAX_BAR_WIDTH))
    columns = (np.arange(int(picture.shape[1] / step)) * step + step / 2).astype(int)
    rows = (np.arange(min(int(picture.shape[0] / step), 2 * height)) * step + step / 2).astype(int)
    pixels = picture[rows[: len(rows) // 2 * 2]][:, columns]
    text = Text(no_wrap=True)
    for upper_row, lower_row in zip(pixels[::2], pixels[1::2], strict=True):
        for upper, lower in zip(upper_row, lower_row, strict=True):
            text.append("▀", Style(color=Color.from_rgb(*upper), bgcolor=Color.from_rgb(*lower)))
        text.append("\n")
    text.right_crop()
    return text


def auto_display(quiet: bool = False) -> Display:
    """Return a live view on a terminal or in a notebook, otherwise lines; nothing if `quiet`."""
    if quiet:
        return Display(Console(quiet=True))
    console = stderr_console()
    return LiveDisplay(console) if can_draw(console) else Display()


def parameter_table(rows: "Sequence[ParameterRow]", width: int) -> Table:
    """Show a row for each parameter; a dtype or sharding that all share moves below the table."""
    common = [word for word in ("dtype", "sharding") if len({getattr(row, word) for row in rows}) == 1]
    names = ("parameter", "shape", "dtype", "sharding", "frozen", "decayed", "tied", "statistic", "KiB/device")
    cells = [
        (
            row.path,
            "x".join(map(str, row.shape)) or "scalar",
            "" if "dtype" in common else row.dtype,
            "" if "sharding" in common else row.sharding,
            "yes" if row.frozen else "",
            "yes" if row.decayed else "",
            row.tied,
            "yes" if row.statistic else "",
            f"{row.bytes_per_device / 1024:,.1f}",
        )
        for row in rows
    ]
    table = make_table([Column(name, right=name == "KiB/device") for name in names], cells, width)
    if common:
        table.caption = f"all {', '.join(getattr(rows[0], word) for word in common)}"
        table.caption_justify = "left"
    return table


def row_sentence(row: Mapping[str, Any], header: RunHeader) -> str:
    step = f"step {row['step']:,} of {header.steps:,}"
    if "eval_loss" in row:
        total = f" of {row['eval_rows_total']:,}" if "eval_rows_total" in row else ""
        return f"{step}: held-out loss {format_figure(row['eval_loss'])} over {row['eval_rows']:,}{total} rows"
    return f"{step}: loss {format_figure(row['loss'])}, {format_speed(row['tokens_per_s'], header.unit)}"


def format_speed(per_second: float, unit: str) -> str:
    return f"{per_second:,.0f} {unit}/s"
