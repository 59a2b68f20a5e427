"""Show a swarm's progress on stderr: a live view on a terminal, lines elsewhere."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from tpuswarm.config.formatting import format_duration, format_figure
from tpuswarm.swarm.views.drawing import About, draw
from tpuswarm.swarm.views.status import SwarmStatus
from tpuswarm.train.look.display import PLAIN_WIDTH, format_speed
from tpuswarm.train.look.widgets import Curve, can_draw, start_live_region
from tpuswarm.train.process.terminal import echo_on_console
from tpuswarm.train.process.timestamps import writes_timestamped_log
from tpuswarm.train.process.waiting import stderr_console

PROGRESS_INTERVAL_S = 5.0


class Screen:
    """Prints a line for every event, and a line of progress now and then."""

    def __init__(self, console: Console | None = None):
        self.console = console or Console(stderr=True, highlight=False, width=PLAIN_WIDTH)
        self.began, self._last_progress = time.time(), 0.0
        self._about: About | None = None

    def open(self, about: About, sentences: Sequence[str]) -> None:
        """Print what will be trained."""
        self._about = about
        echo_on_console(self.console, f"{about.title}, in {about.run}")
        for sentence in sentences:
            self.note(sentence)

    def note(self, text: str) -> None:
        """Print a line with the time since the start."""
        stamp = f"{time.time() - self.began:6.1f} s  "
        echo_on_console(self.console, f"{stamp}{text}", hang=len(stamp))

    def line(self, text: str) -> None:
        """Print a line that stays in one piece, to be copied."""
        self.console.print(text, soft_wrap=True, markup=False, highlight=False)

    def event(self, text: str) -> None:
        """Print an event of the run."""
        self.note(text)

    def loss(self, value: float) -> None:
        """Receive the loss of a member's step."""

    def status(self, status: SwarmStatus) -> None:
        """Receive the run's status."""
        now = time.monotonic()
        if now - self._last_progress >= PROGRESS_INTERVAL_S and status.loss is not None and self._about:
            self._last_progress = now
            self.note(status_sentence(self._about, status))

    def close(self) -> None:
        """Stop drawing; may be called twice."""


@dataclass(frozen=True)
class Picture:
    """The content of the live view."""

    about: About
    status: SwarmStatus | None = None
    losses: Sequence[float] = ()


class LiveScreen(Screen):
    """A live view, redrawn twice a second, below the lines of events."""

    def __init__(self, console: Console | None = None):
        super().__init__(console)
        self._live: Live | None = None
        self._picture: Picture | None = None
        self._curve = Curve()

    def open(self, about: About, sentences: Sequence[str]) -> None:
        """Print what will be trained, then draw the view."""
        super().open(about, sentences)
        self._picture = Picture(about)
        self._live = start_live_region(self.console, self._draw)

    def loss(self, value: float) -> None:
        self._curve.add(value)

    def status(self, status: SwarmStatus) -> None:
        assert self._picture is not None
        self._picture = Picture(self._picture.about, status, self._curve.means)

    def close(self) -> None:
        """Draw a last time and leave the view on the screen."""
        if self._live is not None:
            assert self._picture is not None
            self._picture = replace(self._picture, about=replace(self._picture.about, ended=True))
            self._live.stop()
            self._live = None

    def _draw(self, width: int, height: int) -> RenderableType:
        picture, elapsed = self._picture, format_duration(time.time() - self.began)
        assert picture is not None
        if picture.status is None:
            return Text(f"{'ended while' if picture.about.ended else ''} starting processes … {elapsed}".lstrip())
        if picture.about.ended and picture.status.version is None:
            return Text(f"ended after {elapsed}, before its first commit")  # the whole view would be empty
        return draw(picture.about, picture.status, picture.losses, width, height)


class LogScreen(Screen):
    """Prints to a log of the run, which is read together with the run's events and adds the times."""

    def note(self, text: str) -> None:
        echo_on_console(self.console, text)

    def event(self, text: str) -> None:
        """Print nothing: the reader has the run's events."""


def auto_screen() -> Screen:
    """Return the live view on a terminal or in a notebook, otherwise lines."""
    if writes_timestamped_log():
        return LogScreen()
    console = stderr_console()
    return LiveScreen(console) if can_draw(console) else Screen()


def status_sentence(about: About, status: SwarmStatus) -> str:
    """Summarize the status in one line."""
    alive = sum(member.is_alive for member in status.members)
    share = status.tokens.applied / max(status.horizon, 1)
    return (
        f"commit {status.version}, {share:.0%} of the {about.unit} counted, "
        f"training loss {format_figure(status.loss)}, {format_speed(status.tokens_per_s, about.unit)}, "
        f"{alive} of {len(status.members)} members alive, {format_duration(status.left)} left"
    )
