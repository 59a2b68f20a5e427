"""When a round ends."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpuswarm.swarm.core.rounds import Patience, due, quorum

LIVE = frozenset("abcd")
PATIENCE = Patience()


def test_quorum_is_half_of_the_live_members_and_at_least_the_minimum():
    assert [quorum(live, 1) for live in range(6)] == [1, 1, 1, 2, 2, 3]
    assert quorum(2, 3) == 3


@pytest.mark.parametrize(
    ("accepted", "live", "cycle", "now", "patience", "look_at"),
    [
        pytest.param({}, LIVE, 10.0, 0.0, PATIENCE, math.inf, id="nothing was pushed"),
        pytest.param(dict.fromkeys("abcd", 5.0), LIVE, 10.0, 5.0, PATIENCE, None, id="all have pushed"),
        pytest.param({"a": 1.0}, frozenset("a"), 10.0, 1.0, PATIENCE, None, id="the only member has pushed"),
        pytest.param({"a": 0.0, "b": 4.0}, LIVE, 10.0, 8.9, PATIENCE, 9.0, id="grace is half a cycle from the quorum"),
        pytest.param({"a": 0.0, "b": 4.0}, LIVE, 10.0, 9.0, PATIENCE, None, id="grace is over"),
        pytest.param({"a": 0.0, "b": 0.0}, LIVE, None, 29.0, PATIENCE, 30.0, id="grace before a cycle is known"),
        pytest.param({"a": 0.0}, LIVE, None, 599.0, PATIENCE, 600.0, id="deadline before a cycle is known"),
        pytest.param({"a": 0.0}, LIVE, None, 600.0, PATIENCE, None, id="that deadline is over"),
        pytest.param({"a": 0.0}, LIVE, 10.0, 30.0, PATIENCE, None, id="the deadline needs no quorum"),
        pytest.param({"a": 0.0}, LIVE, 10.0, 30.0, Patience(quorum_min=2), math.inf, id="but it needs the minimum"),
    ],
)
def test_round_ends_or_says_when_to_look_again(accepted, live, cycle, now, patience, look_at):
    found = due(accepted, live, cycle, now, patience)
    assert found.now if look_at is None else found[:2] == (False, look_at)


@given(
    st.dictionaries(st.sampled_from("abcdef"), st.floats(0, 100), min_size=1), st.floats(0.1, 50), st.floats(0, 1000)
)
def test_round_with_a_push_always_ends(accepted, cycle, now):
    """And the next look is never in the past, which would be a busy loop."""
    now = max([now, *accepted.values()])
    for _ in range(3):
        found = due(accepted, LIVE, cycle, now, PATIENCE)
        if found.now:
            return
        assert found.look_at > now
        now = found.look_at
    raise AssertionError("three looks and the round is not over")
