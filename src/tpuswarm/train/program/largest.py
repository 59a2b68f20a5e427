"""The largest micro-batch that fits, by few compilations: a pure search over what a compiler answers."""

import math
from collections.abc import Callable, Iterator
from itertools import takewhile

BITS = 4
"""Sizes tried have this many significant bits: 1 to 16 one by one, then in steps of an eighth to a sixteenth."""
GROWTH = 64
"""A line through two points is not followed further than this many times the larger one."""
MOST = 2**20
"""Rows a device; larger ones are not looked for."""


def above(rows: int) -> int:
    """The next larger size that is tried."""
    step = 1 << max(0, rows.bit_length() - BITS)
    return (rows // step + 1) * step


def largest(used: Callable[[int], int | None], start: int, start_used: int, memory: int) -> tuple[int, int | None]:
    """The largest size that fits, and the next one above, which does not; None: it was not looked for so far.

    used(size) compiles: bytes, or None where it does not fit; `start` fits and uses `start_used` of `memory`. A size
    that does not fit costs the compiler seconds, one that fits a minute: the search comes from above. Memory is taken
    for a line through the two largest sizes known, and the line only says where to look.
    """
    points = [(start, start_used)]
    high: int | None = None
    size = above(2 * start - 1)
    while size <= MOST:
        found = used(size)
        if found is None:
            high = size
        else:
            points.append((size, found))
        low = points[-1][0]
        if high == above(low):
            return low, high
        size = _next(points, high, memory)
    return points[-1][0], high


def _next(points: list[tuple[int, int]], high: int | None, memory: int) -> int:
    low, used = points[-1]
    predicted = math.inf
    if len(points) > 1:
        before, used_before = points[-2]
        slope = (used - used_before) / (low - before)
        predicted = low + (memory - used) / slope if slope > 0 else math.inf
    if high is None:
        wanted = min(max(predicted, 1.25 * low), GROWTH * low)
        return next(size for size in _sizes_above(low) if size > wanted)
    between = list(takewhile(lambda size: size < high, _sizes_above(low)))
    if between[0] <= predicted < high:
        return max(size for size in between if size <= predicted)
    return between[len(between) * 3 // 4]


def _sizes_above(size: int) -> Iterator[int]:
    while True:
        size = above(size)
        yield size
