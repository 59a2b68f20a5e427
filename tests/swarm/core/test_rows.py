"""Sets of rows against Python's own sets."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpuswarm.swarm.core.rows import Rows

numbers = st.sets(st.integers(0, 30)) | st.sets(st.integers(0, 99), min_size=40)  # few ranges and many


def rows(these: set[int]) -> Rows:
    return Rows.from_ranges(*((n, n + 1) for n in these))


def members(of: Rows) -> set[int]:
    assert Rows(of.ranges) == of  # raises unless they are sorted and separate
    return {n for start, stop in of.ranges for n in range(start, stop)}


@given(numbers, numbers, st.integers(0, 40))
def test_sets_of_rows_behave_as_sets(a: set[int], b: set[int], count: int):
    assert members(rows(a)) == a and len(rows(a)) == len(a) and bool(rows(a)) == bool(a)
    assert rows(a) | rows(b) == rows(a | b) == Rows.union([rows(a), rows(b)])
    assert rows(a) - rows(b) == rows(a - b)
    assert rows(a) & rows(b) == rows(a & b)
    assert members(rows(a).first(count)) == set(sorted(a)[:count])
    assert members(rows(a).free(count)) == set([n for n in range(200) if n not in a][:count])


@pytest.mark.parametrize("ranges", [((3, 3),), ((5, 2),), ((0, 2), (2, 4)), ((4, 6), (0, 1)), ((-1, 2),)])
def test_other_ranges_are_refused(ranges):
    with pytest.raises(ValueError, match="not sorted, separate ranges"):
        Rows(ranges)
