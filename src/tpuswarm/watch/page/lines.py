"""Files of JSON lines that only grow, however large: some of all lines, all that are new, or those before a place.

They are read with `pydantic_core.from_json`, the parser of train/schema.py, whose checks of each row a look at
millions of them cannot wait for: what lacks a key is left out where that key is used.
"""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from pydantic_core import from_json

from tpuswarm.train.run.directory import reading

WHOLE = 4 << 20
"""Bytes of a file that is read as a whole."""
WINDOW = 1 << 18
"""Bytes that are read at once, where a line is not longer."""
AT_ONCE = 8 << 20
"""Bytes that are read of what is new, at most: of more some are left out."""
SEARCHED = 1 << 29
"""Bytes of a file that is searched."""

Row = dict[str, Any]


class Line(NamedTuple):
    """One of them."""

    at: int
    """Where it begins, in bytes from the beginning."""
    text: bytes

    @property
    def row(self) -> Row:
        """Its object; empty where it is none."""
        with suppress(ValueError):
            found = from_json(self.text)
            if isinstance(found, dict):
                return found
        return {}


class Lines:
    """One such file, which need not be there yet."""

    def __init__(self, path: Path):
        self._path = path
        self._end = 0
        """What lies before it was read."""
        self._inode = 0

    def spread(self, count: int, at_least: int) -> Iterator[list[Line]]:
        """Groups of lines at so many places, as far apart as can be, in order; what comes later is new.

        at_least: bytes of a group, and one line. A small file is read whole, as one group for each line.
        """
        with reading(self._path):
            if not self._path.exists():
                return
            with self._path.open("rb") as file:
                about = self._path.stat()
                self._inode, size = about.st_ino, about.st_size
                self._end = _last_end(file, size)
                if self._end <= WHOLE:
                    yield from ([each] for each in _lines(file, 0, self._end))
                    return
                step = self._end / count
                before = 0
                for number in range(count):
                    at = _next_begin(file, max(before, int(number * step)), self._end)
                    found = _group(file, at, self._end, min(at_least, int(step)))
                    if found:
                        before = found[-1].at + len(found[-1].text)
                        yield found

    def having(self, text: bytes) -> list[Line]:
        """All read lines with a text in them; none of a file beyond SEARCHED."""
        found: list[Line] = []
        if not 0 < self._end <= SEARCHED:
            return found
        with reading(self._path), self._path.open("rb") as file:
            at = 0
            while at < self._end:
                end = min(self._end, at + AT_ONCE)
                end = end if end == self._end else _next_begin(file, end, self._end)
                file.seek(at)
                piece, place = file.read(end - at), 0
                while (place := piece.find(text, place)) >= 0:
                    begin, stop = piece.rfind(b"\n", 0, place) + 1, piece.find(b"\n", place) + 1
                    found.append(Line(at + begin, piece[begin:stop]))
                    place = stop
                at = end
        return found

    def new(self, whole: bool = False) -> list[Line] | None:
        """What was appended since; None where it is another file, or gone: then all is to be read anew.

        Of more than AT_ONCE the last is read; whole: the first, and the rest when it is asked again.
        """
        with reading(self._path):
            try:
                about = self._path.stat()
            except FileNotFoundError:
                return None if self._inode else []
            if (self._inode and about.st_ino != self._inode) or about.st_size < self._end:
                return None
            self._inode = about.st_ino
            if about.st_size == self._end:
                return []
            with self._path.open("rb") as file:
                end = _last_end(file, about.st_size)
                begin = self._end
                if end - begin > AT_ONCE and whole:
                    end = _next_begin(file, begin + AT_ONCE, end)
                elif end - begin > AT_ONCE:
                    begin = _next_begin(file, end - AT_ONCE, end)
                found = list(_lines(file, begin, end)) if end > begin else []
                self._end = max(self._end, end)
                return found

    def before(self, at: int | None, most: int = 0) -> tuple[list[Line], int]:
        """Lines that end before a place (None: all that is read), at least one; and where the first of them begins."""
        with reading(self._path):
            if not self._path.exists():
                return [], 0
            most = most or WINDOW
            end = self._end if at is None else min(at, self._end)
            with self._path.open("rb") as file:
                while end > 0:
                    begin = 0 if end <= most else _next_begin(file, end - most, end)
                    if begin < end:
                        return list(_lines(file, begin, end)), begin
                    most *= 4  # a line longer than the window
        return [], 0


def _last_end(file: Any, size: int) -> int:
    """Where the last whole line ends: the one after it is still being written."""
    end = size
    while end > 0:
        begin = max(0, end - WINDOW)
        file.seek(begin)
        at = file.read(end - begin).rfind(b"\n")
        if at >= 0:
            return int(begin + at + 1)
        end = begin
    return 0


def _next_begin(file: Any, at: int, end: int) -> int:
    """Of the first line that begins at a place or after it."""
    if at == 0:
        return 0
    at -= 1
    while at < end:
        file.seek(at)
        piece = file.read(min(WINDOW, end - at))
        found = piece.find(b"\n")
        if found >= 0:
            return int(at + found + 1)
        at += len(piece)
    return end


def _lines(file: Any, begin: int, end: int) -> Iterator[Line]:
    file.seek(begin)
    at = begin
    for text in file.read(end - begin).splitlines(keepends=True):
        yield Line(at, text)
        at += len(text)


def _group(file: Any, at: int, end: int, at_least: int) -> list[Line]:
    """Whole lines from the beginning of one on."""
    file.seek(at)
    found = []
    read = 0
    while at + read < end and read < max(1, at_least):
        text = file.readline()
        found.append(Line(at + read, text))
        read += len(text)
    return found
