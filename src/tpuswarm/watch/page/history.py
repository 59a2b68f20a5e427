"""What a run's files say of its past, small enough for a page however long the run: curves, shares, what happened."""

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from tpuswarm.swarm.views.events import sentence
from tpuswarm.train.run.directory import EVENTS, METRICS
from tpuswarm.watch.page.lines import Line, Lines, Row

POINTS = 500
"""Of a curve, at first; the page and this hold up to twice as many."""
COLUMNS = 200
"""Versions whose shares are shown, as far apart as can be; up to twice as many."""
GROUP = 1 << 13
"""Bytes of rows that one point of a long run is the mean of."""
AMONG = 1 << 11
"""Bytes of events among which one is looked for that is a version."""
LETTERS = 240
"""Of what is said of an event."""
HAPPENED, TOLD = 100, 300
"""Events but for versions that are looked for at first, and events in all; more are asked for."""
NEWS = 60
"""Events in one update; of more all is read anew."""
MISSED = -1
"""For a share: what it contributed was not counted."""


class Point(NamedTuple):
    """Of a curve, over the tokens counted."""

    tokens: float
    mean: float
    low: float
    high: float


class Column(NamedTuple):
    """A version: when it was made, and thousandths that each member contributed, by its place among the names."""

    version: int
    tokens: int
    time: float
    shares: list[int | None]


class Told(NamedTuple):
    """An event in words."""

    at: int
    """Its place in the file."""
    time: float
    kind: str
    text: str


class News(NamedTuple):
    """What has come."""

    losses: list[Point]
    speeds: list[Point]
    evaluations: list[list[float]]
    """Tokens, loss."""
    columns: list[Column]
    told: list[Told]

    def __bool__(self) -> bool:
        return any(self)


class History:
    """Of one run; read once, then only what is new."""

    def __init__(self, folder: Path, swarm: bool):
        """swarm: whether rows have a version, and tokens are those of their member."""
        self._swarm = swarm
        self._metrics, self._events = Lines(folder / METRICS), Lines(folder / EVENTS)
        self.names: list[str] = []
        """Members, in the order in which they are met: a column's place."""
        self._place: dict[str, int] = {}
        self._versions: list[int] = []
        self._tokens: list[float] = []
        """Of commits that are known: versions, tokens counted."""
        self._before: Column | None = None
        self.losses: list[Point] = []
        self.speeds: list[Point] = []
        self.evaluations: list[list[float]] = []
        self.columns: list[Column] = []
        self.told: list[Told] = []
        self._begin()

    def _begin(self) -> None:
        if self._swarm:
            found = ([row for row in _rows(lines) if _is_commit(row)] for lines in self._events.spread(COLUMNS, AMONG))
            commits = [rows[0] for rows in found if rows]
            self._add_columns(commits)
        else:
            self._events.new()
        told, at = self._events.before(None)
        while sum(b'"commit"' not in each.text[:80] for each in told) < HAPPENED and at > 0 and len(told) < TOLD:
            more, at = self._events.before(at)
            told = more + told
        self.told = [each for line in told if (each := _told(line))][-TOLD:]
        if self._swarm:
            self._add_columns([row for row in _rows(told[-HAPPENED:]) if _is_commit(row)][-1:])
            self._thin()
        groups = list(self._metrics.spread(POINTS, GROUP))
        if groups and len(groups[0]) == 1:  # of a short run all rows are known
            size = max(1, len(groups) // POINTS)
            groups = [[*chain(*groups[at : at + size])] for at in range(0, len(groups), size)]
        for group in groups:
            self._add_rows(_rows(group))
        if rows := _rows(self._metrics.having(b'"eval_loss"')):
            self.evaluations = _evaluations(rows[:: max(1, len(rows) // POINTS)])

    def news(self) -> News | None:
        """What was written since; None where the files are others now, so that all is to be read anew."""
        events, rows = self._events.new(), self._metrics.new()
        if events is None or rows is None:
            return None
        losses, speeds, evaluations = len(self.losses), len(self.speeds), len(self.evaluations)
        columns = self._add_columns([row for row in _rows(events) if _is_commit(row)])
        told = [each for line in events if (each := _told(line))]
        if len(told) > NEWS:  # nobody has looked for long: a page gets the whole
            return None
        self.told = (self.told + told)[-TOLD:]
        self._add_rows(_rows(rows))
        found = News(self.losses[losses:], self.speeds[speeds:], self.evaluations[evaluations:], columns, told)
        self._thin()
        return found

    def _thin(self) -> None:
        for curve in (self.losses, self.speeds):
            while len(curve) > 2 * POINTS:
                curve[:] = _halved(curve)
        if len(self.columns) > 2 * COLUMNS:
            self.columns = _thinned(self.columns)

    def older(self, at: int) -> tuple[list[Told], int]:
        """Events before a place in their file, and the place where the first of them is; 0: there are no others."""
        lines, begin = self._events.before(at)
        return [each for line in lines if (each := _told(line))], begin

    def _add_columns(self, commits: Iterable[Row]) -> list[Column]:
        found = []
        for row in commits:
            try:
                column = self._column(row)
            except (KeyError, TypeError):
                continue  # a damaged line
            if self._versions and column.version <= self._versions[-1]:
                continue
            self._versions.append(column.version)
            self._tokens.append(column.tokens)
            before, self._before = self._before, column
            if before is not None and column.time > before.time:
                speed = (column.tokens - before.tokens) / (column.time - before.time)
                self.speeds.append(Point(column.tokens, speed, speed, speed))
            found.append(column)
        self.columns += found
        return found

    def _column(self, row: Row) -> Column:
        shares: list[int | None] = [None] * len(self.names)
        for each in (*row["contributors"], *row["others"]):
            place = self._place.setdefault(each["member"], len(self.names))
            if place == len(self.names):
                self.names.append(each["member"])
            shares += [None] * (place + 1 - len(shares))
            if each["fate"] == "applied":
                shares[place] = max(shares[place] or 0, 0) + round(1000 * each["weight"])
            elif shares[place] is None:
                shares[place] = MISSED
        return Column(row["version"], row["tokens"], row["time"], shares)

    def _add_rows(self, rows: Sequence[Row]) -> None:
        """Rows that become one point of each curve."""
        trained = [row for row in rows if _number(row.get("loss"))]
        self.evaluations += _evaluations(rows)
        if not trained:
            return
        losses = [row["loss"] for row in trained]
        tokens = fmean(self._counted(row) for row in trained)
        if self.losses:
            tokens = max(tokens, self.losses[-1].tokens)
        self.losses.append(Point(tokens, fmean(losses), min(losses), max(losses)))
        if not self._swarm:
            speeds = [row["tokens_per_s"] for row in trained if _number(row.get("tokens_per_s"))]
            if speeds:
                self.speeds.append(Point(tokens, fmean(speeds), min(speeds), max(speeds)))

    def _counted(self, row: Row) -> float:
        """Tokens of the run when a row was made: in a swarm those of the version on which its member stood."""
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
        if _number(row.get("eval_loss")) and _number(row.get("tokens"))
    ]


def _is_commit(row: Row) -> bool:
    return row.get("event") == "commit"


def _told(line: Line) -> Told | None:
    row = line.row
    if not isinstance(row.get("event"), str) or not _number(row.get("time")):
        return None
    text = sentence(row)
    return Told(line.at, row["time"], row["event"], text if len(text) <= LETTERS else f"{text[:LETTERS]}…")


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _thinned(columns: Sequence[Column]) -> list[Column]:
    """COLUMNS of them, as far apart as can be, the last one among them."""
    versions = [each.version for each in columns]
    step = (versions[-1] - versions[0]) / (COLUMNS - 1)
    wanted = (bisect_left(versions, versions[0] + number * step - 1e-6) for number in range(COLUMNS))
    return [columns[at] for at in dict.fromkeys(wanted)]


def _halved(curve: Sequence[Point]) -> list[Point]:
    """Pairs become one."""
    return [
        Point(fmean(tokens), fmean(mean), min(low), max(high))
        for tokens, mean, low, high in (zip(*curve[at : at + 2], strict=True) for at in range(0, len(curve), 2))
    ]
