"""Read growing files of JSON lines of any size: a sample, the new lines, or lines before an offset.

Rows are parsed with `pydantic_core.from_json` and not checked, which would take too long for millions of them.
"""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from pydantic_core import from_json

from tpuswarm.train.run.directory import reading

FULL_READ_BYTES = 4 << 20
"""Smaller files are read whole."""
READ_WINDOW_BYTES = 1 << 18
"""Read at once; longer lines take several."""
MAX_NEW_BYTES = 8 << 20
"""If more are new, the first are skipped."""
TAIL_BYTES = 1 << 8
MAX_SEARCHED_BYTES = 1 << 29
"""Larger files are not searched."""

Row = dict[str, Any]


class Line(NamedTuple):
    """One line."""

    at: int
    """Byte offset."""
    text: bytes

    @property
    def row(self) -> Row:
        """The parsed object; empty if it is none."""
        with suppress(ValueError):
            found = from_json(self.text)
            if isinstance(found, dict):
                return found
        return {}


class JsonLines:
    """One file, which may not exist yet."""

    def __init__(self, path: Path):
        self._path = path
        self._end = 0
        """Everything before it was read."""
        self._tail = b""
        """The last bytes before it: a run that resumes cuts its rows, and then writes others."""
        self._inode = 0

    def sample(self, count: int, at_least: int) -> Iterator[list[Line]]:
        """Yield groups of lines from evenly spaced places; later lines are new.

        at_least: bytes of a group, which has at least one line. A small file yields each line as a group.
        """
        with reading(self._path):
            if not self._path.exists():
                return
            with self._path.open("rb") as file:
                status = self._path.stat()
                self._inode, size = status.st_ino, status.st_size
                self._set_end(file, _end_of_last_line(file, size))
                if self._end <= FULL_READ_BYTES:
                    yield from ([line] for line in _read_lines(file, 0, self._end))
                    return
                step = self._end / count
                before = 0
                for number in range(count):
                    at = _next_line_start(file, max(before, int(number * step)), self._end)
                    found = _read_group(file, at, self._end, min(at_least, int(step)))
                    if found:
                        before = found[-1].at + len(found[-1].text)
                        yield found

    def search(self, text: bytes) -> list[Line]:
        """Return all read lines that contain a text; none of a file beyond MAX_SEARCHED_BYTES."""
        found: list[Line] = []
        if not 0 < self._end <= MAX_SEARCHED_BYTES:
            return found
        with reading(self._path), self._path.open("rb") as file:
            at = 0
            while at < self._end:
                end = min(self._end, at + MAX_NEW_BYTES)
                end = end if end == self._end else _next_line_start(file, end, self._end)
                file.seek(at)
                piece, place = file.read(end - at), 0
                while (place := piece.find(text, place)) >= 0:
                    begin, stop = piece.rfind(b"\n", 0, place) + 1, piece.find(b"\n", place) + 1
                    found.append(Line(at + begin, piece[begin:stop]))
                    place = stop
                at = end
        return found

    def read_new(self, whole: bool = False) -> list[Line] | None:
        """Return the lines appended since the last read; None if the file was replaced or deleted.

        Beyond MAX_NEW_BYTES return the last ones; with `whole` the first ones, and the rest in further calls.
        """
        with reading(self._path):
            try:
                status = self._path.stat()
            except FileNotFoundError:
                return None if self._inode else []
            if (self._inode and status.st_ino != self._inode) or status.st_size < self._end:
                return None
            self._inode = status.st_ino
            with self._path.open("rb") as file:
                file.seek(self._end - len(self._tail))
                if file.read(len(self._tail)) != self._tail:
                    return None
                if status.st_size == self._end:
                    return []
                end = _end_of_last_line(file, status.st_size)
                begin = self._end
                if end - begin > MAX_NEW_BYTES and whole:
                    end = _next_line_start(file, begin + MAX_NEW_BYTES, end)
                elif end - begin > MAX_NEW_BYTES:
                    begin = _next_line_start(file, end - MAX_NEW_BYTES, end)
                found = list(_read_lines(file, begin, end)) if end > begin else []
                self._set_end(file, max(self._end, end))
                return found

    def _set_end(self, file: Any, end: int) -> None:
        file.seek(max(0, end - TAIL_BYTES))
        self._end, self._tail = end, file.read(min(end, TAIL_BYTES))

    def read_before(self, at: int | None, size: int = 0) -> tuple[list[Line], int]:
        """Return lines that end before an offset (None: the end), at least one, and the offset of the first."""
        with reading(self._path):
            if not self._path.exists():
                return [], 0
            size = size or READ_WINDOW_BYTES
            end = self._end if at is None else min(at, self._end)
            with self._path.open("rb") as file:
                while end > 0:
                    begin = 0 if end <= size else _next_line_start(file, end - size, end)
                    if begin < end:
                        return list(_read_lines(file, begin, end)), begin
                    size *= 4  # a line longer than the window
        return [], 0


def _end_of_last_line(file: Any, size: int) -> int:
    """Return the end of the last complete line."""
    end = size
    while end > 0:
        begin = max(0, end - READ_WINDOW_BYTES)
        file.seek(begin)
        at = file.read(end - begin).rfind(b"\n")
        if at >= 0:
            return int(begin + at + 1)
        end = begin
    return 0


def _next_line_start(file: Any, at: int, end: int) -> int:
    """Return the start of the first line at or after an offset."""
    if at == 0:
        return 0
    at -= 1
    while at < end:
        file.seek(at)
        piece = file.read(min(READ_WINDOW_BYTES, end - at))
        found = piece.find(b"\n")
        if found >= 0:
            return int(at + found + 1)
        at += len(piece)
    return end


def _read_lines(file: Any, begin: int, end: int) -> Iterator[Line]:
    file.seek(begin)
    at = begin
    for text in file.read(end - begin).splitlines(keepends=True):
        yield Line(at, text)
        at += len(text)


def _read_group(file: Any, at: int, end: int, at_least: int) -> list[Line]:
    """Read complete lines from a line start."""
    file.seek(at)
    found = []
    read = 0
    while at + read < end and read < max(1, at_least):
        text = file.readline()
        found.append(Line(at + read, text))
        read += len(text)
    return found
