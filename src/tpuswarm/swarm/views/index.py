"""A SQLite index of the ledger, for what `ledger show` and `status` ask; no authority, made again at any doubt."""

import hashlib
import os
import sqlite3
import zlib
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from tpuswarm.errors import RunFailed
from tpuswarm.swarm.core.values import Decision, Fate, Record, Rule
from tpuswarm.swarm.storage.ledger import Ledger, digest
from tpuswarm.swarm.storage.store import Missing, Store

FILE = "index.sqlite"
_FORM = 1
"""Of the tables; an index of another form is made again."""
_COLUMNS = {
    "commits": "version, epoch, time, rule, rate, momentum, tokens, digest",
    "contributions": "version, member, incarnation, sequence, fate, reason, rows, base, tokens, weight, clip",
}
"""But for the last column, `proof`, a checksum of the others: SQLite itself does not see a flipped bit in a number."""
_TABLES = f"""
    BEGIN;
    CREATE TABLE IF NOT EXISTS commits (
        version INTEGER PRIMARY KEY, epoch INTEGER, time REAL, rule TEXT, rate REAL, momentum REAL, tokens INTEGER,
        digest TEXT, proof INTEGER);
    CREATE TABLE IF NOT EXISTS contributions (
        version INTEGER, member TEXT, incarnation TEXT, sequence INTEGER, fate TEXT, reason TEXT, rows INTEGER,
        base INTEGER, tokens INTEGER, weight REAL, clip REAL, proof INTEGER,
        PRIMARY KEY (member, incarnation, sequence));
    CREATE INDEX IF NOT EXISTS by_version ON contributions (version);
    PRAGMA user_version = {_FORM};
    COMMIT;
"""


@dataclass(frozen=True)
class Verdict:
    """What a commit says of one contribution."""

    member: str
    incarnation: str
    sequence: int
    fate: Fate
    reason: str
    rows: int
    """How many."""
    base: int
    tokens: int
    weight: float
    clip: float


@dataclass(frozen=True)
class Commit:
    """One record, as it is shown."""

    verdicts: list[Verdict]
    """In the order of identities."""
    version: int
    epoch: int
    time: float
    """Seconds since 1970."""
    rule: Rule
    rate: float
    momentum: float
    tokens: int
    """Counted in the whole run up to it."""


@dataclass(frozen=True)
class MemberTotals:
    """What became of a member's contributions: their number, and tokens by fate."""

    member: str
    contributions: int
    applied: int
    returned: int
    dropped: int
    void: int


class Index:
    """The index of one ledger, up to date when it is made."""

    def __init__(self, ledger: Ledger):
        """Reads the records that the index does not hold yet; raises RunFailed where one is damaged."""
        self._ledger = ledger
        self._path = _place(ledger.store)
        self._db: sqlite3.Connection | None = None
        try:
            self._db = _opened(self._path)
            self.update()
        except (sqlite3.Error, OSError):
            self._again()

    def update(self) -> None:
        """Take in the records made since."""
        last = self._query("SELECT version, digest FROM commits ORDER BY version DESC LIMIT 1")
        if last and not self._holds(*last[0]):
            self._again()
            return
        first = last[0][0] + 1 if last else 0
        self._add(self._ledger.records(version for version in self._ledger.versions() if version >= first))

    def commits(self, last: int) -> list[Commit]:
        """The last so many commits, oldest first."""
        columns = "version, epoch, time, rule, rate, momentum, tokens"
        rows = self._query(f"SELECT {columns} FROM commits ORDER BY version DESC LIMIT ?", last)
        return [Commit(self._verdicts(row[0]), *row) for row in reversed(rows)]

    def tokens(self) -> dict[Fate, int]:
        """Tokens of all decided contributions by fate; 0 where there is none."""
        rows = self._query("SELECT fate, sum(tokens) FROM contributions GROUP BY fate")
        return {"applied": 0, "returned": 0, "dropped": 0, "void": 0, **dict(rows)}

    def members(self) -> list[MemberTotals]:
        """What each member contributed, by name."""
        fates = ("applied", "returned", "dropped", "void")
        sums = ", ".join(f"sum(CASE fate WHEN '{fate}' THEN tokens ELSE 0 END)" for fate in fates)
        query = f"SELECT member, count(*), {sums} FROM contributions GROUP BY member ORDER BY member"
        return [MemberTotals(*row) for row in self._query(query)]

    def close(self) -> None:
        """Let the file go."""
        if self._db is not None:
            self._db.close()

    def _verdicts(self, version: int) -> list[Verdict]:
        columns = "member, incarnation, sequence, fate, reason, rows, base, tokens, weight, clip"
        order = "member, incarnation, sequence"
        rows = self._query(f"SELECT {columns} FROM contributions WHERE version = ? ORDER BY {order}", version)
        return [Verdict(*row) for row in rows]

    def _query(self, query: str, *values: int) -> list[tuple[Any, ...]]:
        assert self._db is not None
        return self._db.execute(query, values).fetchall()

    def _holds(self, version: int, known: str) -> bool:
        """Whether the ledger still has that record: the folder may be another run's now."""
        try:
            return digest(self._ledger.record(version)) == known
        except Missing:
            return False

    def _add(self, records: Iterable[Record]) -> None:
        assert self._db is not None
        with self._db:  # one transaction; another process may have added the same
            for each in records:
                commit = (each.version, each.epoch, each.time, each.rule, each.rate, each.momentum, each.tokens)
                self._insert("commits", (*commit, digest(each)))
                for decision in each.decisions:
                    self._insert("contributions", (each.version, *astuple(_verdict(decision))))

    def _insert(self, table: str, values: tuple[Any, ...]) -> None:
        assert self._db is not None
        places = ", ".join("?" * (len(values) + 1))
        self._db.execute(f"INSERT OR IGNORE INTO {table} VALUES ({places})", (*values, _proof(*values)))

    def _again(self) -> None:
        self.close()
        try:
            for file in (self._path, Path(f"{self._path}-journal")):
                file.unlink(missing_ok=True)
            self._db = _opened(self._path)
            self._add(self._ledger.records(self._ledger.versions()))
        except (sqlite3.Error, OSError) as error:
            raise RunFailed(f"the index {self._path} cannot be written: {error}; make room, or move it away") from error


def _opened(path: Path) -> sqlite3.Connection:
    path.parent.mkdir(parents=True, exist_ok=True)
    db = sqlite3.connect(path, timeout=60)
    if db.execute("PRAGMA integrity_check").fetchone() != ("ok",):
        raise sqlite3.DatabaseError("damaged")
    form = db.execute("PRAGMA user_version").fetchone()[0]
    if form == 0:
        db.executescript(_TABLES)
    elif form != _FORM:
        raise sqlite3.DatabaseError("of another form")
    db.create_function("proof", -1, _proof)
    for table, columns in _COLUMNS.items():
        if db.execute(f"SELECT count(*) FROM {table} WHERE proof IS NOT proof({columns})").fetchone() != (0,):
            raise sqlite3.DatabaseError("damaged")
    return db


def _proof(*values: Any) -> int:
    return zlib.crc32(repr(values).encode())


def _verdict(decision: Decision) -> Verdict:
    key = decision.identity.incarnation
    return Verdict(
        key.member, key.name, decision.identity.sequence, decision.fate, decision.reason,
        len(decision.rows), decision.base, decision.tokens, decision.weight, decision.clip,
    )  # fmt: skip


def _place(store: Store) -> Path:
    """Beside the ledger where that is a folder that may be written to, else in this user's cache."""
    beside = store.here(FILE)
    if beside is not None and os.access(beside.parent, os.W_OK):
        return beside
    from tpuswarm.train.process.platform import cache_folder

    return cache_folder("ledgers") / f"{hashlib.sha256(store.root.encode()).hexdigest()[:32]}.sqlite"
