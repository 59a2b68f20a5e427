"""Merge a run's events and the lines of its logs in the order of time."""

import time
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import NamedTuple

from tpuswarm.config.nearest import did_you_mean
from tpuswarm.errors import InputError
from tpuswarm.swarm.views.events import sentence
from tpuswarm.train.process.timestamps import TIMESTAMP
from tpuswarm.train.run.directory import EVENTS, read_rows, reading
from tpuswarm.train.run.schema import parse_row

RUN = "run"
"""The source of events."""
CLOCK_SLACK = timedelta(seconds=1)
"""A file's time is coarser than the times written into it."""


class Line(NamedTuple):
    """One line of a log, or one event."""

    time: float
    """Seconds since 1970."""
    source: str
    """`run`, or the name of a process."""
    text: str

    @property
    def day(self) -> str:
        return time.strftime("%Y-%m-%d", time.localtime(self.time))

    @property
    def within_a_day(self) -> str:
        """The line without its date."""
        return f"{time.strftime('%H:%M:%S', time.localtime(self.time))}  {self.source:<13} {self.text}"

    def __str__(self) -> str:
        return f"{self.day} {self.within_a_day}"


class Logs:
    """The files of a run, read incrementally."""

    def __init__(self, folder: Path, name: str | None = None):
        """name: a process, to read only its log and the events about it. Raise InputError if it does not exist."""
        self._folder, self._name = folder, name
        self._offsets: dict[Path, int] = {}
        local = {path.stem for path in self._files()}
        mentioned = {str(row.get("member") or row.get("name") or "") for row in read_rows(folder / EVENTS)} - {""}
        names = sorted(local | mentioned)
        if name is not None and name not in names:
            known = did_you_mean(name, names) if names else "none of its processes has logged anything"
            raise InputError(f"{folder} has no process {name!r}; {known}")
        self.elsewhere = name in mentioned - local
        """Whether that process is on a joined machine, which has its log."""

    def new(self) -> list[Line]:
        """Return whole lines that were added since the last call."""
        found = self._events()
        for path in self._files():
            if self._name in (None, path.stem):
                lines = b"".join(self._lines(path)).decode(errors="replace").splitlines()
                found += dated(lines, path.stem, path.stat().st_mtime)
        return sorted(found, key=lambda line: line.time)  # stable: lines of one file stay in order

    def _files(self) -> list[Path]:
        return sorted([*self._folder.glob("*.log"), *self._folder.glob("logs/*.log")])

    def _events(self) -> list[Line]:
        found = []
        for line in self._lines(self._folder / EVENTS):
            event = parse_row(EVENTS, line)
            if event and self._name in (None, event.get("member"), event.get("name")):
                lines = [sentence(event), *(f"  {row}" for row in event.get("table", ()))]
                found += [Line(event["time"], RUN, line) for line in lines]
        return found

    def _lines(self, path: Path) -> list[bytes]:
        if not path.exists():
            return []
        if not path.resolve().is_relative_to(self._folder.resolve()):
            raise InputError(f"{path} is a link to a file outside the run, which is not shown; remove the link")
        with reading(path), path.open("rb") as file:
            file.seek(self._offsets.get(path, 0))
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offsets[path] = self._offsets.get(path, 0) + len(whole)
        return whole.splitlines(keepends=True)


def dated(lines: Sequence[str], source: str, ended: float) -> list[Line]:
    """Date the lines of a process. Times such as HH:MM:SS.mmm lack a date; derive it from the end.

    Lines without a time, as in a traceback, get that of the line before; ended: when the last line was written.
    """
    found: list[Line] = []
    at = datetime.fromtimestamp(ended)
    undated: list[str] = []
    for line in reversed(lines):
        stamp = TIMESTAMP.match(line)
        if stamp is None:
            undated.append(line)
            continue
        hour, minute, second, milli = (int(part or 0) for part in stamp.groups())
        written = at.replace(hour=hour, minute=minute, second=second, microsecond=1000 * milli)
        at = written if written <= at + CLOCK_SLACK else written - timedelta(days=1)
        found += [Line(at.timestamp(), source, text) for text in undated]
        found.append(Line(at.timestamp(), source, line[stamp.end() :]))
        undated = []
    found += [Line(at.timestamp(), source, text) for text in undated]
    return found[::-1]
