"""Store the cloud's state in one SQLite file: tables of documents, kept in memory and written in one transaction."""

import json
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

from tpuswarm.errors import RunFailed

Document = TypeVar("Document")


def to_json(document: Any) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode()


class Table(Generic[Document]):
    """Documents by name. Put a document again after changing it in place."""

    def __init__(self, rows: dict[str, Document], put: Callable[[str, Document | None], None]):
        self._rows = rows
        self._put = put

    def __contains__(self, name: str) -> bool:
        return name in self._rows

    def __getitem__(self, name: str) -> Document:
        return self._rows[name]

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._rows))

    def get(self, name: str) -> Document | None:
        return self._rows.get(name)

    def items(self) -> list[tuple[str, Document]]:
        return sorted(self._rows.items())

    def values(self) -> list[Document]:
        return [document for _, document in self.items()]

    def put(self, name: str, document: Document) -> None:
        self._rows[name] = document
        self._put(name, document)

    def pop(self, name: str) -> None:
        self._put(name, None)
        self._rows.pop(name, None)


class Records:
    """Tables in a file. A killed process loses all changes since the last `commit`, together."""

    def __init__(self, path: Path):
        """Raises RunFailed if the file is damaged or no such file."""
        self._path = path
        self._changed: dict[tuple[str, str], Callable[[], bytes | None]] = {}
        try:
            self._database = sqlite3.connect(path, isolation_level=None)
            path.chmod(0o600)
            self._database.execute("PRAGMA journal_mode = WAL")
            self._database.execute("PRAGMA synchronous = NORMAL")
            self._database.execute(
                "CREATE TABLE IF NOT EXISTS documents (kind TEXT, name TEXT, body BLOB, PRIMARY KEY (kind, name))"
            )
            damage = self._database.execute("PRAGMA quick_check").fetchone()[0]
        except sqlite3.DatabaseError as error:
            raise self._damaged(str(error)) from error
        if damage != "ok":
            raise self._damaged(damage)

    def table(
        self,
        kind: str,
        load: Callable[[bytes], Document] = json.loads,
        dump: Callable[[Document], bytes] = to_json,
    ) -> Table[Document]:
        """Return the table of a kind of documents. Raises RunFailed if one cannot be read."""
        rows = {}
        try:
            for name, body in self._database.execute("SELECT name, body FROM documents WHERE kind = ?", (kind,)):
                rows[name] = load(body)
        except Exception as error:
            raise self._damaged(f"a document of kind {kind}: {error}") from error

        def put(name: str, document: Document | None) -> None:
            self._changed[kind, name] = lambda: None if document is None else dump(document)

        return Table(rows, put)

    def commit(self) -> None:
        """Write all changes. After sqlite3.Error (a full disk), the next call writes them."""
        if not self._changed:
            return
        rows = [(*key, body()) for key, body in self._changed.items()]
        with self._database:
            self._database.execute("BEGIN IMMEDIATE")
            self._database.executemany("DELETE FROM documents WHERE kind = ? AND name = ?", list(self._changed))
            self._database.executemany("INSERT INTO documents VALUES (?, ?, ?)", [row for row in rows if row[2]])
        self._changed = {}

    def close(self) -> None:
        self.commit()
        self._database.close()

    def _damaged(self, reason: str) -> RunFailed:
        return RunFailed(
            f"{self._path} is damaged ({reason}): the local cloud cannot know its machines; "
            f"delete {self._path.parent} to begin a new one"
        )
