"""What this computer remembers of a fleet: a cache, that may be lost at any time, and every event it has seen."""

import sqlite3
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from tpuswarm.fleet.decide.actions import Event
from tpuswarm.fleet.decide.state import FleetState

MAX_EVENTS = 50_000
"""Events that are kept, the newest: a hundred machines that are taken away each day for four months."""
TABLES = """
create table if not exists events (at real, pool text, machine text, kind text, text text,
                                   unique (at, pool, machine, kind, text));
create table if not exists memory (one integer primary key check (one = 1), at real, json text);
"""


@cache
def _adapter() -> TypeAdapter[FleetState]:
    return TypeAdapter(FleetState)


class History:
    """One SQLite file. What cannot be read is begun anew; what cannot be written is said, and the fleet goes on."""

    def __init__(self, path: Path):
        self.path = path
        self.trouble: str | None = None
        """Why nothing is kept."""

    def state(self) -> tuple[FleetState, float] | None:
        """The memory that was kept last, and when; None: there is none."""
        if not self.path.exists():
            return None
        try:
            with self._open() as file:
                row = file.execute("select json, at from memory").fetchone()
            return None if row is None else (_adapter().validate_json(row[0]), row[1])
        except (sqlite3.Error, OSError, ValidationError):
            return None

    def keep(self, memory: FleetState, events: Iterable[Event], at: float) -> None:
        """The memory as it is `at` that moment, and what happened."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self._open() as file:
                file.executemany("insert or ignore into events values (?, ?, ?, ?, ?)", events)
                file.execute("delete from events where rowid <= (select max(rowid) from events) - ?", (MAX_EVENTS,))
                file.execute("insert or replace into memory values (1, ?, ?)", (at, _adapter().dump_json(memory)))
            self.trouble = None
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError):
                self.trouble = f"{self.path}: {error}"
            else:
                self.path.unlink(missing_ok=True)  # it is no database any more
        except OSError as error:
            self.trouble = f"{self.path}: {error.strerror}"

    def events(self, machine: str | None = None) -> list[Event]:
        """All, or those of one machine, oldest first."""
        if not self.path.exists():
            return []
        which = ("", ()) if machine is None else (" where machine = ?", (machine,))
        try:
            with self._open() as file:
                rows = file.execute(f"select * from events{which[0]} order by at", which[1]).fetchall()
        except (sqlite3.Error, OSError):
            return []
        return [Event(*row) for row in rows]

    def _open(self) -> "_Closing":
        return _Closing(self.path)


class _Closing:
    """A connection for one transaction."""

    def __init__(self, path: Path):
        self._file = sqlite3.connect(path, timeout=10)

    def __enter__(self) -> sqlite3.Connection:
        self._file.execute("pragma synchronous = off")  # a cache: a power cut may cost it
        self._file.executescript(TABLES)
        return self._file

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:
            self._file.commit()
        self._file.close()
