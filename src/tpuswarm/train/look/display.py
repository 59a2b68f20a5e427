"""Show progress on stderr: a live view on a terminal or in a notebook, otherwise a few lines."""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from tpuswarm.config.formatting import format_duration, format_figure, format_step_rate
from tpuswarm.train.diagnose.phases import summary_rows
from tpuswarm.train.look.preview import Piece, print_preview
from tpuswarm.train.look.widgets import (
    MAX_BAR_WIDTH,
    Column,
    Curve,
    Pace,
    can_draw,
    draw_bar,
    lay_out,
    make_table,
    sparkline,
    start_live_region,
)
from tpuswarm.train.process.terminal import echo_on_console
from tpuswarm.train.process.timestamps import writes_timestamped_log
from tpuswarm.train.process.waiting import stderr_console
from tpuswarm.train.recipe import EVALUATION_COLUMNS, RESERVED

if TYPE_CHECKING:  # slow imports
    import numpy as np


PLAIN_WIDTH = 120
"""Columns of a log file or pipe."""
FIXED_ROWS = 6
"""Rows of the view without metrics and the generated picture."""
SMOOTHING = 0.98
"""Weight of the past in the smoothed loss, a mean of some 50 steps."""
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
    sentences: Sequence[str]
    seconds: float = 0.0
    """Since the start of the process."""
    preview: Sequence[Sequence[Piece]] = ()
    """The first row of each data set, if it is text."""


class Display:
    """Print the header, notes, evaluations, and every tenth of the steps."""

    def __init__(self, console: Console | None = None):
        self.console = console or Console(stderr=True, highlight=False, width=PLAIN_WIDTH, force_jupyter=False)
        self._header: RunHeader | None = None
        self._printed_tenths = 0

    def open(self, header: RunHeader) -> None:
        self._header = header
        echo_on_console(self.console, f"{header.title} on {header.devices}, {header.steps:,} steps, in {header.run}")
        for sentence in header.sentences:
            self.event(sentence)
        print_preview(self.console, header.preview)

    def note(self, text: str) -> None:
        echo_on_console(self.console, text)

    def event(self, text: str) -> None:
        """Print an event of the run."""
        self.note(text)

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


class LogDisplay(Display):
    """Prints to a log that is read together with the run's events, which it leaves out."""

    def event(self, text: str) -> None:
        """Print nothing: the reader has the run's events."""


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
    smoothed_loss: float | None = None
    eval_loss: float | None = None
    eval_step: int | None = None
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    """The recipe's own, of the newest update and evaluation."""
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
        self._pace, self._curve, self._smoothed = Pace(), Curve(), SmoothedLoss()
        self._newest: Mapping[str, Any] = {}
        """Row of the newest update."""
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
            metrics = {**self._state.metrics, **own_metrics(row)}
            self._state = replace(self._state, eval_loss=row["eval_loss"], eval_step=row["step"], metrics=metrics)
        if "loss" not in row:
            return
        now = time.monotonic()
        self._newest = row
        self._pace.add(now, row["step"])
        if row["loss"] is not None:
            self._curve.add(row["loss"])
            self._smoothed.add(row["loss"])
        if now - self._updated_at >= REDRAW_INTERVAL_S or row["step"] == self._state.steps:
            self._updated_at = now
            self._update()

    def _update(self) -> None:
        if self._state is not None and self._newest:
            self._state = replace(
                self._state, step=self._newest["step"], steps_per_s=self._pace.per_second, loss=self._newest["loss"],
                smoothed_loss=self._smoothed.value, losses=self._curve.means,
                metrics={**self._state.metrics, **own_metrics(self._newest)},
            )  # fmt: skip

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


class SmoothedLoss:
    """The exponential mean of a loss over some 50 steps, corrected for its start as in Adam."""

    def __init__(self, losses: Iterable[float] = ()) -> None:
        self._sum, self._weight = 0.0, 0.0
        for loss in losses:
            self.add(loss)

    def add(self, loss: float) -> None:
        self._sum = SMOOTHING * self._sum + (1 - SMOOTHING) * loss
        self._weight = SMOOTHING * self._weight + (1 - SMOOTHING)

    @property
    def value(self) -> float | None:
        return self._sum / self._weight if self._weight else None


def own_metrics(row: Mapping[str, Any]) -> dict[str, float | None]:
    """Return the metrics in a row of metrics.jsonl that the recipe or a hook gave."""
    return {name: value for name, value in row.items() if name not in (*RESERVED, *EVALUATION_COLUMNS)}


def draw_run(state: ViewState, elapsed_s: float, width: int, height: int) -> RenderableType:
    speed = state.steps_per_s
    left = None if speed is None else (state.steps - state.step) / speed
    eval_step = "" if state.eval_step is None else f" at step {state.eval_step:,}"
    pace = [
        f"{format_duration(left)} left",
        f"{format_step_rate(speed):>15}",
        f"{format_speed((speed or 0.0) * state.tokens_per_step, state.unit):>18}",
    ]
    losses = [
        f"loss {format_figure(state.loss):9}",
        f"smoothed {format_figure(state.smoothed_loss):9}",
        f"held-out loss {format_figure(state.eval_loss)}{eval_step}",
    ]
    parts = [
        Text(f"{state.title}: {state.run}", overflow="fold"),
        draw_bar(state.step, state.steps, "steps", width),
        *lay_out([f"{format_duration(elapsed_s)} elapsed", *([] if state.ended else pace)], width),
        *lay_out(losses, width),
    ]
    if state.metrics:
        parts.append(Text(metrics_line(state.metrics), no_wrap=True, overflow="ellipsis"))
    if state.losses:
        parts.append(Text(sparkline(state.losses, width), style="cyan"))
    room = height - FIXED_ROWS - bool(state.metrics)
    if state.generated is not None and room > 0:
        parts.append(draw_picture(state.generated, width, room))
    return Group(*parts)


def metrics_line(metrics: Mapping[str, float | None]) -> str:
    """Format `accuracy 0.8125   held-out accuracy 0.7900`."""
    names = sorted(metrics, key=lambda name: (name.removeprefix("eval_"), name.startswith("eval_")))
    words = {name: f"held-out {name[5:]}" if name.startswith("eval_") else name for name in names}
    return "   ".join(f"{words[name]} {format_figure(metrics[name]):7}" for name in names).rstrip()


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
    if writes_timestamped_log():
        return LogDisplay()
    console = stderr_console()
    return LiveDisplay(console) if can_draw(console) else Display()


def row_sentence(row: Mapping[str, Any], header: RunHeader) -> str:
    step = f"step {row['step']:,} of {header.steps:,}"
    if "eval_loss" in row:
        total = f" of {row['eval_rows_total']:,}" if "eval_rows_total" in row else ""
        return f"{step}: held-out loss {format_figure(row['eval_loss'])} over {row['eval_rows']:,}{total} rows"
    return f"{step}: loss {format_figure(row['loss'])}, {format_speed(row['tokens_per_s'], header.unit)}"


def format_speed(per_second: float, unit: str) -> str:
    return f"{per_second:,.0f} {unit}/s"
