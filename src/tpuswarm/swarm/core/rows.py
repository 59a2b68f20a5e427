"""Sets of row numbers as ranges: leases, contributions, and the rows that the ledger has counted."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter

Ranges = tuple[tuple[int, int], ...]
_START, _STOP = itemgetter(0), itemgetter(1)


@dataclass(frozen=True)
class Rows:
    """An immutable set of row numbers, kept as sorted half-open ranges that neither touch nor overlap.

    A coordinator of 1,000 members combines sets of 1,000 ranges with sets of a few at every message: such pairs cost
    one bisection for each range of the small set.
    """

    ranges: Ranges = ()

    def __post_init__(self) -> None:
        last = -1
        for start, stop in self.ranges:
            if not last < start < stop:
                raise ValueError(f"not sorted, separate ranges of rows: {self.ranges}")
            last = stop

    @staticmethod
    def from_ranges(*ranges: tuple[int, int]) -> "Rows":
        """The union of ranges in any order; empty ones are allowed."""
        merged: list[tuple[int, int]] = []
        for start, stop in sorted(pair for pair in ranges if pair[0] < pair[1]):
            if merged and start <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
            else:
                merged.append((start, stop))
        return _made(tuple(merged))

    @staticmethod
    def union(sets: Iterable["Rows"]) -> "Rows":
        return Rows.from_ranges(*(pair for rows in sets for pair in rows.ranges))

    def __or__(self, other: "Rows") -> "Rows":
        few, many = sorted((self.ranges, other.ranges), key=len)
        if not few:
            return _made(many)
        if 8 * len(few) > len(many):
            return Rows.from_ranges(*few, *many)
        merged = list(many)
        for start, stop in few:
            first = bisect_left(merged, start, key=_STOP)  # touching ranges become one
            after = bisect_right(merged, stop, key=_START)
            if first < after:
                start, stop = min(start, merged[first][0]), max(stop, merged[after - 1][1])
            merged[first:after] = [(start, stop)]
        return _made(tuple(merged))

    def __sub__(self, other: "Rows") -> "Rows":
        return _made(tuple(_without(self.ranges, other.ranges)))

    def __and__(self, other: "Rows") -> "Rows":
        return self - (self - other) if self.ranges and other.ranges else NO_ROWS

    def __bool__(self) -> bool:
        return bool(self.ranges)

    def __len__(self) -> int:
        return self._count

    @cached_property
    def _count(self) -> int:
        return sum(stop - start for start, stop in self.ranges)

    def __str__(self) -> str:
        return ", ".join(f"{start} to {stop}" for start, stop in self.ranges) or "none"

    def first(self, count: int) -> "Rows":
        """Return the lowest `count` rows, or all if there are fewer."""
        return _made(_lowest(self.ranges, count))

    def free(self, count: int) -> "Rows":
        """Return the lowest `count` row numbers that are not in this set."""
        stops = (0, *map(_STOP, self.ranges))
        starts = (*map(_START, self.ranges), stops[-1] + count)
        gaps = zip(stops, starts, strict=True)
        return _made(_lowest((gap for gap in gaps if gap[0] < gap[1]), count))


def _made(ranges: Ranges) -> Rows:
    """Wrap ranges that are known to be sorted and separate, without checking."""
    rows = object.__new__(Rows)
    object.__setattr__(rows, "ranges", ranges)
    return rows


NO_ROWS = Rows()


def _lowest(ranges: Iterable[tuple[int, int]], count: int) -> Ranges:
    taken = []
    for start, stop in ranges:
        if count <= 0:
            break
        taken.append((start, min(stop, start + count)))
        count -= stop - start
    return tuple(taken)


def _without(ranges: Ranges, taken: Ranges) -> Iterator[tuple[int, int]]:
    for start, stop in ranges:
        at = bisect_right(taken, start, key=_STOP)
        while at < len(taken) and taken[at][0] < stop:
            if start < taken[at][0]:
                yield start, taken[at][0]
            start = taken[at][1]
            at += 1
        if start < stop:
            yield start, stop
