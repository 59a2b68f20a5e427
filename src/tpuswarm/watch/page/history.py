"""Summarise a run's past for a page, however long the run: curves, shares of members, events."""

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from tpuswarm.swarm.views.events import sentence
from tpuswarm.train.run.directory import EVENTS, METRICS
from tpuswarm.watch.page.json_lines import JsonLines, Line, Row

MAX_POINTS = 500
"""Initial points of a curve, which grows to twice as many."""
MAX_COLUMNS = 200
"""Versions with shares, evenly spaced; up to twice as many."""
GROUP_BYTES = 1 << 13
"""Rows that one point of a long run averages."""
COMMIT_SEARCH_BYTES = 1 << 11
"""Range of events that is searched for a commit."""
MAX_EVENT_CHARS = 240
MIN_EVENTS = 100
"""Other than commits, read at first."""
MAX_EVENTS = 300
"""Kept in all; the page requests older ones."""
MAX_NEW_EVENTS = 60
"""In one update; with more the page gets the whole view."""
NOT_COUNTED = -1
"""Share of a member whose contribution was not counted."""


class Point(NamedTuple):
    """A point of a curve."""

    tokens: float
    mean: float
    low: float
    high: float


class Column(NamedTuple):
    """A version, with the share of each member in thousandths, in the order of the names."""

    version: int
    tokens: int
    time: float
    shares: list[int | None]


class EventText(NamedTuple):
    """An event as a sentence."""

    at: int
    """Offset in the file."""
    time: float
    kind: str
    text: str


class Updates(NamedTuple):
    """Changes since the last read."""

    losses: list[Point]
    speeds: list[Point]
    evaluations: list[list[float]]
    """Tokens and loss."""
    columns: list[Column]
    events: list[EventText]

    def __bool__(self) -> bool:
        return any(self)


class History:
    """The history of one run; later reads are incremental."""

    def __init__(self, folder: Path, swarm: bool):
        """swarm: rows have a version, and tokens of their member."""
        self._swarm = swarm
        self._metrics, self._events = JsonLines(folder / METRICS), JsonLines(folder / EVENTS)
        self.names: list[str] = []
        """Members, in the order of the columns."""
        self._indices: dict[str, int] = {}
        self._versions: list[int] = []
        self._tokens: list[float] = []
        """Counted at the known commits."""
        self._last_column: Column | None = None
        self.losses: list[Point] = []
        self.speeds: list[Point] = []
        self.evaluations: list[list[float]] = []
        self.columns: list[Column] = []
        self.events: list[EventText] = []
        self._read_all()

    def _read_all(self) -> None:
        if self._swarm:
            samples = self._events.sample(MAX_COLUMNS, COMMIT_SEARCH_BYTES)
            commits = ([row for row in _rows(lines) if _is_commit(row)] for lines in samples)
            self._add_columns([rows[0] for rows in commits if rows])
        else:
            self._events.read_new()
        lines, at = self._events.read_before(None)
        while (
            sum(b'"commit"' not in line.text[:80] for line in lines) < MIN_EVENTS and at > 0 and len(lines) < MAX_EVENTS
        ):
            more, at = self._events.read_before(at)
            lines = more + lines
        self.events = [text for line in lines if (text := _event_text(line))][-MAX_EVENTS:]
        if self._swarm:
            self._add_columns([row for row in _rows(lines[-MIN_EVENTS:]) if _is_commit(row)][-1:])
            self._thin()
        groups = list(self._metrics.sample(MAX_POINTS, GROUP_BYTES))
        if groups and len(groups[0]) == 1:  # a short run: all rows were read
            size = max(1, len(groups) // MAX_POINTS)
            groups = [[*chain(*groups[at : at + size])] for at in range(0, len(groups), size)]
        for group in groups:
            self._add_rows(_rows(group))
        if rows := _rows(self._metrics.search(b'"eval_loss"')):
            self.evaluations = _evaluations(rows[:: max(1, len(rows) // MAX_POINTS)])

    def read_new(self) -> Updates | None:
        """Return the changes since the last read; None if the files were replaced, or for too many events."""
        event_lines, rows = self._events.read_new(), self._metrics.read_new()
        if event_lines is None or rows is None:
            return None
        losses, speeds, evaluations = len(self.losses), len(self.speeds), len(self.evaluations)
        columns = self._add_columns([row for row in _rows(event_lines) if _is_commit(row)])
        events = [text for line in event_lines if (text := _event_text(line))]
        if len(events) > MAX_NEW_EVENTS:
            return None
        self.events = (self.events + events)[-MAX_EVENTS:]
        self._add_rows(_rows(rows))
        updates = Updates(self.losses[losses:], self.speeds[speeds:], self.evaluations[evaluations:], columns, events)
        self._thin()
        return updates

    def _thin(self) -> None:
        for curve in (self.losses, self.speeds):
            while len(curve) > 2 * MAX_POINTS:
                curve[:] = _halve_curve(curve)
        if len(self.columns) > 2 * MAX_COLUMNS:
            self.columns = _thin_columns(self.columns)

    def read_older(self, at: int) -> tuple[list[EventText], int]:
        """Return events before an offset of their file, and the offset of the first; 0: there are no older ones."""
        lines, begin = self._events.read_before(at)
        return [text for line in lines if (text := _event_text(line))], begin

    def _add_columns(self, commits: Iterable[Row]) -> list[Column]:
        columns = []
        for row in commits:
            try:
                column = self._column(row)
            except (KeyError, TypeError):
                continue  # a damaged line
            if self._versions and column.version <= self._versions[-1]:
                continue
            self._versions.append(column.version)
            self._tokens.append(column.tokens)
            before, self._last_column = self._last_column, column
            if before is not None and column.time > before.time:
                speed = (column.tokens - before.tokens) / (column.time - before.time)
                self.speeds.append(Point(column.tokens, speed, speed, speed))
            columns.append(column)
        self.columns += columns
        return columns

    def _column(self, row: Row) -> Column:
        shares: list[int | None] = [None] * len(self.names)
        for part in (*row["contributors"], *row["others"]):
            index = self._indices.setdefault(part["member"], len(self.names))
            if index == len(self.names):
                self.names.append(part["member"])
            shares += [None] * (index + 1 - len(shares))
            if part["fate"] == "applied":
                shares[index] = max(shares[index] or 0, 0) + round(1000 * part["weight"])
            elif shares[index] is None:
                shares[index] = NOT_COUNTED
        return Column(row["version"], row["tokens"], row["time"], shares)

    def _add_rows(self, rows: Sequence[Row]) -> None:
        """Add rows as one point of each curve."""
        trained = [row for row in rows if _is_number(row.get("loss"))]
        self.evaluations += _evaluations(rows)
        if not trained:
            return
        losses = [row["loss"] for row in trained]
        tokens = fmean(self._counted(row) for row in trained)
        if self.losses:
            tokens = max(tokens, self.losses[-1].tokens)
        self.losses.append(Point(tokens, fmean(losses), min(losses), max(losses)))
        if not self._swarm:
            speeds = [row["tokens_per_s"] for row in trained if _is_number(row.get("tokens_per_s"))]
            if speeds:
                self.speeds.append(Point(tokens, fmean(speeds), min(speeds), max(speeds)))

    def _counted(self, row: Row) -> float:
        """Return the tokens of the whole run at a row; in a swarm by its member's version."""
        if not self._swarm:
            return float(row.get("tokens") or 0)
        version = row.get("version") or 0
        at = bisect_left(self._versions, version)
        if at == len(self._versions):
            return self._tokens[-1] if self._tokens else 0.0
        if self._versions[at] == version or at == 0:
            return self._tokens[at] if self._versions[at] == version else 0.0
        low, high = self._versions[at - 1], self._versions[at]
        part = (version - low) / (high - low)
        return self._tokens[at - 1] + part * (self._tokens[at] - self._tokens[at - 1])


def _rows(lines: Iterable[Line]) -> list[Row]:
    return [row for line in lines if (row := line.row)]


def _evaluations(rows: Iterable[Row]) -> list[list[float]]:
    return [
        [row["tokens"], row["eval_loss"]]
        for row in rows
        if _is_number(row.get("eval_loss")) and _is_number(row.get("tokens"))
    ]


def _is_commit(row: Row) -> bool:
    return row.get("event") == "commit"


def _event_text(line: Line) -> EventText | None:
    row = line.row
    if not isinstance(row.get("event"), str) or not _is_number(row.get("time")):
        return None
    text = sentence(row)
    return EventText(
        line.at, row["time"], row["event"], text if len(text) <= MAX_EVENT_CHARS else f"{text[:MAX_EVENT_CHARS]}…"
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _thin_columns(columns: Sequence[Column]) -> list[Column]:
    """Select MAX_COLUMNS evenly spaced columns, the last one among them."""
    versions = [column.version for column in columns]
    step = (versions[-1] - versions[0]) / (MAX_COLUMNS - 1)
    indices = (bisect_left(versions, versions[0] + number * step - 1e-6) for number in range(MAX_COLUMNS))
    return [columns[at] for at in dict.fromkeys(indices)]


def _halve_curve(curve: Sequence[Point]) -> list[Point]:
    """Merge pairs of points."""
    return [
        Point(fmean(tokens), fmean(mean), min(low), max(high))
        for tokens, mean, low, high in (zip(*curve[at : at + 2], strict=True) for at in range(0, len(curve), 2))
    ]
