"""This computer's history of a fleet: its recent state (a cache that may be lost), and all events."""

import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from functools import cache
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from tpuswarm.fleet.decide.actions import Event
from tpuswarm.fleet.decide.fleet_state import FleetState

MAX_EVENTS = 50_000
"""Four months of a hundred preemptions a day."""
LOCK_TIMEOUT_S = 10
TABLES = """
create table if not exists events (at real, pool text, machine text, kind text, text text,
                                   unique (at, pool, machine, kind, text));
create table if not exists memory (one integer primary key check (one = 1), at real, json text);
"""


@cache
def _adapter() -> TypeAdapter[FleetState]:
    return TypeAdapter(FleetState)


class History:
    """An SQLite file. A damaged file is replaced; if it cannot be written, `trouble` says so."""

    def __init__(self, path: Path):
        self.path = path
        self.trouble: str | None = None

    def state(self) -> tuple[FleetState, float] | None:
        """Return the last saved state and its time, if there is one."""
        if not self.path.exists():
            return None
        try:
            with self._transaction() as database:
                row = database.execute("select json, at from memory").fetchone()
            return None if row is None else (_adapter().validate_json(row[0]), row[1])
        except (sqlite3.Error, OSError, ValidationError):
            return None

    def save(self, state: FleetState, events: Iterable[Event], at: float) -> None:
        """Save the state at a time, and add new events."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self._transaction() as database:
                database.executemany("insert or ignore into events values (?, ?, ?, ?, ?)", events)
                database.execute("delete from events where rowid <= (select max(rowid) from events) - ?", (MAX_EVENTS,))
                database.execute("insert or replace into memory values (1, ?, ?)", (at, _adapter().dump_json(state)))
            self.trouble = None
        except sqlite3.OperationalError as error:
            self.trouble = f"{self.path}: {error}"
        except sqlite3.DatabaseError:
            self.path.unlink(missing_ok=True)  # not a database
        except OSError as error:
            self.trouble = f"{self.path}: {error.strerror}"

    def events(self, machine: str | None = None) -> list[Event]:
        """Return the events of all machines or of one, oldest first."""
        if not self.path.exists():
            return []
        where, values = ("", ()) if machine is None else (" where machine = ?", (machine,))
        try:
            with self._transaction() as database:
                rows = database.execute(f"select * from events{where} order by at", values).fetchall()
        except (sqlite3.Error, OSError):
            return []
        return [Event(*row) for row in rows]

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(self.path, timeout=LOCK_TIMEOUT_S)) as database:
            database.execute("pragma synchronous = off")  # a power cut may cost the cache
            database.executescript(TABLES)
            with database:
                yield database
