"""After a restart of the coordinator: whom a round waits for."""

from dataclasses import replace

import pytest

from tests.swarm.core.test_summary import TERMS, A, B, Desk
from tests.swarm.exact import genesis
from tpuswarm.swarm.core import state as coordinator
from tpuswarm.swarm.core.arithmetic.outer import Outer
from tpuswarm.swarm.core.messages import Beat, Refused, StoreHeader
from tpuswarm.swarm.core.rows import NOTHING
from tpuswarm.swarm.core.state import Lease
from tpuswarm.swarm.core.values import Header, Identity
from tpuswarm.swarm.core.view import View

JOINED = replace(TERMS, members=(), outer=Outer("nesterov"))
"""A run whose members all joined it."""


def restarted():
    """Both contributed to the commit before it; of A another contribution is stored."""
    desk = Desk(coordinator.start(JOINED, View.of(genesis(JOINED)), [], 0.0, founded=True))
    rows = {who: desk.beat(who, NOTHING, 0, 0.0) for who in (A, B)}
    for who in (A, B):
        desk.push(who, rows[who].first(4))
    desk.commit(1.0)
    stored = desk.push(A, (rows[A] - rows[A].first(4)).first(4), sequence=2)
    return Desk(coordinator.start(JOINED, desk.state.view, [stored], 100.0, founded=False)), rows


def test_one_stored_contribution_is_no_whole_quorum_of_a_new_epoch():
    desk, rows = restarted()
    _, merge, _ = coordinator.tick(desk.state, 101.0)
    assert merge is None and desk.state.live == {"a", "b"}
    desk.beat(B, NOTHING, 80, 102.0, base=1)
    desk.push(B, (rows[B] - rows[B].first(4)).first(4), now=103.0, sequence=2)
    _, merge, _ = coordinator.tick(desk.state, 104.0)
    assert merge is not None and (merge.share, len(merge.decisions)) == (1.0, 2)


def test_who_does_not_come_back_is_awaited_for_one_lease_time():
    desk, _ = restarted()
    desk.state, merge, _ = coordinator.tick(desk.state, 100 + JOINED.lease_seconds - 1)
    assert merge is None
    desk.state, merge, _ = coordinator.tick(desk.state, 100 + JOINED.lease_seconds)
    assert merge is not None and len(merge.decisions) == 1


@pytest.mark.parametrize("decided", [0, 2])
def test_a_push_before_its_turn_is_refused(decided):
    """Its verdict would stand for the one left out, too: accepted later, that one would never be counted."""
    desk = Desk(coordinator.start(JOINED, View.of(genesis(JOINED)), [], 0.0, founded=True))
    for sequence in range(1, decided + 1):
        rows = desk.beat(A, NOTHING, 0, float(sequence), base=desk.state.view.version)
        desk.push(A, rows.first(4), sequence=sequence)
        desk.commit(float(sequence))
    rows = desk.beat(A, NOTHING, 0, 3.0, base=desk.state.view.version)
    next_one = Identity(A, decided + 1)
    header = Header(next_one, "run", decided, rows.first(4), 40, 1, "plain", 1.0, True, ("d",))
    for sequence in (decided + 2, decided + 9):
        state, answer = coordinator.push(desk.state, replace(header, identity=Identity(A, sequence)))
        assert state == desk.state
        assert answer == Refused(f"its push {sequence} is not the next: that is push {decided + 1}")
    assert coordinator.push(desk.state, header)[1] == StoreHeader(header)


def test_the_more_members_the_less_each_says():
    desk = Desk(coordinator.start(JOINED, View.of(genesis(JOINED)), [], 0.0, founded=True))
    most = JOINED.lease_seconds / 2  # a new coordinator listens for one lease time: to each of them twice
    for members, pause in ((1, 1 / 400), (400, 1.0), (4000, 10.0), (20_000, most)):
        leases = {
            replace(A, name=f"{number:032x}"): Lease(NOTHING, 20.0, 0, None, NOTHING) for number in range(members)
        }
        state = replace(desk.state, leases=leases)
        said = Beat(next(iter(leases)), JOINED.digests, True, 0, NOTHING, NOTHING, None, None, 0)
        state, answer = coordinator.beat(state, said, 1.0)
        assert answer.pause == pytest.approx(pause)
        assert state.leases[said.incarnation].until == 1.0 + max(JOINED.lease_seconds, 3 * answer.pause)
