"""What the cloud knows, in one SQLite file: tables of documents, kept in memory and written in one transaction."""

import json
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

from tpuswarm.errors import RunFailed

Document = TypeVar("Document")


def to_json(document: Any) -> bytes:
    """A plain document as it is stored."""
    return json.dumps(document, separators=(",", ":")).encode()


class Table(Generic[Document]):
    """Documents by name. One that was changed in place is put again."""

    def __init__(self, rows: dict[str, Document], put: Callable[[str, Document | None], None]):
        self._rows = rows
        self._put = put

    def __contains__(self, name: str) -> bool:
        return name in self._rows

    def __getitem__(self, name: str) -> Document:
        return self._rows[name]

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._rows))

    def __len__(self) -> int:
        return len(self._rows)

    def get(self, name: str) -> Document | None:
        """None if there is none of that name."""
        return self._rows.get(name)

    def items(self) -> list[tuple[str, Document]]:
        """All, by name."""
        return sorted(self._rows.items())

    def values(self) -> list[Document]:
        """All, by name."""
        return [document for _, document in self.items()]

    def put(self, name: str, document: Document) -> None:
        """Keep it, in the place of one of that name."""
        self._rows[name] = document
        self._put(name, document)

    def pop(self, name: str) -> Document | None:
        """Forget it."""
        self._put(name, None)
        return self._rows.pop(name, None)


class Records:
    """Tables in a file. What was changed since the last `commit` is lost with the process, all of it together."""

    def __init__(self, path: Path):
        """Raises RunFailed if the file holds no such records, or is damaged."""
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
        """The table of a kind of documents. Raises RunFailed for one that cannot be read."""
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
        """Write what was changed. Raises sqlite3.Error where the disk does not take it: the next one tries again."""
        if not self._changed:
            return
        rows = [(*key, body()) for key, body in self._changed.items()]
        with self._database:
            self._database.execute("BEGIN IMMEDIATE")
            self._database.executemany("DELETE FROM documents WHERE kind = ? AND name = ?", list(self._changed))
            self._database.executemany("INSERT INTO documents VALUES (?, ?, ?)", [row for row in rows if row[2]])
        self._changed = {}

    def close(self) -> None:
        """Write and close."""
        self.commit()
        self._database.close()

    def _damaged(self, why: str) -> RunFailed:
        return RunFailed(
            f"{self._path} is damaged ({why}): the local cloud cannot know its machines; "
            f"delete {self._path.parent} to begin a new one"
        )
