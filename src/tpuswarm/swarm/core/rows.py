"""Sets of rows as ranges: leases, contributions and what the ledger has counted."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Rows:
    """An immutable set of row numbers, kept as sorted half-open ranges that neither touch nor overlap."""

    ranges: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        ordered = all(start < stop for start, stop in self.ranges)
        apart = all(before[1] < after[0] for before, after in pairwise(self.ranges))
        if not (ordered and apart and (not self.ranges or self.ranges[0][0] >= 0)):
            raise ValueError(f"not sorted, separate ranges of rows: {self.ranges}")

    @staticmethod
    def of(*ranges: tuple[int, int]) -> "Rows":
        """The union of ranges in any order; empty ones are allowed."""
        merged: list[tuple[int, int]] = []
        for start, stop in sorted(each for each in ranges if each[0] < each[1]):
            if merged and start <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
            else:
                merged.append((start, stop))
        return Rows(tuple(merged))

    @staticmethod
    def union(sets: Iterable["Rows"]) -> "Rows":
        """All rows of all sets."""
        return Rows.of(*(each for rows in sets for each in rows.ranges))

    def __or__(self, other: "Rows") -> "Rows":
        return Rows.of(*self.ranges, *other.ranges)

    def __sub__(self, other: "Rows") -> "Rows":
        return Rows(tuple(_without(self.ranges, other.ranges)))

    def __and__(self, other: "Rows") -> "Rows":
        return self - (self - other)

    def __bool__(self) -> bool:
        return bool(self.ranges)

    def __len__(self) -> int:
        return sum(stop - start for start, stop in self.ranges)

    def __str__(self) -> str:
        return ", ".join(f"{start} to {stop}" for start, stop in self.ranges) or "none"

    def first(self, count: int) -> "Rows":
        """The lowest `count` rows, fewer where there are fewer."""
        taken = []
        for start, stop in self.ranges:
            if count <= 0:
                break
            taken.append((start, min(stop, start + count)))
            count -= stop - start
        return Rows(tuple(taken))

    def free(self, count: int) -> "Rows":
        """The lowest `count` row numbers that are not in this set."""
        end = (self.ranges[-1][1] if self.ranges else 0) + count
        return (Rows.of((0, end)) - self).first(count)


NOTHING = Rows()


def _without(ranges: Iterable[tuple[int, int]], taken: tuple[tuple[int, int], ...]) -> Iterator[tuple[int, int]]:
    place = 0
    for start, stop in ranges:
        while place < len(taken) and taken[place][1] <= start:
            place += 1
        at = place
        while at < len(taken) and taken[at][0] < stop:
            if start < taken[at][0]:
                yield start, taken[at][0]
            start = taken[at][1]
            at += 1
        if start < stop:
            yield start, stop
