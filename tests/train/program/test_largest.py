"""The search for the largest micro-batch, against looking at every size."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpuswarm.train.program.largest import MOST, above, largest

MEMORY = 1_000_000


def search(memory_of, start=1, memory=MEMORY):
    """The answer, and the sizes compiled that fit and that did not."""
    fits, refused = [], []

    def used(size):
        found = memory_of(size)
        (fits if found <= memory else refused).append(size)
        return found if found <= memory else None

    return largest(used, start, memory_of(start), memory), fits, refused


@given(slope=st.integers(2, 200_000), fixed=st.integers(0, 700_000), start=st.integers(1, 40))
def test_it_is_the_largest_of_the_sizes_and_the_next_one_was_refused(slope, fixed, start):
    def memory_of(size):
        return fixed + slope * size

    if memory_of(start) > MEMORY:
        return
    (found, refused), _, refusals = search(memory_of, start)
    size = start
    while memory_of(above(size)) <= MEMORY:
        size = above(size)
    assert found == size
    assert refused == above(found) and refused in refusals


def test_a_line_takes_two_small_compilations_one_that_confirms_and_one_that_fails():
    (found, refused), fits, refusals = search(lambda size: 200_000 + 7_000 * size, start=8)
    assert (found, refused) == (112, 120)
    assert fits == [16, 112] and refusals == [120]


@pytest.mark.parametrize(
    "memory_of",
    [
        lambda size: 100_000 + 9_000 * size - 15_000 * (size % 3),  # a compiler that is no line
        lambda size: 700_000 if size < 16 else 300_000 + 20_000 * size,  # small sizes that say nothing of large ones
        lambda size: 100 * size * size,
    ],
)
def test_what_is_no_line_is_found_too(memory_of):
    (found, refused), fits, _ = search(memory_of, start=4)
    assert memory_of(found) <= MEMORY < memory_of(refused) and refused == above(found)
    assert len(fits) <= 6


def test_what_no_memory_limits_ends():
    (found, refused), _, _ = search(lambda size: 10, start=1)
    assert found <= MOST and refused is None


def test_sizes_are_round_numbers():
    assert [above(size) for size in (1, 7, 8, 15, 16, 100, 128)] == [2, 8, 9, 16, 18, 104, 144]
