"""What a person sees while a fleet is brought up, kept or brought down."""

import time
from typing import TYPE_CHECKING, Any

from tpuswarm.cloud.protocol import Machine
from tpuswarm.train.process.terminal import say_on

if TYPE_CHECKING:
    from tpuswarm.fleet.decide.actions import Event
    from tpuswarm.fleet.keeper.keeper import Tick

MOST = 14
"""Machines shown on a terminal: those that need a look come first."""


class Watching:
    """On a terminal a table that is drawn again at every look, else a line for everything that happens."""

    def __init__(self, console: Any):
        self._console, self._live = console, None
        self._tick: Tick | None = None
        self._said: set[str] = set()

    def __enter__(self) -> "Watching":
        if self._console.is_terminal:
            from tpuswarm.train.process.drawn import Drawn

            self._live = Drawn(console=self._console, auto_refresh=False)  # type: ignore[assignment]
            self._live.start()  # type: ignore[attr-defined]
        return self

    def __exit__(self, *about: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def say(self, text: str) -> None:
        """Something beside the looks; what a full disk does not take is lost, and the keeper goes on."""
        try:
            say_on(self._console, text)
        except OSError:
            self._console._buffer.clear()  # rich would keep it, and try it again with all that follows

    def show(self, tick: "Tick") -> None:
        """What came of a look."""
        first = self._tick is None
        self._tick = tick
        if first and not tick.leads and tick.document.lease:
            lease = tick.document.lease
            self.say(f"the keeper on {lease.host} (process {lease.pid}) does it; this command watches")
        for event in tick.events:
            self.say(event_line(event))
        if self._live is not None:
            self._live.update(self._drawn(tick), refresh=True)
            return
        for wait in tick.plan.waits:
            if wait.why not in self._said:
                self._said.add(wait.why)
                self.say(f"waiting: {wait.subject}: {wait.why}")

    def what_exists(self) -> list[str]:
        """For who interrupts it."""
        if self._tick is None:
            return ["nothing was asked of the cloud yet"]
        ours = self._ours(self._tick)
        asked = self._tick.observed.state.requests.keys() - {f"{each.zone}/{each.name}" for each in ours}
        if not ours and not asked:
            return ["no machine of the fleet is there"]
        named = [f"{each.name} ({each.said.lower()})" for each in ours] + [
            f"{key} (asked for)" for key in sorted(asked)
        ]
        more = f" and {len(named) - 12} more" if len(named) > 12 else ""
        there = "1 machine is" if len(named) == 1 else f"{len(named)} machines are"
        found = [f"{there} there: {', '.join(named[:12])}{more}"]
        if self._tick.leads:
            found.append("nobody keeps the fleet now, and what is there still costs money: see `tpuswarm list`")
        return found

    def _ours(self, tick: "Tick") -> list[Machine]:
        return [each for each in tick.observed.machines if each.fleet == tick.document.desired.fleet]

    def _drawn(self, tick: "Tick") -> Any:
        from rich.console import Group
        from rich.text import Text

        from tpuswarm.fleet.view import machine_rows, machines_table

        desired = tick.document.desired
        shown = machine_rows(desired, tick.observed.listing, tick.document.events, tick.now)
        shown.sort(key=lambda row: row.state == "ready")
        ready = sum(row.state == "ready" for row in shown)
        wanted = 0 if desired.down else sum(pool.count for pool in desired.pools)
        parts: list[Any] = [machines_table(shown[:MOST], self._console.width)] if shown else []
        if len(shown) > MOST:
            parts.append(Text(f"and {len(shown) - MOST} more", style="dim"))
        for wait in tick.plan.waits:
            again = "" if wait.until is None else f" (again in {max(0, wait.until - tick.now):.0f} s)"
            parts.append(Text(f"waiting: {wait.subject}: {wait.why}{again}", style="yellow"))
        what = f"coming down ({desired.down})" if desired.down else f"{ready} of {wanted} ready"
        parts.append(Text(f"{desired.fleet}: {what}, {len(shown)} there; {time.strftime('%H:%M:%S')}"))
        return Group(*parts)


def event_line(event: "Event") -> str:
    """What happened to a machine, in a line."""
    what = f"{event.machine}: " if event.machine else f"{event.pool}: " if event.pool else ""
    return f"{time.strftime('%H:%M:%S', time.localtime(event.at))} {what}{event.kind}: {event.text}"
