"""When a round is over."""

import math

from hypothesis import given
from hypothesis import strategies as st

from tpuswarm.swarm.core.rounds import Patience, due, quorum

LIVE = frozenset("abcd")
PATIENCE = Patience()


def test_nothing_accepted_waits_for_ever():
    assert due({}, LIVE, 10.0, 0.0, PATIENCE) == (False, math.inf, "waiting for pushes")


def test_a_quorum_is_half_of_the_living_and_at_least_the_least():
    assert [quorum(live, 1) for live in range(6)] == [1, 1, 1, 2, 2, 3]
    assert quorum(2, 3) == 3


def test_all_in_ends_the_grace():
    assert due(dict.fromkeys("abcd", 5.0), LIVE, 10.0, 5.0, PATIENCE).now
    assert due({"a": 1.0}, frozenset("a"), 10.0, 1.0, PATIENCE).now


def test_grace_is_half_a_cycle_after_the_quorum():
    accepted = {"a": 0.0, "b": 4.0}
    assert due(accepted, LIVE, 10.0, 8.9, PATIENCE)[:2] == (False, 9.0)
    assert due(accepted, LIVE, 10.0, 9.0, PATIENCE).now


def test_grace_and_deadline_until_a_cycle_is_known():
    assert due({"a": 0.0, "b": 0.0}, LIVE, None, 29.0, PATIENCE)[:2] == (False, 30.0)
    assert due({"a": 0.0}, LIVE, None, 599.0, PATIENCE)[:2] == (False, 600.0)
    assert due({"a": 0.0}, LIVE, None, 600.0, PATIENCE).now


def test_the_deadline_chooses_what_is_there_and_never_less_than_the_least():
    assert due({"a": 0.0}, LIVE, 10.0, 30.0, PATIENCE).now
    assert due({"a": 0.0}, LIVE, 10.0, 30.0, Patience(quorum_min=2))[:2] == (False, math.inf)


@given(
    st.dictionaries(st.sampled_from("abcdef"), st.floats(0, 100), min_size=1), st.floats(0.1, 50), st.floats(0, 1000)
)
def test_looking_again_when_told_to_always_ends(accepted, cycle, now):
    """No round with something accepted waits for ever, and no look is in the past (which would be a busy loop)."""
    now = max([now, *accepted.values()])
    for _ in range(3):
        found = due(accepted, LIVE, cycle, now, PATIENCE)
        if found.now:
            return
        assert found.look_at > now
        now = found.look_at
    raise AssertionError("three looks and the round is not over")
