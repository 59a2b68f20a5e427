"""Schedule the cloud's future events; they are on the disk, so they survive a restart."""

import asyncio
import json
import logging
import sqlite3
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from tpuswarm.cloud.rehearsal.common.records import Records, Table

DEFAULT_SPEED = 10.0
RETRY_S = 1.0


class Event(NamedTuple):
    """A call of the handler named `what` at unix second `due`."""

    due: float
    what: str
    args: list[Any]
    is_fixed: bool = False
    """Whether `due` stays when the clock's speed changes."""


class Timetable:
    """A clock that goes `speed` times as fast as real time, with its future events."""

    def __init__(self, records: Records):
        self._records = records
        self._events = records.table("event", lambda body: Event(*json.loads(body)))
        self._settings: Table[float] = records.table("setting")
        self._handlers: dict[str, Callable[..., None]] = {}
        self._number = max((int(name) for name in self._events), default=0)
        self._changed = asyncio.Event()
        self.failures: list[str] = []
        """Events whose handlers failed since the server started: bugs of the local cloud."""

    @property
    def speed(self) -> float:
        """Seconds of the cloud per real second."""
        return self._settings.get("speed") or DEFAULT_SPEED

    @speed.setter
    def speed(self, speed: float) -> None:
        now = time.time()
        for name, event in self._events.items():
            if not event.is_fixed:
                self._events.put(name, event._replace(due=now + (event.due - now) * self.speed / speed))
        self._settings.put("speed", speed)
        self._changed.set()

    def register(self, what: str, handler: Callable[..., None]) -> None:
        """Call `handler` at events named `what`."""
        self._handlers[what] = handler

    def schedule(self, delay_s: float, what: str, *args: Any) -> None:
        """Schedule an event after seconds of the cloud's clock."""
        self._add(Event(time.time() + delay_s / self.speed, what, list(args)))

    def schedule_at(self, due: float, what: str, *args: Any) -> None:
        """Schedule an event at a unix second, at any speed of the clock."""
        self._add(Event(due, what, list(args), is_fixed=True))

    def _add(self, event: Event) -> None:
        self._number += 1
        self._events.put(f"{self._number:09d}", event)
        self._changed.set()

    def run_now(self, what: str, *args: Any) -> None:
        self._handlers[what](*args)

    def run_due(self) -> None:
        """Run all due events, the earliest first, each in a transaction."""
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
        while True:
            try:
                self.run_due()
            except sqlite3.Error as error:  # a full disk: the next round writes again
                logging.error("%s", error)
                await asyncio.sleep(RETRY_S)
                continue
            self._changed.clear()
            due = min((event.due for event in self._events.values()), default=None)
            try:
                await asyncio.wait_for(self._changed.wait(), None if due is None else max(due - time.time(), 0.001))
            except TimeoutError:
                continue
