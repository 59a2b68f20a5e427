"""The coordinator's state: when a round ends, and the one place of every token, whatever happens."""

import math
import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rpds import HashTrieMap

from tests.swarm.exact import DIGESTS, TERMS, genesis
from tests.swarm.world import World
from tpuswarm.swarm.core import transitions as coordinator
from tpuswarm.swarm.core.arithmetic.outer import OuterRule
from tpuswarm.swarm.core.coordinator_state import held_by_others, with_claims
from tpuswarm.swarm.core.ledger_view import InvalidRecord, LedgerView
from tpuswarm.swarm.core.messages import Granted, Heartbeat, Refused, StoreHeader
from tpuswarm.swarm.core.rounds import RoundTimeouts, quorum, round_status
from tpuswarm.swarm.core.rows import NO_ROWS, Rows
from tpuswarm.swarm.core.summary import Summary, Tokens, summary
from tpuswarm.swarm.core.transitions import MAX_LEASED_CYCLES, PERSON_LEASE_S, Lease
from tpuswarm.swarm.core.values import Header, Identity, Incarnation
from tpuswarm.swarm.engines.inproc import Faults

A, B = Incarnation("a", "1" * 32), Incarnation("b", "2" * 32)
JOINED = replace(TERMS, members=(), outer=OuterRule("nesterov"))
"""A run that starts without members; all join later."""


class Desk:
    def __init__(self, terms=TERMS, state=None):
        self.state = state or coordinator.start_epoch(
            terms, LedgerView.from_records(genesis(terms)), [], 0.0, founded=True
        )

    def beat(self, who, outstanding, processed, now, base=0):
        undecided = next((key for key in self.state.pending if key.incarnation == who), None)
        beat = Heartbeat(who, DIGESTS, processed > 0, base, NO_ROWS, outstanding, undecided, 2.0, processed)
        self.state, answer = coordinator.heartbeat(self.state, beat, now)
        return answer.rows

    def announce(self, beat):
        self.state, answer = coordinator.heartbeat(self.state, beat, 6.0)
        assert isinstance(answer, Granted)

    def push(self, who, rows, finite=True, now=1.0, sequence=1):
        identity, base = Identity(who, sequence), self.state.view.version
        header = Header(identity, "run", base, rows, 10 * len(rows), 1, "plain", 1.0, finite, ("d", "d"))
        self.state, _ = coordinator.receive_push(self.state, header)
        self.state = coordinator.header_stored(self.state, header, now)
        return header

    def tick(self, now):
        self.state, merge, _ = coordinator.tick(self.state, now)
        return merge

    def commit(self, now):
        merge = self.tick(now)
        changed = any(decision.fate == "applied" for decision in merge.decisions)
        state = ("d", "d") if changed else self.state.view.newest.state
        record = coordinator.make_record(self.state, "parent", state, (), (), now)
        self.state = coordinator.record_committed(self.state, record)

    def tokens(self, now):
        return summary(self.state, now).tokens


def test_restarted_round_waits_for_the_members_of_the_last_commit():
    """For one lease time. A second contribution of A is stored before the restart."""
    desk = Desk(JOINED)
    rows = {who: desk.beat(who, NO_ROWS, 0, 0.0) for who in (A, B)}
    for who in (A, B):
        desk.push(who, rows[who].first(4))
    desk.commit(1.0)
    stored = desk.push(A, (rows[A] - rows[A].first(4)).first(4), sequence=2)
    restarted = coordinator.start_epoch(JOINED, desk.state.view, [stored], 100.0, founded=False)
    desk = Desk(state=restarted)
    assert desk.tick(101.0) is None and desk.state.live == {"a", "b"}
    desk.beat(B, NO_ROWS, 80, 102.0, base=1)
    desk.push(B, (rows[B] - rows[B].first(4)).first(4), now=103.0, sequence=2)
    merge = desk.tick(104.0)
    assert (merge.share, len(merge.decisions)) == (1.0, 2)
    desk = Desk(state=restarted)
    assert desk.tick(100 + JOINED.lease_seconds - 1) is None
    assert len(desk.tick(100 + JOINED.lease_seconds).decisions) == 1


@pytest.mark.parametrize("decided", [0, 2])
def test_push_out_of_order_is_refused(decided):
    """Its verdict would also stand for the skipped push, which would never be counted."""
    desk = Desk(JOINED)
    for sequence in range(1, decided + 1):
        rows = desk.beat(A, NO_ROWS, 0, float(sequence), base=desk.state.view.version)
        desk.push(A, rows.first(4), sequence=sequence)
        desk.commit(float(sequence))
    rows = desk.beat(A, NO_ROWS, 0, 3.0, base=desk.state.view.version)
    following = Identity(A, decided + 1)
    header = Header(following, "run", decided, rows.first(4), 40, 1, "plain", 1.0, True, ("d", "d"))
    for sequence in (decided + 2, decided + 9):
        state, answer = coordinator.receive_push(desk.state, replace(header, identity=Identity(A, sequence)))
        assert state == desk.state
        assert answer == Refused(f"its push {sequence} is not the next: that is push {decided + 1}")
    assert coordinator.receive_push(desk.state, header)[1] == StoreHeader(header)


@pytest.mark.parametrize(
    ("rows_per_s", "exchange_s", "ahead"),
    [(2.0, 0.0, 2), (2.0, 0.2, 2), (2.0, 3.2, 1 + 13), (None, 9.0, 2), (1e300, 1e300, 1 + MAX_LEASED_CYCLES)],
)
def test_member_behind_a_slow_network_holds_the_rows_that_it_trains_meanwhile(rows_per_s, exchange_s, ahead):
    terms = replace(JOINED, horizon=100, cycle=1)
    for member, expected in (("ada-home", ahead), ("m0", 2)):
        who = replace(A, member=member)
        beat = Heartbeat(who, DIGESTS, False, 0, NO_ROWS, NO_ROWS, None, rows_per_s, 0, exchange_s=exchange_s)
        _, answer = coordinator.heartbeat(Desk(terms).state, beat, 0.0)
        assert len(answer.rows) == expected and answer.cycle == 1


def test_lease_of_a_member_that_dialled_in_outlasts_a_cut_connection():
    desk, ada = Desk(JOINED), replace(A, member="ada-home")
    for who in (A, ada):
        desk.beat(who, NO_ROWS, 0, 0.0)
    desk.tick(PERSON_LEASE_S - 1)
    assert set(desk.state.leases) == {ada}
    desk.tick(PERSON_LEASE_S)
    assert not desk.state.leases


@pytest.mark.parametrize(
    ("members", "pause"), [(1, 1 / 400), (400, 1.0), (4000, 10.0), (20_000, JOINED.lease_seconds / 2)]
)
def test_more_members_send_fewer_heartbeats_each(members, pause):
    leases = {replace(A, name=f"{number:032x}"): Lease(NO_ROWS, 20.0, 0, None, NO_ROWS) for number in range(members)}
    beat = Heartbeat(next(iter(leases)), JOINED.digests, True, 0, NO_ROWS, NO_ROWS, None, None, 0)
    state, answer = coordinator.heartbeat(replace(Desk(JOINED).state, leases=HashTrieMap(leases)), beat, 1.0)
    assert answer.pause == pytest.approx(pause)
    assert state.leases[beat.incarnation].until == 1.0 + max(JOINED.lease_seconds, 3 * answer.pause)


def calls_of_a_member(members: int) -> tuple[float, float]:
    """Count the Python calls of a member's push and of its announcement after a restart; the mean of all members."""
    desk = Desk(replace(JOINED, horizon=100 * members))
    held = {key: desk.beat(key, NO_ROWS, 0, 0.0) for key in (replace(A, member=f"m{n}") for n in range(members))}
    calls = 0

    def count(*_):
        nonlocal calls
        calls += 1

    def counted(work) -> float:
        nonlocal calls
        calls = 0
        sys.setprofile(count)
        try:
            work()
        finally:
            sys.setprofile(None)
        return calls / members

    headers = []
    pushing = counted(lambda: headers.extend(desk.push(key, held[key].first(4)) for key in held))
    desk = Desk(state=coordinator.start_epoch(desk.state.terms, desk.state.view, headers, 5.0, founded=False))
    beats = [
        Heartbeat(key, DIGESTS, True, 0, NO_ROWS, held[key].first(4), Identity(key, 1), 2.0, 40)
        for key in reversed(held)
    ]
    announcing = counted(lambda: [desk.announce(beat) for beat in beats])
    assert len(desk.state.leases) == members
    return pushing, announcing


def test_push_and_announcement_cost_the_same_among_many_members():
    """Each used to look at what every other member holds."""
    few, many = calls_of_a_member(30), calls_of_a_member(480)
    assert many[0] < 1.5 * few[0] and many[1] < 1.5 * few[1]


def test_record_that_cannot_follow_leaves_the_view_before_it_alone():
    desk = Desk(JOINED)
    rows = desk.beat(A, NO_ROWS, 0, 0.0)
    desk.push(A, rows.first(4))
    before, merge = desk.state.view, desk.tick(1.0)
    record = coordinator.make_record(desk.state, "parent", ("d", "d"), (), (), 1.0)
    views = before.growing([record, replace(record, version=2, decisions=merge.decisions * 2)])
    view = next(views)
    verdicts, processed = dict(view.verdicts), dict(view.processed)
    with pytest.raises(InvalidRecord, match="was already decided"):
        next(views)
    assert (view.verdicts, view.processed) == (verdicts, processed) and not before.verdicts


def test_token_from_its_training_to_its_commit():
    desk = Desk()
    first = desk.beat(A, NO_ROWS, 0, 0.0).first(8)
    second = desk.beat(B, NO_ROWS, 0, 0.0)
    assert desk.tokens(0.0) == Tokens(0, 0, 0, 0, 0) and summary(desk.state, 0.0).phase == "waiting for pushes"
    desk.beat(A, first.first(4), 40, 1.0)
    assert desk.tokens(1.0) == Tokens(40, 0, 0, 40, 0)
    desk.push(A, first.first(4))  # leased and contributed, but outstanding once
    assert desk.tokens(1.0) == Tokens(40, 0, 0, 40, 0)
    desk.beat(B, second.first(6), 60, 2.0)
    seen = summary(desk.state, 3.0)
    assert seen.tokens == Tokens(100, 0, 0, 100, 0) and "1 of 2 live members have pushed" in seen.phase
    assert seen.leased == (A, B) and seen.has_undecided
    desk.commit(8.0)
    assert desk.tokens(8.0) == Tokens(100, 40, 0, 60, 0)
    assert not summary(desk.state, 8.0).has_undecided, "B may be dead"
    desk.beat(A, NO_ROWS, 40, 15.0, base=1)
    desk.tick(2.0 + TERMS.lease_seconds)  # B sends no more heartbeats
    seen = summary(desk.state, 22.0)
    assert seen.tokens == Tokens(100, 40, 0, 0, 60) and seen.leased == (A,)


def test_stored_contribution_of_a_dead_member_is_not_lost():
    desk = Desk()
    rows = desk.beat(B, NO_ROWS, 0, 0.0)
    desk.beat(B, rows.first(6), 60, 1.0)
    stored = desk.push(B, rows.first(4))
    seen = summary(coordinator.start_epoch(TERMS, desk.state.view, [stored], 5.0, founded=False), 6.0)
    assert seen.tokens == Tokens(40, 0, 0, 40, 0) and seen.leased == () and seen.recovering
    assert seen.phase == f"recovering: members report what they hold for another {TERMS.lease_seconds - 1:.0f} s"


def test_summary_names_a_merge_under_way_and_the_end():
    desk = Desk()
    desk.beat(B, NO_ROWS, 0, 0.0)
    desk.push(A, desk.beat(A, NO_ROWS, 0, 0.0).first(4))
    merge = desk.tick(100.0)
    assert summary(desk.state, 100.0).phase == f"merging commit 1: {merge.reason}"
    world = CheckedWorld(seed=0, cycle=3, horizon=36)
    seen = world.final_summary()
    assert (seen.phase, seen.version) == ("all rows are counted", len(world.ledger.records) - 1)
    assert seen.tokens == Tokens(360, 360, 0, 0, 0), "none are lost without faults"


class CheckedWorld(World):
    """A swarm whose coordinators are checked before every step of every process."""

    def check(self):
        for made in self.coordinators.values():
            state, tokens = made.state, summary(made.state, self.engine.now).tokens
            headers = [*(header for header, _ in state.pending.values()), *state.storing.values()]
            holdings = [*state.leases.items(), *((header.identity.incarnation, header) for header in headers)]
            held = Rows.union(holding.rows for _, holding in holdings)
            assert state.taken == held | state.view.spent
            assert with_claims(state).undecided == state.undecided
            unspent = Rows(((0, 2 * self.horizon),)) - state.view.spent
            for key in ({header.identity.incarnation for header in headers} | {A}) - set(state.leases):
                others = Rows.union(holding.rows for holder, holding in holdings if holder != key)
                assert not state.recovering or held_by_others(state, key, unspent) == others & unspent
            assert state.room == self.horizon - len(state.view.counted) - len(held - state.view.spent)
            assert tokens.processed == tokens.applied + tokens.dropped + tokens.outstanding + tokens.lost
            assert min(tokens.applied, tokens.dropped, tokens.outstanding, tokens.lost) >= 0
            assert tokens.processed <= 10 * sum(self.processed.values())
            records = self.ledger.records[: state.view.version + 1]
            decisions = [decision for record in records for decision in record.decisions]
            for fate, found in (("applied", tokens.applied), ("dropped", tokens.dropped)):
                assert found == sum(decision.tokens for decision in decisions if decision.fate == fate)

    def final_summary(self) -> Summary:
        self.run()
        [made] = self.coordinators.values()
        return summary(made.state, self.engine.now)


@settings(max_examples=10)
@given(seed=st.integers(0, 10**9), cycle=st.integers(1, 4), race_at=st.none() | st.floats(1, 30))
def test_tokens_balance_and_taken_rows_have_an_owner_at_every_step(seed, cycle, race_at):
    faults = Faults(lost=0.1, twice=0.2)
    CheckedWorld(seed, cycle=cycle, faults=faults, random_kills=6, lost_payloads=2, race_at=race_at, poison={3}).run()


def test_tokens_that_faults_cost_are_called_lost():
    lost = []
    for seed in range(5):
        world = CheckedWorld(seed=seed, random_kills=6, lost_payloads=2, faults=Faults(lost=0.1, twice=0.1))
        tokens = world.final_summary().tokens
        assert tokens.outstanding == 0 and tokens.lost <= 10 * sum(world.processed.values()) - tokens.applied
        lost.append(tokens.lost)
    assert max(lost) > 0


LIVE = frozenset("abcd")
TIMEOUTS = RoundTimeouts()


def test_quorum_is_half_of_the_live_members_and_at_least_the_minimum():
    assert [quorum(live, 1) for live in range(6)] == [1, 1, 1, 2, 2, 3]
    assert quorum(2, 3) == 3


@pytest.mark.parametrize(
    ("accepted", "live", "cycle", "now", "timeouts", "check_at"),
    [
        pytest.param({}, LIVE, 10.0, 0.0, TIMEOUTS, math.inf, id="nothing was pushed"),
        pytest.param(dict.fromkeys("abcd", 5.0), LIVE, 10.0, 5.0, TIMEOUTS, None, id="all have pushed"),
        pytest.param({"a": 1.0}, frozenset("a"), 10.0, 1.0, TIMEOUTS, None, id="the only member has pushed"),
        pytest.param({"a": 0.0, "b": 4.0}, LIVE, 10.0, 8.9, TIMEOUTS, 9.0, id="grace is half a cycle from the quorum"),
        pytest.param({"a": 0.0, "b": 4.0}, LIVE, 10.0, 9.0, TIMEOUTS, None, id="grace is over"),
        pytest.param({"a": 0.0, "b": 0.0}, LIVE, None, 29.0, TIMEOUTS, 30.0, id="grace before a cycle is known"),
        pytest.param({"a": 0.0}, LIVE, None, 599.0, TIMEOUTS, 600.0, id="deadline before a cycle is known"),
        pytest.param({"a": 0.0}, LIVE, None, 600.0, TIMEOUTS, None, id="that deadline is over"),
        pytest.param({"a": 0.0}, LIVE, 10.0, 30.0, TIMEOUTS, None, id="the deadline needs no quorum"),
        pytest.param(
            {"a": 0.0}, LIVE, 10.0, 30.0, RoundTimeouts(min_quorum=2), math.inf, id="but it needs the minimum"
        ),
    ],
)
def test_round_ends_or_says_when_to_look_again(accepted, live, cycle, now, timeouts, check_at):
    found = round_status(accepted, live, cycle, now, timeouts)
    assert found.is_over if check_at is None else found[:2] == (False, check_at)


@given(
    st.dictionaries(st.sampled_from("abcdef"), st.floats(0, 100), min_size=1), st.floats(0.1, 50), st.floats(0, 1000)
)
def test_round_with_a_push_always_ends(accepted, cycle, now):
    """And the next look is never in the past, which would be a busy loop."""
    now = max([now, *accepted.values()])
    for _ in range(3):
        found = round_status(accepted, LIVE, cycle, now, TIMEOUTS)
        if found.is_over:
            return
        assert found.check_at > now
        now = found.check_at
    raise AssertionError("three looks and the round is not over")
