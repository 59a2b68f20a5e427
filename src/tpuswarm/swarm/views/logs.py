"""What a run and its processes said, in the order of time: events in words, and the lines of its logs."""

import time
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import NamedTuple

from tpuswarm.config.nearest import did_you_mean
from tpuswarm.errors import InputError
from tpuswarm.swarm.views.events import sentence
from tpuswarm.train.process.stamped import STAMP
from tpuswarm.train.run.directory import EVENTS, read_rows, reading
from tpuswarm.train.run.schema import parse_row

RUN = "run"
"""The source of events."""
SLACK = timedelta(seconds=1)
"""A file's clock is coarser than the one that is written into it."""


class Line(NamedTuple):
    """One thing that was said."""

    time: float
    """Seconds since 1970."""
    source: str
    """`run`, or the name of a process."""
    text: str

    @property
    def day(self) -> str:
        """Its date."""
        return time.strftime("%Y-%m-%d", time.localtime(self.time))

    @property
    def within_a_day(self) -> str:
        """The line under its date."""
        return f"{time.strftime('%H:%M:%S', time.localtime(self.time))}  {self.source:<13} {self.text}"

    def __str__(self) -> str:
        return f"{self.day} {self.within_a_day}"


class Logs:
    """The files of a run, each read once."""

    def __init__(self, folder: Path, name: str | None = None):
        """name: one process, with the events that are about it. Raises InputError where there is none of that name."""
        self._folder, self._name = folder, name
        self._read: dict[Path, int] = {}
        here = {path.stem for path in self._files()}
        told = {str(each.get("member") or each.get("name") or "") for each in read_rows(folder / EVENTS)} - {""}
        names = sorted(here | told)
        if name is not None and name not in names:
            known = did_you_mean(name, names) if names else "none of its processes has said anything"
            raise InputError(f"{folder} has no process {name!r}; {known}")
        self.elsewhere = name in told - here
        """Whether that process is on a machine that joined, where its own words lie."""

    def new(self) -> list[Line]:
        """What was said since the last call, whole lines only."""
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
                found.append(Line(event["time"], RUN, sentence(event)))
        return found

    def _lines(self, path: Path) -> list[bytes]:
        if not path.exists():
            return []
        with reading(path), path.open("rb") as file:
            file.seek(self._read.get(path, 0))
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._read[path] = self._read.get(path, 0) + len(whole)
        return whole.splitlines(keepends=True)


def dated(lines: Sequence[str], source: str, ended: float) -> list[Line]:
    """Lines of a process with their times. Those that begin with HH:MM:SS.mmm have no date: it follows from the end.

    Lines without a time, like those of a traceback, have the time of the one before; ended: when the last was written.
    """
    found: list[Line] = []
    at = datetime.fromtimestamp(ended)
    undated: list[str] = []
    for line in reversed(lines):
        stamp = STAMP.match(line)
        if stamp is None:
            undated.append(line)
            continue
        hour, minute, second, milli = (int(part or 0) for part in stamp.groups())
        said = at.replace(hour=hour, minute=minute, second=second, microsecond=1000 * milli)
        at = said if said <= at + SLACK else said - timedelta(days=1)
        found += [Line(at.timestamp(), source, each) for each in undated]
        found.append(Line(at.timestamp(), source, line[stamp.end() :]))
        undated = []
    found += [Line(at.timestamp(), source, each) for each in undated]
    return found[::-1]
