"""What will happen by itself, and when: kept on the disk, so that it happens also after a restart."""

import asyncio
import json
import logging
import sqlite3
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from tpuswarm.cloud.rehearsal.common.records import Records, Table

SPEED = 10.0
"""Seconds of the cloud in one of ours, if nobody says."""

RETRY_S = 1.0


class Event(NamedTuple):
    """At unix second `due`, `what` happens to `args`."""

    due: float
    what: str
    args: list[Any]
    is_fixed: bool = False
    """Whether `due` was given as a point in time: it stays when the clock's speed changes."""


class Timetable:
    """A clock that can be sped up: delays are seconds of the cloud, points in time are everybody's."""

    def __init__(self, records: Records):
        self._records = records
        self._events = records.table("event", lambda body: Event(*json.loads(body)))
        self._settings: Table[float] = records.table("setting")
        self._handlers: dict[str, Callable[..., None]] = {}
        self._number = max((int(name) for name in self._events), default=0)
        self._earlier = asyncio.Event()
        self.failures: list[str] = []
        """What should have happened since the server began, and did not: faults of the local cloud itself."""

    @property
    def speed(self) -> float:
        """Seconds of the cloud in one of ours."""
        return self._settings.get("speed") or SPEED

    @speed.setter
    def speed(self, speed: float) -> None:
        now = time.time()
        for name, event in self._events.items():
            if not event.is_fixed:
                self._events.put(name, event._replace(due=now + (event.due - now) * self.speed / speed))
        self._settings.put("speed", speed)
        self._earlier.set()

    def seconds(self, seconds: float) -> float:
        """So many of the cloud's, in ours."""
        return seconds / self.speed

    def on(self, what: str, handler: Callable[..., None]) -> None:
        """Who is to be called when `what` is due."""
        self._handlers[what] = handler

    def after(self, seconds: float, what: str, *args: Any) -> None:
        """In so many seconds of the cloud."""
        self._add(Event(time.time() + self.seconds(seconds), what, list(args)))

    def at(self, due: float, what: str, *args: Any) -> None:
        """At a unix second, however fast the cloud's clock is."""
        self._add(Event(due, what, list(args), is_fixed=True))

    def _add(self, event: Event) -> None:
        self._number += 1
        self._events.put(f"{self._number:09d}", event)
        self._earlier.set()

    def happen(self, what: str, *args: Any) -> None:
        """Now, as a part of what happens already."""
        self._handlers[what](*args)

    def run_due(self) -> None:
        """All that is due happens, the earliest first, each with what follows from it in one transaction."""
        while True:
            due = [(event.due, name) for name, event in self._events.items() if event.due <= time.time()]
            if not due:
                return
            name = min(due)[1]
            event = self._events[name]
            self._events.pop(name)
            try:
                self._handlers[event.what](*event.args)
            except Exception as error:
                logging.exception("%s%s failed", event.what, event.args)
                self.failures.append(f"{event.what}: {error}")
            self._records.commit()

    async def run(self) -> None:
        """For ever."""
        while True:
            try:
                self.run_due()
            except sqlite3.Error as error:  # a full disk: what is not written yet is tried again
                logging.error("%s", error)
                await asyncio.sleep(RETRY_S)
                continue
            self._earlier.clear()
            due = min((event.due for event in self._events.values()), default=None)
            try:
                await asyncio.wait_for(self._earlier.wait(), None if due is None else max(due - time.time(), 0.001))
            except TimeoutError:
                continue
