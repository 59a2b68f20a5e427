"""How a run stands: every token has one place, at every moment and whatever happens."""

import pytest

from tests.swarm.exact import DIGESTS, genesis
from tests.swarm.world import World
from tpuswarm.swarm.core import state as coordinator
from tpuswarm.swarm.core.arithmetic.outer import Outer
from tpuswarm.swarm.core.messages import Beat, Terms
from tpuswarm.swarm.core.rows import NOTHING
from tpuswarm.swarm.core.summary import Tokens, summary
from tpuswarm.swarm.core.values import Header, Identity, Incarnation
from tpuswarm.swarm.core.view import View
from tpuswarm.swarm.engines.inproc import Faults

A, B = Incarnation("a", "1" * 32), Incarnation("b", "2" * 32)
TERMS = Terms(
    "run", DIGESTS, batch=1, tokens_per_row=10, horizon=100, cycle=4, members=("a", "b"), outer=Outer("average")
)


class Desk:
    """A coordinator, and what is said to it."""

    def __init__(self, state=None):
        self.state = state or coordinator.start(TERMS, View.of(genesis(TERMS)), [], 0.0, founded=True)

    def beat(self, who, outstanding, processed, now, base=0):
        undecided = next((key for key in self.state.pending if key.incarnation == who), None)
        said = Beat(who, DIGESTS, processed > 0, base, NOTHING, outstanding, undecided, 2.0, processed)
        self.state, answer = coordinator.beat(self.state, said, now)
        return answer.rows

    def push(self, who, rows, finite=True, now=1.0, sequence=1):
        header = Header(
            Identity(who, sequence),
            "run",
            self.state.view.version,
            rows,
            10 * len(rows),
            1,
            "plain",
            1.0,
            finite,
            ("d",),
        )
        self.state, _ = coordinator.push(self.state, header)
        self.state = coordinator.stored(self.state, header, now)
        return header

    def commit(self, now):
        self.state, merge, when = coordinator.tick(self.state, now)
        assert merge, when
        changed = any(each.fate == "applied" for each in merge.decisions)
        made = ("d", "d") if changed else self.state.view.newest.state
        record = coordinator.merged(self.state, "parent", made, (), (), now)
        self.state = coordinator.committed(self.state, record)

    def tokens(self, now):
        return summary(self.state, now).tokens


def test_a_token_from_its_training_to_its_commit():
    desk = Desk()
    first = desk.beat(A, NOTHING, 0, 0.0).first(8)
    second = desk.beat(B, NOTHING, 0, 0.0)
    assert desk.tokens(0.0) == Tokens(0, 0, 0, 0, 0) and summary(desk.state, 0.0).phase == "waiting for pushes"
    desk.beat(A, first.first(4), 40, 1.0)
    assert desk.tokens(1.0) == Tokens(40, 0, 0, 40, 0)
    desk.push(A, first.first(4))  # in its lease and in its contribution, and one time outstanding
    assert desk.tokens(1.0) == Tokens(40, 0, 0, 40, 0)
    desk.beat(B, second.first(6), 60, 2.0)
    seen = summary(desk.state, 3.0)
    assert seen.tokens == Tokens(100, 0, 0, 100, 0) and "1 of 2 live members have pushed" in seen.phase
    assert seen.leased == (A, B)
    desk.commit(8.0)
    assert desk.tokens(8.0) == Tokens(100, 40, 0, 60, 0)
    desk.beat(A, NOTHING, 40, 15.0, base=1)
    desk.state, _, _ = coordinator.tick(desk.state, 2.0 + TERMS.lease_seconds)  # b was not heard of again
    seen = summary(desk.state, 22.0)
    assert seen.tokens == Tokens(100, 40, 0, 0, 60) and seen.leased == (A,)


def test_what_is_dropped_is_not_lost():
    desk = Desk()
    rows = desk.beat(A, NOTHING, 0, 0.0)
    desk.beat(B, NOTHING, 0, 0.0)
    desk.beat(A, rows.first(4), 40, 1.0)
    desk.push(A, rows.first(4), finite=False)
    desk.commit(8.0)
    assert desk.tokens(8.0) == Tokens(40, 0, 40, 0, 0)


def test_a_contribution_may_be_here_before_its_members_report():
    desk = Desk()
    rows = desk.beat(A, NOTHING, 0, 0.0)
    desk.push(A, rows.first(4))
    assert desk.tokens(1.0) == Tokens(40, 0, 0, 40, 0)


def test_work_thought_lost_is_found():
    """The next coordinator lists the header of a member that nobody heard of again."""
    desk = Desk()
    rows = desk.beat(B, NOTHING, 0, 0.0)
    desk.beat(B, rows.first(6), 60, 1.0)
    found = desk.push(B, rows.first(4))
    again = coordinator.start(TERMS, desk.state.view, [found], 5.0, founded=False)
    seen = summary(again, 6.0)
    assert seen.tokens == Tokens(40, 0, 0, 40, 0) and seen.leased == ()
    assert (
        seen.recovering
        and seen.phase == f"recovering: members report what they hold, for another {TERMS.lease_seconds - 1:.0f} s"
    )


def test_a_merge_under_way_and_the_end_are_said():
    desk = Desk()
    desk.beat(B, NOTHING, 0, 0.0)
    desk.push(A, desk.beat(A, NOTHING, 0, 0.0).first(4))
    desk.state, merge, _ = coordinator.tick(desk.state, 100.0)
    assert summary(desk.state, 100.0).phase == f"merging commit 1: {merge.reason}"
    world = World(seed=1)
    world.run()
    [made] = world.coordinators.values()
    seen = summary(made.state, world.engine.now)
    assert seen.phase == "all rows are counted" and seen.tokens.outstanding == 0
    assert seen.version == len(world.ledger.records) - 1


class Watched(World):
    """A world whose coordinator is looked at before every step of every process."""

    def check(self):
        super().check()
        for made in self.coordinators.values():
            tokens = summary(made.state, self.engine.now).tokens
            assert tokens.processed == tokens.applied + tokens.dropped + tokens.outstanding + tokens.lost
            assert min(tokens.applied, tokens.dropped, tokens.outstanding, tokens.lost) >= 0
            assert tokens.processed <= 10 * sum(self.processed.values())
            records = self.ledger.records[: made.state.view.version + 1]
            verdicts = [decision for record in records for decision in record.decisions]
            for fate, found in (("applied", tokens.applied), ("dropped", tokens.dropped)):
                assert found == sum(decision.tokens for decision in verdicts if decision.fate == fate)

    def at_the_end(self) -> Tokens:
        self.run()
        [made] = self.coordinators.values()
        return summary(made.state, self.engine.now).tokens


@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_lost_where_nobody_dies(seed):
    world = Watched(seed=seed, cycle=3, horizon=36)
    assert world.at_the_end() == Tokens(360, 360, 0, 0, 0)


def test_tokens_balance_at_every_step_of_every_process():
    lost = []
    for seed in range(5):
        world = Watched(seed=seed, random_kills=6, lost_payloads=2, faults=Faults(lost=0.1, twice=0.1))
        tokens = world.at_the_end()
        assert tokens.outstanding == 0 and tokens.lost <= 10 * sum(world.processed.values()) - tokens.applied
        lost.append(tokens.lost)
    assert max(lost) > 0
