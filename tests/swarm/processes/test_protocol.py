"""The protocol under faults: every row counted exactly once, whoever dies when (invariants 4, 5, 6, 9, 12)."""

from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.swarm.world import World
from tpuswarm.swarm.core.choose import Staleness
from tpuswarm.swarm.core.messages import Accepted, PayloadDamaged, Refused, VersionExpired
from tpuswarm.swarm.engines.inproc import Faults
from tpuswarm.swarm.member import loop as member_loop


@pytest.fixture(autouse=True, scope="module")
def idle_members_poll_rarely():
    """Every 20 ms of virtual time would make nine tenths of all events."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(member_loop, "IDLE_SLEEP_S", 0.2)
        yield


@settings(max_examples=60)
@given(
    downlink=st.booleans(),
    overlap=st.booleans(),
    seed=st.integers(0, 10**9),
    members=st.integers(1, 5),
    cycle=st.integers(1, 4),
    lost=st.sampled_from([0.0, 0.05, 0.2]),
    twice=st.sampled_from([0.0, 0.2]),
    random_kills=st.integers(0, 12),
    lost_payloads=st.integers(0, 3),
    race_at=st.none() | st.floats(1, 30),
    limit=st.integers(0, 4),
)
@example(  # a member was pointed to another coordinator while it pushed
    downlink=True, overlap=True, seed=4, members=4, cycle=1, lost=0.0, twice=0.0, random_kills=0, lost_payloads=0,
    race_at=14.339210265661166, limit=1,
)  # fmt: skip
def test_any_schedule_of_faults_ends_clean(downlink, overlap, lost, twice, limit, **world):
    faults, staleness = Faults(lost=lost, twice=twice), Staleness(limit)
    World(horizon=24, downlink=downlink, overlap=overlap, faults=faults, staleness=staleness, **world).run()


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
def test_members_with_different_batches_push_whole_batches_of_the_run(seed, own, cycle, overlap, kills, leaves, lost):
    """Also if a member dies or leaves within a batch."""
    world = World(
        seed=seed, members=len(own), own=tuple(own), batch=4, cycle=4 * cycle, horizon=32, overlap=overlap,
        faults=Faults(lost=lost), random_kills=kills,
    )  # fmt: skip

    def leave():
        if member := world.processes.get("m0"):
            member.leaving = True

    for time in leaves:
        world.engine.at(time, leave)
    world.run()
    decided = [decision.rows for decision in world.ledger.verdicts().values()]
    assert not any(edge % 4 for rows in decided for span in rows.ranges for edge in span)


@cache
def crash_points() -> list[tuple[str, str, str]]:
    world = World(seed=3, members=2, horizon=8, downlink=True)
    world.run()
    names = {name for _, name, _ in world.points}
    assert {"call put", "call updates", "call fetch", "call merge", "coordinator leaves a bookmark"} <= names
    return world.points


@pytest.mark.parametrize("first", range(2))
@pytest.mark.parametrize("fault", ["kill_at", "stop_at"])
def test_process_may_die_or_stop_for_a_minute_at_any_step(fault, first):
    for point in range(len(crash_points()))[first::2]:
        world = World(seed=3, members=2, horizon=8, downlink=True, **{fault: point})
        view = world.run()
        assert len(view.counted) >= world.horizon and world.kills + world.stops == 1, crash_points()[point]
        if fault == "stop_at" and crash_points()[point][0] == "coordinator":
            assert world.lives == world.members, crash_points()[point]
            assert sum(world.processed.values()) == world.horizon, crash_points()[point]


@pytest.mark.parametrize("action", ["member trains", "member encodes", "member adopts"])
def test_member_with_hung_devices_loses_its_lease(action):
    """Others train its rows without waiting. A first action may take as long as a compilation."""
    world = World(seed=7, members=3, horizon=100)
    hung, duration = world.processes["m0"], world.engine.effect_seconds

    def effect_seconds(node, effect):
        hangs = world.engine.now > 25.0 and effect.name == action and world.processes.get("m0") is hung
        return 1e9 if node == "m0" and hangs else duration(node, effect)

    world.engine.effect_seconds = effect_seconds
    view = world.run()
    assert world.lives == world.members + 1, "it came back as another incarnation"
    times = [record.time for record in world.ledger.records]
    assert len(view.counted) == 100 and max(after - before for before, after in pairwise(times)) < 60


def test_same_identity_with_other_digests_is_refused_after_its_verdict():
    world = World(seed=1)
    world.run()
    coordinator, (header, *_) = world.coordinators["coordinator"], world.ledger.stored.values()

    def push(sent):
        process, value = coordinator.push(sent), None
        while True:
            try:
                value = process.send(value).action()
            except StopIteration as end:
                return end.value

    assert push(header) == Accepted()
    assert isinstance(push(replace(header, digests=("0" * 64, "1" * 64))), Refused)
    assert world.ledger.stored[header.identity] == header


def world_with_shard_method(seed: int, method: str, wrap) -> World:
    """A world in which `wrap(world, real)` replaces a method of every shard."""

    class Replaced(World):
        def start_shard(self, name):
            super().start_shard(name)
            shard = self.engine._servers[name]
            setattr(shard, method, wrap(self, getattr(shard, method)))

    return Replaced(seed=seed)


def test_payload_that_always_arrives_damaged_ends_the_incarnation():
    broken = World(seed=1).processes["m0"].state.incarnation

    def damage(world, put):
        damaged = PayloadDamaged("fragment 0 arrived with another digest")
        return lambda identity, *rest: damaged if identity.incarnation == broken else put(identity, *rest)

    world = world_with_shard_method(1, "put", damage)
    world.run()
    assert world.lives == world.members + 1
    assert broken not in world.ledger.view().verdicts


def test_member_fetches_a_newer_version_if_its_version_was_removed():
    removed = []

    def remove_half(world, fetch):
        def fetch_or_gone(number, digest):
            removed.append(world.rnd.random() < 0.5)
            return VersionExpired() if removed[-1] else fetch(number, digest)

        return fetch_or_gone

    world = world_with_shard_method(2, "fetch", remove_half)
    view = world.run()
    assert any(removed) and len(view.counted) == world.horizon and world.lives == world.members


def test_members_apply_updates_and_fetch_the_whole_version_if_one_is_wrong():
    world = World(seed=3, downlink=True)
    world.run()
    assert any("does not match the ledger; fetching it" in sentence for sentence in world.messages)
    calls = [name for _, name, when in world.points if when == "after"]
    assert calls.count("call updates") > calls.count("call fetch") > 0


def test_contribution_with_a_nan_changes_nothing():
    world = World(seed=4, members=2, poison={0})
    view = world.run()
    dropped = [decision for decision in world.ledger.verdicts().values() if decision.fate == "dropped"]
    assert [decision.reason for decision in dropped] == ["not finite"]
    assert view.skipped == dropped[0].rows and len(view.counted) == world.horizon


@pytest.mark.parametrize("time", [0.5, 8.0, 9.5, 11.0, 14.0])
@pytest.mark.parametrize("overlap", [True, False])
def test_member_that_leaves_with_notice_pushes_its_work(time, overlap):
    """Also what it trained after a push that is still undecided; others repeat nothing."""
    world = World(seed=5, members=3, cycle=3, horizon=36, overlap=overlap)
    member = world.processes["m0"]
    world.engine.at(time, lambda: setattr(member, "leaving", True))
    world.run()
    key = member.state.incarnation
    applied = sum(len(d.rows) for identity, d in world.ledger.verdicts().items() if identity.incarnation == key)
    assert world.processed.get(key, 0) == applied
    assert sum(world.processed.values()) == world.horizon


def test_member_that_leaves_waits_only_so_long_for_a_verdict(monkeypatch):
    monkeypatch.setattr(member_loop, "LEAVE_PATIENCE_S", 0.0)
    world = World(seed=5, members=3, cycle=3, horizon=36)
    member = world.processes["m0"]
    unpushed = []

    def leave():
        if not (undecided := member.state.undecided) or not undecided.after:
            world.engine.at(world.engine.now + 0.1, leave)
            return
        member.leaving = True
        unpushed.append(len(undecided.after))

    world.engine.at(8.0, leave)
    world.run()
    assert 0 < sum(world.processed.values()) - world.horizon <= unpushed[0] + 1  # the current step may end


@settings(max_examples=15)
@given(seed=st.integers(0, 10**9), cycle=st.integers(1, 4), kills=st.integers(1, 6))
def test_killed_member_loses_at_most_its_open_cycles(seed, cycle, kills):
    """Work since the last accepted push: one cycle before its snapshot is accepted and two beside it (invariant 6)."""
    world = World(seed=seed, members=3, cycle=cycle, horizon=40)
    for number in range(kills):
        world.engine.at(world.rnd.uniform(1, 30), lambda number=number: world.crash(f"m{number % 3}"))
    view = world.run()
    lost = sum(world.processed.values()) - len(view.counted) - len(view.skipped)
    assert lost <= kills * 3 * cycle


def test_one_member_continues_alone_while_most_are_away():
    """It commits at the deadline of each round or sooner; members that return are used again."""
    away, back_at = {"m0", "m1", "m2", "m3"}, 80.0

    class Deserted(World):
        def restart(self, node: str, after: float) -> None:
            super().restart(node, back_at if node in away else after)

    world = Deserted(seed=6, members=5, horizon=160, cycle=4)
    for node in away:
        world.engine.at(10.0, lambda node=node: world.crash(node))
    world.run()
    alone = [record for record in world.ledger.records[1:] if 35.0 < record.time < back_at]
    contributors = {d.identity.incarnation.member for record in alone for d in record.decisions}
    assert contributors - away == {"m4"}
    gaps = [after.time - before.time for before, after in pairwise(alone)]
    assert len(alone) > 5 and max(gaps) < world.terms.timeouts.first_deadline_s
    assert away & {d.identity.incarnation.member for record in world.ledger.records[-5:] for d in record.decisions}
