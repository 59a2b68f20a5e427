"""Summarise a run's past for a page, however long the run: curves, shares of members, events."""

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from tpuswarm.swarm.views.events import sentence
from tpuswarm.train.run.directory import EVENTS, METRICS
from tpuswarm.watch.page.json_lines import JsonLines, Line, Row

MAX_POINTS = 500
"""Of a curve, which grows to twice as many and then merges them in pairs."""
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


class Tail(NamedTuple):
    """The end of a curve that changed."""

    start: int
    """Index of its first point."""
    points: list[Point]


class Curve:
    """Points that stand for the same number of values, except the last one, which may stand for fewer."""

    def __init__(self) -> None:
        self.points: list[Point] = []
        self.group_size = 1
        """Values of a point."""
        self._last_size = 0
        """Values of the last point."""
        self._changed_from = 0

    def add(self, tokens: float, value: float) -> None:
        """Add a value to the last point, or as a new one."""
        if self.points and self._last_size < self.group_size:
            last, size = self.points.pop(), self._last_size
            tokens, mean = ((size * old + new) / (size + 1) for old, new in ((last.tokens, tokens), (last.mean, value)))
            point = Point(tokens, mean, min(last.low, value), max(last.high, value))
            self._last_size += 1
        else:
            point = Point(tokens, value, value, value)
            self._last_size = 1
        self._append(point)

    def add_point(self, point: Point) -> None:
        """Add a point that stands for `group_size` values."""
        self._last_size = self.group_size
        self._append(point)

    def _append(self, point: Point) -> None:
        self._changed_from = min(self._changed_from, len(self.points))
        self.points.append(point)
        if len(self.points) > 2 * MAX_POINTS:  # the last point stays alone
            self.points = [*_merge_pairs(self.points[:-1]), point]
            self.group_size *= 2
            self._changed_from = 0

    def take_changes(self) -> Tail | None:
        """Return what changed since the last call."""
        start, self._changed_from = self._changed_from, len(self.points)
        return Tail(start, self.points[start:]) if start < len(self.points) else None


@dataclass
class Adoption:
    """The version on which a member trains."""

    version: int
    tokens: float
    """Of the member, when it adopted the version."""
    counted: float
    """Of the whole run, then."""
    last_counted: float
    """Of the whole run, at the member's last row."""


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

    losses: Tail | None
    speeds: Tail | None
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
        self._adoptions: dict[str, Adoption] = {}
        """By member."""
        self._losses, self._speeds = Curve(), Curve()
        self.evaluations: list[list[float]] = []
        self.columns: list[Column] = []
        self.events: list[EventText] = []
        self._read_all()

    @property
    def losses(self) -> list[Point]:
        return self._losses.points

    @property
    def speeds(self) -> list[Point]:
        return self._speeds.points

    def _read_all(self) -> None:
        if self._swarm:
            samples = self._events.sample(MAX_COLUMNS, COMMIT_SEARCH_BYTES)
            commits = ([row for row in _rows(lines) if _is_commit(row)] for lines in samples)
            self._add_columns([rows[0] for rows in commits if rows])
            if len(self._versions) > 1:
                self._speeds.group_size *= (self._versions[-1] - self._versions[0]) // (len(self._versions) - 1)
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
        if all(len(group) == 1 for group in groups):  # a short run: all rows were read
            self._add_rows(_rows(chain(*groups)))
        else:
            lines = [line for group in groups for line in group]
            line_bytes = fmean(len(line.text) for line in lines)
            group_bytes = (lines[-1].at - lines[0].at) / max(1, len(groups) - 1)
            self._losses.group_size = max(1, round(group_bytes / line_bytes))
            if not self._swarm:
                self._speeds.group_size = self._losses.group_size
            for group in groups:
                self._add_sample(_rows(group))
        self._losses.take_changes()
        self._speeds.take_changes()
        if rows := _rows(self._metrics.search(b'"eval_loss"')):
            self.evaluations = _evaluations(rows[:: max(1, len(rows) // MAX_POINTS)])

    def read_new(self) -> Updates | None:
        """Return the changes since the last read; None if the files were replaced, or for too many events."""
        event_lines, rows = self._events.read_new(), self._metrics.read_new()
        if event_lines is None or rows is None:
            return None
        evaluations = len(self.evaluations)
        columns = self._add_columns([row for row in _rows(event_lines) if _is_commit(row)])
        events = [text for line in event_lines if (text := _event_text(line))]
        if len(events) > MAX_NEW_EVENTS:
            return None
        self.events = (self.events + events)[-MAX_EVENTS:]
        self._add_rows(_rows(rows))
        curves = self._losses.take_changes(), self._speeds.take_changes()
        updates = Updates(*curves, self.evaluations[evaluations:], columns, events)
        self._thin()
        return updates

    def _thin(self) -> None:
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
                self._speeds.add(column.tokens, speed)
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
        """Add each row to the curves."""
        self.evaluations += _evaluations(rows)
        for row in rows:
            if not _is_number(row.get("loss")):
                continue
            tokens = self._counted(row)
            if self.losses and self._swarm:
                tokens = max(tokens, self.losses[-1].tokens)
            self._losses.add(tokens, row["loss"])
            if not self._swarm and _is_number(row.get("tokens_per_s")):
                self._speeds.add(tokens, row["tokens_per_s"])

    def _add_sample(self, rows: Sequence[Row]) -> None:
        """Add rows of one place of a long run as one point of each curve."""
        self.evaluations += _evaluations(rows)
        trained = [row for row in rows if _is_number(row.get("loss"))]
        if not trained:
            return
        tokens = fmean([self._counted(row) for row in trained])
        if self.losses:
            tokens = max(tokens, self.losses[-1].tokens)
        self._losses.add_point(_point(tokens, [row["loss"] for row in trained]))
        speeds = [row["tokens_per_s"] for row in trained if _is_number(row.get("tokens_per_s"))]
        if speeds and not self._swarm:
            self._speeds.add_point(_point(tokens, speeds))

    def _counted(self, row: Row) -> float:
        """Return the tokens of the whole run at a row.

        In a swarm all members are assumed to train alike since the row's version. A member that trains on while its
        push is in flight keeps its lead over the version, up to what it trained on the version before.
        """
        if not self._swarm:
            return float(row.get("tokens") or 0)
        member, version, tokens = row.get("member") or "", row.get("version") or 0, row.get("tokens") or 0
        active = sum(other.version >= version - 1 for name, other in self._adoptions.items() if name != member) + 1
        adoption = self._adoptions.get(member)
        if adoption is None or adoption.version != version:
            before, counted = tokens - tokens / max(1, row.get("step") or 1), self._counted_at(version)
            if adoption is not None:
                lead = min(adoption.last_counted - counted, active * (before - adoption.tokens))
                counted += max(0.0, lead)
            adoption = self._adoptions[member] = Adoption(version, before, counted, counted)
        adoption.last_counted = adoption.counted + active * (tokens - adoption.tokens)
        return adoption.last_counted

    def _counted_at(self, version: int) -> float:
        """Return the tokens of the whole run at a version."""
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


def _merge_pairs(points: Sequence[Point]) -> list[Point]:
    return [
        Point(
            (one.tokens + other.tokens) / 2,
            (one.mean + other.mean) / 2,
            min(one.low, other.low),
            max(one.high, other.high),
        )
        for one, other in zip(points[::2], points[1::2], strict=True)
    ]


def _point(tokens: float, values: Sequence[float]) -> Point:
    return Point(tokens, fmean(values), min(values), max(values))
