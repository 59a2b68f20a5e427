"""The rules of a plan, one by one; `test_histories.py` combines them at random."""

import time
from dataclasses import replace
from math import inf

import pytest

from tests.fleet.fake_cloud import BOOT_S, FakeCloud
from tests.fleet.loop import EUROPE, FLEET, A, B, C, Loop, desired, pool, started, vm
from tpuswarm.cloud.errors import Denied, Invalid, NoCapacity, NotSignedIn
from tpuswarm.cloud.protocol import FLEET_LABEL, POOL_LABEL, Listing, Machine, VmSpec
from tpuswarm.fleet.apply.preview import make_preview
from tpuswarm.fleet.decide import choose_actions
from tpuswarm.fleet.decide.actions import Create, Delete, Grow
from tpuswarm.fleet.decide.desired import DownWhen
from tpuswarm.fleet.decide.fleet_state import FleetState, Observed, WorkStatus
from tpuswarm.fleet.decide.limits import spec_quota
from tpuswarm.fleet.decide.money import DELETE_MARGIN_S, quota_key
from tpuswarm.fleet.decide.observe import observe


@pytest.mark.parametrize("status", ["PREEMPTED", "TERMINATED", "SUSPENDED", "FAILED", "404"])
def test_dead_machine_is_deleted_and_replaced_under_its_name(cloud, status):
    loop = started(cloud, pool(count=6, zones=(A, B)), vm("head"))
    before, dead = cloud.names(), ["gpt2-head", "v2-usc1f-3"]
    for name in dead:
        cloud.preempt((A, name), status)
    loop.run(600)
    assert cloud.names("ready") == cloud.names() == before and {zone for zone, _ in cloud.existing} == {A}
    assert sorted(machine.name for machine in cloud.deleted) == (dead if status != "404" else [])
    preempted = next(event for event in loop.events if event.kind == "preempted")
    assert preempted.text.startswith("the cloud took it away after ")


def test_stockout_moves_to_the_next_zone_and_back_once_there_is_capacity(cloud):
    cloud.capacity[A] = 0
    loop = started(cloud, pool(count=2, zones=(A, B)), seconds=900)
    assert cloud.names("ready") == ["v2-usc1b-0", "v2-usc1b-1"]
    moved = next(action for action in loop.actions if isinstance(action, Create) and action.spec.zone == B)
    assert moved.why == "pool small has 0 of 2; us-central1-f: no capacity for v2-8 now"
    cloud.capacity[A] = 9
    cloud.preempt((B, "v2-usc1b-0"))
    loop.run(900)
    assert cloud.names("ready") == ["v2-usc1b-1", "v2-usc1f-0"]


def test_capacity_is_requested_with_backoff_and_probed_with_one_machine(cloud):
    cloud.capacity[A] = 0
    loop = started(cloud, pool(count=20), seconds=3600)
    first, last = (sum(start <= at < end for at in loop.times) for start, end in ((0, 60), (3000, 3600)))
    assert first >= 20 and 1 <= last <= 12
    cloud.capacity[A], start = 20, len(loop.times)
    loop.run(1200)
    assert len(cloud.names("ready")) == 20
    times = loop.times[start:]
    assert [times.count(at) for at in sorted(set(times))] == [1, 10, 9], "nothing is refused any more"
    assert times[-1] - times[0] <= 120 < BOOT_S, "long before the first is ready"


def test_machines_preempted_together_are_replaced_in_another_zone_at_once(cloud):
    loop = started(cloud, pool(count=6, zones=(A, B)))
    cloud.capacity[A] = 2
    for number in range(4):
        cloud.preempt((A, f"v2-usc1f-{number}"))
    start = len(loop.actions)
    loop.run(10)
    created = [action.spec.name for action in loop.actions[start:] if isinstance(action, Create)]
    assert created == [f"v2-usc1b-{number}" for number in range(4)], "before their remains are deleted"
    loop.run(600)
    assert cloud.names("ready") == cloud.names() == [*created, "v2-usc1f-4", "v2-usc1f-5"]


def test_exhausted_quota_stops_requests_beyond_it(cloud):
    cloud.quota[quota_key("v2-8", A, True)] = 3
    loop = started(cloud, pool(count=5), seconds=1200)
    assert len(cloud.names("ready")) == 3
    assert loop.waits[0].why == f"{A}: quota of v2-8 in {A} is used up; `tpuswarm up` tries again"
    requests = len(loop.actions)
    loop.run(3600)
    assert len(loop.actions) == requests
    cloud.preempt((A, "v2-usc1f-1"))
    loop.run(1200)
    assert len(cloud.names("ready")) == 3, "a machine within the quota is replaced"
    cloud.quota.clear()
    loop.change()
    loop.run(1200)
    assert len(cloud.names("ready")) == 5


@pytest.mark.parametrize(
    ("error", "is_retried"),
    [(Denied("you lack tpu.nodes.create"), False), (Invalid("no such runtime"), False), (NotSignedIn("sign in"), True)],
)
def test_error_that_a_person_must_fix_stops_the_pool_until_the_next_up(cloud, error, is_retried):
    cloud.create_error = error
    loop = started(cloud, pool(count=2), pool("other", count=1))
    if not is_retried:
        assert len(loop.actions) == 3
        assert loop.waits[0].why == f"{error}; `tpuswarm up` tries again"
        loop.change()
    cloud.create_error = None
    loop.run(900)
    assert len(cloud.names("ready")) == 3


def test_machines_in_an_unreachable_zone_are_not_replaced(cloud):
    loop = started(cloud, pool(count=2, zones=(A, B)))
    cloud.unreachable = {A}
    before = len(loop.actions)
    loop.run(3600)
    loop.state = FleetState()  # another keeper, which never saw that zone
    loop.run(600)
    assert loop.waits[0].why.startswith(f"{A} does not answer, so the fleet's machines")
    cloud.unreachable = set()
    loop.run(600)
    assert len(loop.actions) == before


def test_machines_and_names_of_others_are_never_touched(cloud):
    cloud.add_foreign("v2-usc1f-0", A)
    cloud.add_foreign("v2-usc1f-1", A)
    cloud.listed_from[A, "v2-usc1f-1"] = cloud.now + 1e6
    cloud.add_foreign("stray", A, labels={FLEET_LABEL: "other-abc123", POOL_LABEL: "small"})
    cloud.update((A, "stray"), state="dead")
    cloud.add_foreign("gpt2-head", A)
    loop = started(cloud, pool(count=2), vm("head"), seconds=900)
    assert cloud.names("ready") == ["gpt2-head", "v2-usc1f-0", "v2-usc1f-1", "v2-usc1f-2", "v2-usc1f-3"]
    assert loop.waits[0].why == f"{A} has a machine named gpt2-head already"
    loop.desired = replace(loop.desired, down="asked")
    loop.run(900)
    assert cloud.names() == ["gpt2-head", "stray", "v2-usc1f-0", "v2-usc1f-1"]


def test_paused_machine_stops_and_starts_again_or_is_created_on_resume(cloud):
    loop = started(cloud, pool(count=2, how="on-demand"))
    for is_lost in (False, True):
        loop.desired = replace(loop.desired, paused={"v2-usc1f-1": "small"})
        loop.run(600)
        assert cloud.names("stopped") == ["v2-usc1f-1"]
        if is_lost:
            cloud.preempt((A, "v2-usc1f-1"), "404")
        loop.run(3600)
        assert cloud.names("ready") == ["v2-usc1f-0"]
        loop.desired = replace(loop.desired, paused={})
        loop.run(600)
        assert len(cloud.names("ready")) == 2 and not cloud.deleted


def test_machines_of_a_removed_pool_are_deleted(cloud):
    loop = started(cloud, pool(), pool("other", type_="v3-8", zones=(EUROPE,)))
    loop.desired = desired(pool())
    loop.run(600)
    assert cloud.names() == ["v2-usc1f-0"]
    assert [action.why for action in loop.actions if isinstance(action, Delete)] == ["the fleet has no pool other now"]


def test_down_finishes_only_when_nothing_is_left_in_any_zone(cloud):
    cloud.capacity[B] = 0
    loop = started(cloud, pool(count=3), pool("line", how="queued", zones=(B,)), vm("head"), seconds=100)
    assert cloud.names("waiting") == ["v2-usc1b-0"]
    loop.desired = replace(loop.desired, down="asked")
    loop.tick()
    assert choose_actions.list_remaining(loop.desired, loop.observed())
    loop.run(300)
    assert cloud.existing == {} and choose_actions.list_remaining(loop.desired, loop.observed()) == []
    cloud.unreachable = {A}
    loop.tick()
    assert choose_actions.list_remaining(loop.desired, loop.observed()) == [f"{A}, which does not answer"]


def test_keepers_own_machine_is_deleted_last():
    for unreachable in (set(), {B}):
        cloud = FakeCloud()
        loop = started(cloud, pool(count=2), vm("head"), kept_on="head")
        loop.desired = replace(loop.desired, down="asked", pools=(*loop.desired.pools, pool("other", zones=(B,))))
        cloud.unreachable = unreachable
        loop.run(300)
        assert cloud.names() == (["gpt2-head"] if unreachable else []), "machines may be left in that zone"
        cloud.unreachable = set()
        loop.run(300)
        assert cloud.existing == {} and cloud.deleted[-1].name == "gpt2-head"


def test_preview_of_a_shutdown_names_the_keepers_own_machine(cloud):
    loop = started(cloud, pool(count=2), vm("head"), kept_on="head")
    desired = replace(loop.desired, down="asked")
    preview = make_preview(
        desired, loop.listing, choose_actions.make_plan(desired, loop.observed(), loop.now), "p", loop.now
    )
    assert any("gpt2-head" in step.says for step in preview.steps) and preview.free + preview.paid == 0


def test_observer_of_a_shutdown_reports_deletions_rather_than_losses(cloud):
    loop = started(cloud, pool(count=2), pool("other"))
    memory, loop.desired, events = loop.state, replace(loop.desired, down="asked"), []
    for _ in range(30):
        loop.run(0)
        memory, found = observe(memory, loop.desired, loop.listing, [], loop.now)
        events += found
    assert cloud.existing == {} and [(event.kind, event.text) for event in events] == [("gone", "it is deleted")] * 3


def test_vm_is_deleted_by_google_after_the_end_date_even_without_a_keeper(cloud):
    """How Google is told: cloud/google/test_messages.py and cloud/rehearsal/test_gcloud.py."""
    loop = started(cloud, pool(), vm("head"), down_when=DownWhen(at=cloud.now + 4000), seconds=60)
    specs = [action.spec for action in loop.actions if isinstance(action, Create)]
    (head,) = [spec for spec in specs if isinstance(spec, VmSpec)]
    assert head.ends == loop.desired.down_when.at + DELETE_MARGIN_S


def test_planning_time_grows_no_faster_than_linearly_up_to_ten_thousand_machines():
    def wanted(count: int):
        return desired(*(pool(f"p{number}", count=count // 10, zones=(A, B, C)) for number in range(10)))

    machines = tuple(
        Machine(f"v2-usc1f-{n}", A, "tpu", "v2-8", "dead" if n % 3 == 0 else "ready", "READY", how="spot", created=1.0,
                healthy=True, labels={FLEET_LABEL: FLEET, POOL_LABEL: f"p{n % 10}"})
        for n in range(8_000)
    )  # fmt: skip
    listing = Listing(machines, frozenset())
    memory, _ = observe(FleetState(), wanted(10_000), listing, (), 1_800_000_000.0)

    def planned(count: int, listing: Listing) -> tuple[int, float]:
        """Number of actions, and seconds of the fastest of three plans."""
        fleet, seconds = wanted(count), []
        for _ in range(3):
            start = time.process_time()
            found = choose_actions.make_plan(fleet, Observed(listing, memory), 1_800_000_000.0)
            seconds.append(time.process_time() - start)
        return len(found.actions), min(seconds)

    actions, seconds = planned(10_000, listing)
    assert actions == 2_667 + 2_667 + 2_000, "delete the dead, replace them in another zone at once, and fill up"
    assert seconds < 400 * max(planned(100, Listing(machines[:80], frozenset()))[1], 1e-3)


KEY = (A, "v2-usc1f-0")


@pytest.mark.parametrize(
    ("how", "state", "timeout_s"),
    [
        ("on-demand", "repairing", choose_actions.LONG_REPAIR_TIMEOUT_S),
        ("spot", "repairing", choose_actions.REPAIR_TIMEOUT_S),
        ("spot", "creating", choose_actions.BOOT_TIMEOUT_S),
    ],
)
def test_machine_that_stays_unready_is_replaced_after_a_timeout(cloud, how, state, timeout_s):
    loop = started(cloud, pool(how=how), seconds=0 if state == "creating" else 600)
    cloud.update(KEY, state=state)
    cloud.transitions[KEY] = inf
    loop.run(timeout_s - 100)
    assert not cloud.deleted
    loop.run(300)
    assert [machine.state for machine in cloud.deleted] == [state]


def test_queued_request_moves_to_the_next_zone_after_its_wait_and_stays_in_the_last(cloud):
    cloud.capacity |= {A: 0, B: 0}
    loop = started(cloud, pool(how="queued", zones=(A, B), wait_s=7200.0), seconds=7000)
    assert cloud.names("waiting") == ["v2-usc1f-0"] and not cloud.deleted
    loop.run(900)
    assert cloud.names() == ["v2-usc1b-0"] and [it.request for it in cloud.deleted] == ["v2-usc1f-0-q"]
    cloud = FakeCloud()
    cloud.capacity[A] = 0
    started(cloud, pool(how="queued"), seconds=30 * 86_400, every=3600.0)
    assert cloud.names("waiting") == ["v2-usc1f-0"] and not cloud.deleted


def test_request_and_the_machine_it_becomes_count_as_one(cloud):
    """They have different creation times; `down` of the request also deletes the machine."""
    cloud.capacity[A] = 0
    loop = started(cloud, pool(how="queued"), seconds=60)
    requested_at = cloud.existing[KEY].created
    cloud.update(KEY, state="creating", said="CREATING", created=cloud.now)
    cloud.transitions[KEY] = cloud.now + BOOT_S
    loop.desired = replace(desired(pool(how="queued", count=0)), dropped={"v2-usc1f-0": requested_at}, revision=2)
    loop.tick()
    assert [machine.name for machine in cloud.deleted] == ["v2-usc1f-0"] and "requested by" in loop.actions[-1].why
    assert "us-central1-f/v2-usc1f-0" in loop.state.seen and not loop.state.backoffs
    cloud.update(KEY, created=cloud.now + 1)
    loop.run(30)
    assert loop.state.deleting, "its deletion is remembered"


def test_end_of_a_repair_is_reported(cloud):
    loop = started(cloud, pool(count=1, how="on-demand"))
    key = next(iter(cloud.existing))
    for changes in ({"state": "repairing", "said": "REPAIRING"}, {"healthy": False, "said": "READY"}):
        cloud.update(key, **changes)
        loop.run(120)
        cloud.update(key, state="ready", said="READY", healthy=True)
        loop.run(60)
    texts = [(event.kind, event.text) for event in loop.events]
    assert ("ready", "it is ready again, after 2 min of REPAIRING") in texts
    assert any(kind == "healthy" and "healthy again" in text for kind, text in texts), texts


def test_unhealthy_machine_is_replaced_three_times_a_day_at_most(cloud):
    loop = started(cloud, pool(), every=30.0)
    for _ in range(5):
        cloud.update(KEY, healthy=False, why="UNHEALTHY_TENSORFLOW")
        loop.run(choose_actions.UNHEALTHY_GRACE_S + 1140)
    assert len(cloud.deleted) == 3
    assert [wait.why for wait in loop.waits] == [
        f"v2-usc1f-0 is not healthy (UNHEALTHY_TENSORFLOW) and stays: 3 machines of {A} were replaced within a day"
    ]


def test_machine_whose_setup_fails_is_replaced_twice_and_then_reported(cloud):
    loop = started(cloud, pool(count=2), every=30.0)
    for _ in range(4):
        loop.work = WorkStatus(
            unusable={"v2-usc1f-0": (cloud.existing[KEY].created, "packages: no space left on device")}
        )
        loop.run(900)
    assert [machine.name for machine in cloud.deleted] == ["v2-usc1f-0"] * 2 and len(cloud.names("ready")) == 2
    assert [wait.why for wait in loop.waits] == [
        "v2-usc1f-0 cannot be set up (packages: no space left on device) and stays: "
        f"2 machines of {A} were replaced within a day"
    ]


def test_machine_that_recovers_in_time_stays(cloud):
    loop = started(cloud, pool())
    for _ in range(4):
        cloud.update(KEY, healthy=False)
        loop.run(choose_actions.UNHEALTHY_GRACE_S - 60)
        cloud.update(KEY, healthy=True)
        loop.run(120)
    assert not cloud.deleted


@pytest.mark.parametrize("how", ["on-demand", "queued", "reserved"])
def test_unhealthy_machine_that_is_not_spot_is_reported_and_left(cloud, how):
    loop = started(cloud, pool(how=how), every=300.0)
    cloud.update(KEY, healthy=False, why="the guest agent timed out")
    loop.run(2 * choose_actions.LONG_REPAIR_TIMEOUT_S)
    assert not cloud.deleted and loop.waits[0].subject == "pool small"
    assert loop.waits[0].why.startswith("v2-usc1f-0 is not healthy (the guest agent timed out) and stays")


def test_unhealthy_machine_with_a_running_job_is_replaced_much_later(cloud):
    loop = Loop(cloud, desired(pool(count=2)), every=60.0)
    loop.busy = frozenset({"v2-usc1f-0"})
    loop.run(600)
    for name in ("v2-usc1f-0", "v2-usc1f-1"):
        cloud.update((A, name), healthy=False, why="UNHEALTHY_TENSORFLOW")
    loop.run(choose_actions.LONG_REPAIR_TIMEOUT_S - 60)
    assert [machine.name for machine in cloud.deleted] == ["v2-usc1f-1"]
    loop.run(300)
    assert [machine.name for machine in cloud.deleted] == ["v2-usc1f-1", "v2-usc1f-0"], "its job may hang"


def test_scale_down_removes_unready_machines_first_then_the_youngest_and_last_the_one_that_trains(cloud):
    loop = started(cloud, pool(count=2))
    loop.desired = desired(pool(count=4))
    loop.run(30)
    loop.desired = desired(pool())
    loop.run(600)
    assert cloud.names() == ["v2-usc1f-0"] and cloud.deleted[-1].name == "v2-usc1f-1"
    loop.desired, loop.busy = desired(pool(count=2)), frozenset({"v2-usc1f-1"})
    loop.run(600)
    cloud.update((A, "v2-usc1f-1"), created=cloud.now, healthy=False)
    loop.desired = desired(pool())
    loop.run(120)
    assert cloud.names("ready") == ["v2-usc1f-1"]


def test_quota_for_serving_stops_single_hosts_of_v5e_alone(cloud):
    serving, training = (pool(type_, 2, (EUROPE,), type_=type_) for type_ in ("v5e-8", "v5e-16"))
    cloud.quota[spec_quota(replace(serving.spec, zone=EUROPE))] = 1
    loop = started(cloud, serving, training)
    assert sorted(machine.type for machine in cloud.existing.values()) == ["v5e-16", "v5e-16", "v5e-8"]
    (wait,) = loop.waits
    assert (wait.subject, wait.until) == ("1 of pool v5e-8", None)
    loop.change(pools=(serving, replace(training, count=1)))
    loop.run(300)
    requests = sum(isinstance(action, Create) for action in loop.actions)
    loop.run(600)
    assert sum(isinstance(action, Create) for action in loop.actions) == requests, "a free v5e-16 makes no room"


def test_exhausted_addresses_of_a_region_stop_its_zones_and_leave_others(cloud):
    cloud.addresses["us-central1"] = 3
    loop = started(cloud, pool(count=5, zones=(A, B, EUROPE)), pool("four", type_="v2-32", zones=(C,)), seconds=1200)
    assert cloud.names("ready") == ["v2-euw4a-0", "v2-euw4a-1", "v2-usc1f-0", "v2-usc1f-1", "v2-usc1f-2"]
    (wait,) = loop.waits
    assert wait.pool == "four" and wait.until is None, "a retry does not help"
    assert wait.why == "us-central1: You have reached IN_USE_ADDRESSES limit; `tpuswarm up` tries again"
    requests = len(loop.actions)
    loop.run(3600)
    assert len(loop.actions) == requests
    cloud.preempt((A, "v2-usc1f-1"), "404")
    loop.run(600)
    assert "v2-usc1f-1" in cloud.names("ready"), "its address is free again"
    cloud.addresses.clear()
    loop.change()
    loop.run(600)
    assert not loop.waits


def test_refusal_among_the_events_has_the_clouds_code(cloud, monkeypatch):
    monkeypatch.setattr(NoCapacity, "code", "RESOURCE_EXHAUSTED", raising=False)
    cloud.capacity[A] = 0
    refused = [event.text for event in started(cloud, pool(count=1), seconds=600).events if event.kind == "refused"]
    assert refused and all(text.endswith(" (RESOURCE_EXHAUSTED)") for text in refused)


def test_zone_that_refuses_late_is_probed_for_as_long(cloud):
    """A spot v6e was refused after 23 minutes in CREATING."""
    cloud.capacity[A], cloud.refusal_s = 0, 1380.0
    loop = started(cloud, pool(count=20), seconds=1380)
    start = len(loop.times)
    loop.run(1380)
    assert len(loop.times) - start == 1, "no more requests while the first may still be refused"


@pytest.mark.parametrize(("disk_gib", "grown"), [(200, True), (100, False), (50, False)])
def test_disk_of_a_vm_grows_with_the_file_and_never_shrinks(cloud, disk_gib, grown):
    loop = started(cloud, vm("head"))
    key, head = (A, "gpt2-head"), loop.desired.pools[0]
    loop.change(pools=(replace(head, spec=replace(head.spec, disk_gib=disk_gib)),))
    loop.run(300)
    assert cloud.existing[key].disk_gib == (200 if grown else 100)
    assert [type(action) for action in loop.actions[1:]] == ([Grow] if grown else []), "once"
    assert ["a disk of 100 GiB; only a new machine" in wait.why for wait in loop.waits] == [True] * (disk_gib < 100)
    assert not cloud.deleted


def test_machines_with_another_runtime_or_metadata_stay_and_are_named(cloud):
    loop = started(cloud, pool(count=2))
    small = loop.desired.pools[0]
    metadata = {"startup-script": "true", "ssh-keys": "me:key"}
    loop.change(pools=(replace(small, count=3, spec=replace(small.spec, runtime="new", metadata=metadata)),))
    loop.run(600)
    assert len(cloud.names("ready")) == 3 and not cloud.deleted
    assert [wait.why for wait in loop.waits] == [
        "v2-usc1f-0 and 1 more still have the runtime tpu-ubuntu2204-base, other metadata startup-script; only a new "
        "machine gets what the file says: `tpuswarm down v2-usc1f-0` and `tpuswarm up` replace it"
    ]
