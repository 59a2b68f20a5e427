"""The protocol under faults: every row counted exactly once, whoever dies when (invariants 4, 5, 6, 9, 12)."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.swarm.world import World
from tpuswarm.swarm.core import state as core
from tpuswarm.swarm.core.arithmetic.outer import Outer
from tpuswarm.swarm.core.choose import Staleness
from tpuswarm.swarm.core.messages import Accepted, Damaged, Gone, Refused
from tpuswarm.swarm.core.rows import Rows
from tpuswarm.swarm.engines.inproc import Faults


def test_a_swarm_without_faults_counts_every_row_once():
    world = World(seed=1)
    view = world.run()
    assert view.counted == Rows.of((0, world.horizon)) and not view.skipped
    assert {decision.fate for decision in world.ledger.verdicts().values()} == {"applied"}


def test_one_member_is_the_plain_order_of_rows():
    world = World(seed=2, members=1)
    view = world.run()
    assert view.counted == Rows.of((0, world.horizon))
    for record in world.ledger.records[1:]:
        assert [decision.weight for decision in record.decisions] == [1.0]


@settings(max_examples=120)
@given(
    seed=st.integers(0, 10**9),
    members=st.integers(1, 5),
    cycle=st.integers(1, 4),
    overlap=st.booleans(),
    lost=st.sampled_from([0.0, 0.05, 0.2]),
    twice=st.sampled_from([0.0, 0.2]),
    kills=st.integers(0, 12),
    payloads=st.integers(0, 3),
    race_at=st.none() | st.floats(1, 30),
    limit=st.integers(0, 4),
    downlink=st.booleans(),
)
@example(  # a member was pointed to another coordinator while it pushed
    seed=4, members=4, cycle=1, overlap=True, lost=0.0, twice=0.0, kills=0, payloads=0,
    race_at=14.339210265661166, limit=1, downlink=True,
)  # fmt: skip
def test_any_schedule_of_faults_ends_clean(
    seed, members, cycle, overlap, lost, twice, kills, payloads, race_at, limit, downlink
):
    world = World(
        seed=seed, members=members, cycle=cycle, horizon=24, overlap=overlap,
        faults=Faults(lost=lost, twice=twice), random_kills=kills, lost_payloads=payloads, race_at=race_at,
        staleness=Staleness(limit), downlink=downlink,
    )  # fmt: skip
    world.run()


@settings(max_examples=10)
@given(
    seed=st.integers(0, 10**9),
    own=st.lists(st.sampled_from([1, 2, 4]), min_size=1, max_size=4),
    cycle=st.integers(1, 3),
    overlap=st.booleans(),
    kills=st.integers(0, 8),
    leaves=st.lists(st.floats(1, 30), max_size=3),
    lost=st.sampled_from([0.0, 0.1]),
)
def test_members_of_different_batches_hand_in_whole_batches_of_the_run(seed, own, cycle, overlap, kills, leaves, lost):
    """Whoever dies or leaves in the middle of one: what the others are leased is whole, too."""
    world = World(
        seed=seed, members=len(own), own=tuple(own), batch=4, cycle=4 * cycle, horizon=32, overlap=overlap,
        faults=Faults(lost=lost), random_kills=kills,
    )  # fmt: skip

    def leave():
        if made := world.processes.get("m0"):
            made.leaving = True

    for at in leaves:
        world.engine.at(at, leave)
    world.run()
    decided = [decision.rows for decision in world.ledger.verdicts().values()]
    assert not any(edge % 4 for rows in decided for each in rows.ranges for edge in each)


def crash_points() -> list[int]:
    world = World(seed=3, members=2, horizon=8, downlink=True)
    world.run()
    names = {name for _, name, _ in world.points}
    assert {
        *(f"call {each}" for each in ("put", "updates", "fetch", "merge")),
        "coordinator leaves a bookmark",
    } <= names
    return list(range(len(world.points)))


@pytest.mark.parametrize("part", range(4))
def test_a_crash_at_every_step_of_every_process(part):
    for point in crash_points()[part::4]:
        world = World(seed=3, members=2, horizon=8, kill_at=point, downlink=True)
        view = world.run()
        assert len(view.counted) >= world.horizon and world.kills == 1, world.points[point]


@pytest.mark.parametrize("part", range(4))
def test_a_minute_of_standstill_at_every_step_of_every_process(part):
    """Whoever stands still, the run goes on; where it is the coordinator itself, no member loses anything by it."""
    for point in crash_points()[part::4]:
        world = World(seed=3, members=2, horizon=8, stop_at=point, downlink=True)
        view = world.run()
        assert len(view.counted) >= world.horizon and world.stops == 1, world.points[point]
        if world.points[point][0] == "coordinator":
            assert world.lives == world.members and sum(world.processed.values()) == world.horizon, world.points[point]


@pytest.mark.parametrize("what", ["member trains", "member encodes", "member adopts"])
def test_a_member_whose_devices_hang_loses_its_lease_while_it_talks(what):
    """Its rows are trained by others, and nobody waits for it; a first time may last as long as it is compiled."""
    world = World(seed=7, members=3, horizon=100)
    made, takes = world.processes["m0"], world.engine.takes

    def hang(node, effect):
        now = world.engine.now > 25.0 and effect.name == what and world.processes.get("m0") is made
        return 1e9 if node == "m0" and now else takes(node, effect)

    world.engine.takes = hang
    view = world.run()
    assert world.lives == world.members + 1, "it came back as another incarnation"
    times = [record.time for record in world.ledger.records]
    assert len(view.counted) == 100 and max(after - before for before, after in pairwise(times)) < 60


def answer(process):
    """What a process of a server answers, its effects made at once."""
    value = None
    while True:
        try:
            value = process.send(value).action()
        except StopIteration as end:
            return end.value


def test_a_new_coordinator_takes_one_stored_contribution_for_no_whole_quorum():
    world = World(seed=1, members=4)
    world.engine.run(lambda: len(world.ledger.records) > 2, 100)
    view, (header, *_) = world.ledger.view(), world.ledger.stored.values()
    again = replace(header, identity=replace(header.identity, sequence=99))
    terms = replace(world.terms, outer=Outer("nesterov"))
    state = core.start(terms, view, [again], 0.0, founded=False)
    _, merge, _ = core.tick(state, 0.5)
    assert merge is None and state.live == set(terms.members)
    state, merge, _ = core.tick(state, terms.patience.deadline_first + terms.lease_seconds)
    assert merge is not None, "nobody else came back"


def test_the_same_identity_with_other_digests_is_refused_after_its_verdict_too():
    world = World(seed=1)
    world.run()
    coordinator, (header, *_) = world.coordinators["coordinator"], world.ledger.stored.values()
    assert answer(coordinator.push(header)) == Accepted()
    assert isinstance(answer(coordinator.push(replace(header, digests=("other", "digests")))), Refused)
    assert world.ledger.stored[header.identity] == header


def test_a_payload_that_always_arrives_damaged_ends_the_incarnation():
    """It was sent again for ever, and its member trained no more."""

    class Broken(World):
        def start_shard(self, name):
            super().start_shard(name)
            shard = self.engine._servers[name]
            put = shard.put

            def arrives(identity, *rest):
                broken = identity.incarnation == self.first
                return Damaged("fragment 0 arrived with another digest") if broken else put(identity, *rest)

            shard.put = arrives

    Broken.first = World(seed=1).processes["m0"].books.incarnation
    world = Broken(seed=1)
    world.run()
    assert world.lives == world.members + 1
    assert Broken.first not in world.ledger.view().verdicts


def test_members_add_what_changed_and_fetch_the_whole_where_that_is_wrong():
    world = World(seed=3, downlink=True)
    world.run()
    assert any("does not match the ledger: fetching all of it" in sentence for sentence in world.said)
    calls = [name for _, name, when in world.points if when == "after"]
    assert calls.count("call updates") > calls.count("call fetch") > 0


def test_a_member_that_comes_too_late_for_a_version_takes_a_newer_one():
    told = []

    class Slow(World):
        def start_shard(self, name):
            super().start_shard(name)
            shard = self.engine._servers[name]
            fetch = shard.fetch

            def late(number, digest):
                told.append(self.rnd.random() < 0.5)
                return Gone() if told[-1] else fetch(number, digest)

            shard.fetch = late

    world = Slow(seed=2)
    view = world.run()
    assert any(told) and len(view.counted) == world.horizon and world.lives == world.members


def test_a_contribution_that_is_not_finite_changes_nothing():
    world = World(seed=4, members=2, poison={0})
    view = world.run()
    dropped = [decision for decision in world.ledger.verdicts().values() if decision.fate == "dropped"]
    assert [decision.reason for decision in dropped] == ["not finite"]
    assert view.skipped == dropped[0].rows and len(view.counted) == world.horizon


@pytest.mark.parametrize("at", [0.5, 8.0, 9.5, 11.0, 14.0])
@pytest.mark.parametrize("overlap", [True, False])
def test_a_member_that_leaves_with_notice_hands_in_what_it_has(at, overlap):
    """Only rows trained after a snapshot that is still undecided are trained again; the rest of its lease goes back."""
    world = World(seed=5, members=3, cycle=3, horizon=36, overlap=overlap)
    made = world.processes["m0"]
    after = []

    def leave():
        made.leaving = True
        after.append(len(made.books.undecided.after) if made.books.undecided else 0)

    world.engine.at(at, leave)
    world.run()
    key = made.books.incarnation
    applied = sum(len(d.rows) for identity, d in world.ledger.verdicts().items() if identity.incarnation == key)
    assert world.processed.get(key, 0) - applied <= after[0] + 1  # the step under way may end
    assert sum(world.processed.values()) - world.horizon <= after[0] + 1


@settings(max_examples=30)
@given(seed=st.integers(0, 10**9), cycle=st.integers(1, 4), kills=st.integers(1, 6))
def test_a_killed_member_loses_at_most_its_cycles_under_way(seed, cycle, kills):
    """Work since the last accepted push: one cycle before its snapshot is accepted and two beside it (invariant 6)."""
    world = World(seed=seed, members=3, cycle=cycle, horizon=40)
    for number in range(kills):
        world.engine.at(world.rnd.uniform(1, 30), lambda number=number: world.crash(f"m{number % 3}"))
    view = world.run()
    lost = sum(world.processed.values()) - len(view.counted) - len(view.skipped)
    assert lost <= kills * 3 * cycle


def test_the_same_seed_gives_the_same_ledger():
    first, second = (World(seed=6, random_kills=6, faults=Faults(lost=0.1, twice=0.1)) for _ in range(2))
    first.run()
    second.run()
    assert first.ledger.records == second.ledger.records


def test_most_members_gone_for_a_long_time():
    """One member goes on alone, at the deadline of each round or sooner; those who come back are taken in again."""
    gone, away = {"m0", "m1", "m2", "m3"}, 80.0

    class Deserted(World):
        def restart(self, node: str, after: float) -> None:
            super().restart(node, away if node in gone else after)

    world = Deserted(seed=6, members=5, horizon=160, cycle=4)
    for node in gone:
        world.engine.at(10.0, lambda node=node: world.crash(node))
    world.run()
    alone = [record for record in world.ledger.records[1:] if 35.0 < record.time < away]
    assert {each.identity.incarnation.member for record in alone for each in record.decisions} - gone == {"m4"}
    gaps = [after.time - before.time for before, after in pairwise(alone)]
    assert len(alone) > 5 and max(gaps) < world.terms.patience.deadline_first
    late = {each.identity.incarnation.member for record in world.ledger.records[-5:] for each in record.decisions}
    assert late & gone
