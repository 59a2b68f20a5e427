"""Show a fleet while it is created, kept or deleted."""

import time
from typing import Any

from tpuswarm.cloud.protocol import Machine
from tpuswarm.fleet.decide.actions import Event
from tpuswarm.fleet.keeper.keeper import Tick
from tpuswarm.fleet.view import machine_rows, machines_table
from tpuswarm.train.process.terminal import echo_on_console

MAX_ROWS = 14
"""Machines shown on a terminal; ready ones come last."""
MAX_NAMES = 12


class FleetProgress:
    """On a terminal a table that is redrawn, elsewhere a line for each event."""

    def __init__(self, console: Any):
        self._console, self._live = console, None
        self._tick: Tick | None = None
        self._printed_waits: set[str] = set()

    def __enter__(self) -> "FleetProgress":
        if self._console.is_terminal:
            from tpuswarm.train.process.live_region import LiveRegion

            self._live = LiveRegion(console=self._console, auto_refresh=False)  # type: ignore[assignment]
            self._live.start()  # type: ignore[attr-defined]
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def print_note(self, text: str) -> None:
        """Print a line. If the disk of a log is full, drop the line: the keeper must go on."""
        try:
            echo_on_console(self._console, text)
        except OSError:
            self._console._buffer.clear()  # otherwise rich prints it again with the next line

    def show(self, tick: Tick) -> None:
        """Show the result of one round of the keeper."""
        is_first = self._tick is None
        self._tick = tick
        if is_first and not tick.leads and tick.document.lease:
            lease = tick.document.lease
            self.print_note(f"the keeper on {lease.host} (process {lease.pid}) does the work; this command watches it")
        for event in tick.events:
            self.print_note(format_event(event))
        if self._live is not None:
            self._live.update(self._draw(tick), refresh=True)
            return
        for wait in tick.plan.waits:
            if wait.why not in self._printed_waits:
                self._printed_waits.add(wait.why)
                self.print_note(f"waiting: {wait.subject}: {wait.why}")

    def describe_machines(self) -> list[str]:
        """Return lines about the machines that exist, for a user who interrupts the command."""
        if self._tick is None:
            return ["no machine was requested yet"]
        machines = self._own_machines(self._tick)
        created = {f"{machine.zone}/{machine.name}" for machine in machines}
        requested = sorted(self._tick.observed.state.requests.keys() - created)
        if not machines and not requested:
            return ["the fleet has no machine"]
        names = [f"{machine.name} ({machine.said.lower()})" for machine in machines]
        names += [f"{key} (requested)" for key in requested]
        more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
        count = "1 machine exists" if len(names) == 1 else f"{len(names)} machines exist"
        lines = [f"{count}: {', '.join(names[:MAX_NAMES])}{more}"]
        if self._tick.leads:
            lines.append("no keeper runs now, and machines still cost money. See `tpuswarm list`.")
        return lines

    def _own_machines(self, tick: Tick) -> list[Machine]:
        return [machine for machine in tick.observed.machines if machine.fleet == tick.document.desired.fleet]

    def _draw(self, tick: Tick) -> Any:
        from rich.console import Group
        from rich.text import Text

        desired = tick.document.desired
        rows = machine_rows(desired, tick.observed.listing, tick.document.events, tick.now)
        rows.sort(key=lambda row: row.state == "ready")
        ready = sum(row.state == "ready" for row in rows)
        count = 0 if desired.down else sum(pool.count for pool in desired.pools)
        parts: list[Any] = [machines_table(rows[:MAX_ROWS], self._console.width)] if rows else []
        if len(rows) > MAX_ROWS:
            parts.append(Text(f"and {len(rows) - MAX_ROWS} more", style="dim"))
        for wait in tick.plan.waits:
            retry = "" if wait.until is None else f" (retry in {max(0, wait.until - tick.now):.0f} s)"
            parts.append(Text(f"waiting: {wait.subject}: {wait.why}{retry}", style="yellow"))
        state = f"deleting ({desired.down})" if desired.down else f"{ready} of {count} ready"
        parts.append(Text(f"{desired.fleet}: {state}, {len(rows)} exist; {time.strftime('%H:%M:%S')}"))
        return Group(*parts)


def format_event(event: Event) -> str:
    subject = f"{event.machine}: " if event.machine else f"{event.pool}: " if event.pool else ""
    return f"{time.strftime('%H:%M:%S', time.localtime(event.at))} {subject}{event.kind}: {event.text}"
