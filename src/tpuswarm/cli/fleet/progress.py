"""Show a fleet while it is created, kept or deleted."""

import time
from collections.abc import Mapping
from typing import Any

from tpuswarm.fleet.decide.actions import Action, Create, Delete, Event
from tpuswarm.fleet.decide.fleet_state import machine_key
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


def describe_machines(tick: Tick | None, sent: Mapping[str, Action]) -> list[str]:
    """Return lines about the machines that exist or were requested, for a user who interrupts the command.

    `sent`: the requests since the tick's listing.
    """
    if tick is None:
        return ["nothing was requested"]
    existing = {machine_key(machine): machine for machine in tick.document.desired.own(tick.observed.machines)}
    created = {key for key, action in sent.items() if isinstance(action, Create)}
    requested = sorted((created | tick.observed.state.requests.keys()) - existing.keys())
    words = {key: machine.state_word for key, machine in existing.items()}
    words |= {key: "deletion requested" for key in words if isinstance(sent.get(key), Delete)}
    lines = []
    if existing:
        verb = "machine exists" if len(existing) == 1 else "machines exist"
        lines.append(_list_names(verb, [f"{existing[key].name} ({word})" for key, word in words.items()]))
    if requested:
        verb = "machine was requested" if len(requested) == 1 else "machines were requested"
        lines.append(_list_names(verb, requested))
    if not lines:
        return ["the fleet has no machine"]
    if tick.leads:
        lines.append("the machines still cost money: `tpuswarm list`")
    return lines


def _list_names(verb: str, names: list[str]) -> str:
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return f"{len(names)} {verb}: {', '.join(names[:MAX_NAMES])}{more}"


def format_event(event: Event) -> str:
    subject = f"{event.machine}: " if event.machine else f"{event.pool}: " if event.pool else ""
    return f"{time.strftime('%H:%M:%S', time.localtime(event.at))} {subject}{event.kind}: {event.text}"
