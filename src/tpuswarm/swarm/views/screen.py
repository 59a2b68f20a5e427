"""A swarm's progress for a person: a live view on a terminal, a few lines elsewhere. All of it on stderr."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from tpuswarm.config.formatting import format_duration, format_figure
from tpuswarm.swarm.views.drawing import About, draw
from tpuswarm.swarm.views.status import SwarmStatus
from tpuswarm.train.look.display import PLAIN_WIDTH, speed_text
from tpuswarm.train.look.live import Curve, can_draw, region
from tpuswarm.train.process.stamped import logged
from tpuswarm.train.process.terminal import say_on
from tpuswarm.train.process.waiting import stderr_console

QUIET = 5.0
"""Seconds between two lines of progress."""


class Screen:
    """Lines on stderr: every event, and now and then how the run stands."""

    def __init__(self, console: Console | None = None):
        self.console = console or Console(stderr=True, highlight=False, width=PLAIN_WIDTH)
        self.began, self._said = time.time(), 0.0
        self._about: About | None = None

    def open(self, about: About, sentences: Sequence[str]) -> None:
        """Say what is about to be trained."""
        self._about = about
        say_on(self.console, f"{about.title}, in {about.run}")
        for each in sentences:
            self.note(each)

    def note(self, text: str) -> None:
        """Say what happened."""
        stamp = f"{time.time() - self.began:6.1f} s  "
        say_on(self.console, f"{stamp}{text}", hang=len(stamp))

    def event(self, text: str) -> None:
        """Say what happened to the run, which its events say as well."""
        self.note(text)

    def loss(self, value: float) -> None:
        """Take in the loss of a step of one of the members, in the order of their steps."""

    def status(self, status: SwarmStatus) -> None:
        """Take in how the run stands."""
        now = time.monotonic()
        if now - self._said >= QUIET and status.loss is not None and self._about:
            self._said = now
            self.note(status_sentence(self._about, status))

    def close(self) -> None:
        """Leave the screen; may be called twice."""


@dataclass(frozen=True)
class Picture:
    """What the live view draws."""

    about: About
    status: SwarmStatus | None = None
    losses: Sequence[float] = ()


class LiveScreen(Screen):
    """A view that is drawn anew twice a second, under what happened."""

    def __init__(self, console: Console | None = None):
        super().__init__(console)
        self._live: Live | None = None
        self._picture: Picture | None = None
        self._curve = Curve()

    def open(self, about: About, sentences: Sequence[str]) -> None:
        """Say what is about to be trained, then draw the view."""
        super().open(about, sentences)
        self._picture = Picture(about)
        self._live = region(self.console, self._draw)

    def loss(self, value: float) -> None:
        """Take in the loss of a step of one of the members, in the order of their steps."""
        self._curve.add(value)

    def status(self, status: SwarmStatus) -> None:
        """Take in how the run stands."""
        assert self._picture is not None
        self._picture = Picture(self._picture.about, status, self._curve.means)

    def close(self) -> None:
        """Draw once more and leave the view on the screen."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _draw(self, width: int, height: int) -> RenderableType:
        picture = self._picture
        assert picture is not None
        if picture.status is None:
            return Text(f"starting processes … {format_duration(time.time() - self.began)}")
        return draw(picture.about, picture.status, picture.losses, width, height)


class LogScreen(Screen):
    """Lines in a log of the run, which are read together with its events, and have their times."""

    def note(self, text: str) -> None:
        """Say what happened."""
        say_on(self.console, text)

    def event(self, text: str) -> None:
        """It is read already."""


def auto_screen() -> Screen:
    """The live view on a terminal or in a notebook, else lines."""
    if logged():
        return LogScreen()
    console = stderr_console()
    return LiveScreen(console) if can_draw(console) else Screen()


def status_sentence(about: About, status: SwarmStatus) -> str:
    """How a run stands, in one line."""
    alive = sum(each.lives for each in status.members)
    share = status.tokens.applied / max(status.horizon, 1)
    return (
        f"commit {status.version}, {share:.0%} of the {about.unit} counted, "
        f"training loss {format_figure(status.loss)}, {speed_text(status.tokens_per_s, about.unit)}, "
        f"{alive} of {len(status.members)} members alive, {format_duration(status.left)} left"
    )
