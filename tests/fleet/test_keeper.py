"""Keepers survive kills, damaged state, full disks, sleep and clock jumps, and one at a time leads a fleet."""

import errno
import re
from dataclasses import replace

import pytest

from tests.fleet.fake_cloud import START, FakeCloud, Killed
from tests.fleet.loop import MANAGED_FLEET, A, B, ManagedFleet, desired, pool
from tpuswarm.cli.fleet.apply import is_up
from tpuswarm.cloud.errors import Denied, Unreachable
from tpuswarm.cloud.protocol import Machine
from tpuswarm.errors import RunFailed
from tpuswarm.fleet.decide.desired import Budget, DownWhen
from tpuswarm.fleet.decide.fleet_state import WorkStatus
from tpuswarm.fleet.decide.jobs import Assignment, Job
from tpuswarm.fleet.decide.limits import spec_quota
from tpuswarm.fleet.keeper.clock import Clock
from tpuswarm.fleet.keeper.keeper import LEASE_S, MACHINE_VARIABLE, Keeper
from tpuswarm.fleet.store.document import Document, DocumentStore, LocalBucket, with_job
from tpuswarm.fleet.store.fleets import change_desired
from tpuswarm.fleet.store.history import History
from tpuswarm.fleet.view import fleet_object, summary_lines


def test_tick_lists_all_machines_with_one_request(tmp_path):
    fleet = ManagedFleet(tmp_path, desired(pool(count=60)))
    keeper = fleet.keeper()
    fleet.run(keeper, 600)
    fleet.cloud.requests.clear()
    keeper.tick()
    assert fleet.cloud.requests == ["machines"]


def test_keeper_killed_at_any_side_effect_is_continued_by_the_next_on_any_computer(tmp_path):
    def live(fleet: ManagedFleet, same_computer: bool = True) -> int:
        cloud, kills = fleet.cloud, 0
        steps = [
            lambda: None,
            lambda: cloud.preempt((A, "v2-usc1f-0")),
            lambda: cloud.capacity.update({A: 0}),
            lambda: cloud.preempt(next(key for key in cloud.existing if key[1].startswith("v2")), "404"),
            lambda: fleet.change(pools=(replace(MANAGED_FLEET.pools[0], count=1), *MANAGED_FLEET.pools[1:])),
            lambda: fleet.change(down="asked"),
        ]
        keeper = fleet.keeper()
        for step in steps:
            armed, cloud.kill_switch.remaining = cloud.kill_switch.remaining, None
            step()
            cloud.kill_switch.remaining = armed
            for _ in range(3):
                try:
                    fleet.run(keeper, 750, every=75.0)
                    break
                except Killed:
                    kills += 1
                    keeper = fleet.keeper("computer" if same_computer else "other computer")
            wanted = fleet.document.desired
            if wanted.down is None:
                assert len(fleet.ready) == sum(pool.count for pool in wanted.pools), (step, cloud.existing)
        assert cloud.existing == {}
        return kills

    undisturbed = ManagedFleet(tmp_path / "undisturbed")
    undisturbed.cloud.kill_switch.count = 0
    live(undisturbed)
    effects = undisturbed.cloud.kill_switch.count
    assert 30 < effects < 200
    for number in range(0, effects, 2):
        fleet = ManagedFleet(tmp_path / str(number))
        fleet.cloud.kill_switch.remaining, fleet.cloud.kill_switch.after = number, number % 4 == 0
        assert live(fleet, same_computer=number % 8 < 4) <= 1


def test_idle_time_counts_only_while_a_keeper_watches(tmp_path):
    fleet = ManagedFleet(tmp_path, down_when=DownWhen(idle_s=1800.0))

    def work(phase: str, busy_at: float) -> None:
        job = Job("train", "small", "python train.py", "preempted", (Assignment("small", phase=phase),))
        fleet.change_document(work=WorkStatus(busy_at=busy_at), jobs=(job,))

    fleet.run(fleet.keeper(), 600)
    work("running", fleet.cloud.now)
    fleet.cloud.advance(7200)  # no keeper runs, and the job does
    keeper = fleet.keeper()
    assert fleet.run(keeper, 3600, every=30.0).document.desired.down is None
    work("done", fleet.cloud.now - 3600)
    fleet.cloud.advance(7200)  # the computer sleeps
    assert fleet.run(keeper, 1700, every=30.0).document.desired.down is None
    assert fleet.run(keeper, 200).document.desired.down == "down_when: nothing has run for 30 min"


def test_end_of_a_fleet_is_stored_before_anything_is_deleted(tmp_path):
    fleet = ManagedFleet(tmp_path, down_when=DownWhen(at=START + 700))
    keeper, delete = fleet.keeper(), fleet.cloud.delete

    def checked_delete(machine: Machine) -> str:
        assert fleet.document.desired.down == "down_when: its date has come"
        return delete(machine)

    fleet.cloud.delete = checked_delete
    fleet.run(keeper, 600)
    assert not fleet.cloud.deleted
    fleet.run(keeper, 600)
    assert fleet.cloud.existing == {} and fleet.cloud.deleted


def test_costs_include_the_time_between_two_keepers(tmp_path):
    fleet = ManagedFleet(tmp_path, desired(pool(count=2)), budget=Budget())
    fleet.run(fleet.keeper("first"), 600)
    fleet.cloud.advance(36_000)
    spent = fleet.run(fleet.keeper("second"), 100).document.spending.pools["small"]
    assert spent.hours == pytest.approx(2 * (fleet.cloud.now - START) / 3600, rel=0.03)
    assert spent.dollars == pytest.approx(spent.hours * 1.35)


@pytest.mark.parametrize("bucket_answers", [True, False])
def test_clock_jump_costs_nothing_and_deletes_nothing(fleet, bucket_answers):
    keeper, bucket = fleet.keeper(), fleet.cloud.bucket("state")
    fleet.run(keeper, 600)
    before = keeper.tick().document.spending.dollars
    for jump in (86_400.0, -200_000.0):
        fleet.clock_offset_s += jump
        fleet.cloud.advance(1)
        if not bucket_answers:
            bucket.is_reachable = False
            with pytest.raises(Unreachable):
                keeper.tick()
            bucket.is_reachable = True
        tick = keeper.tick()
        assert not bucket_answers or "the clock has jumped by" in tick.document.events[-1].text
        for _ in range(20):  # also where the tick that sees the jump stores nothing
            assert not tick.plan.actions and tick.document.spending.dollars == pytest.approx(before, abs=0.1)
            fleet.cloud.advance(1)
            tick = keeper.tick()


def test_only_a_patient_keeper_retries_errors_that_a_person_must_fix(fleet):
    machines, logged, slept = fleet.cloud.machines, [], []

    def refuse_once(zones):
        fleet.cloud.machines = machines
        raise Denied("listing TPUs: permission denied")

    keeper = fleet.keeper()
    keeper.log_line = logged.append
    fleet.cloud.machines = refuse_once
    with pytest.raises(Denied):
        keeper.run(lambda tick: None, lambda tick: True, slept.append)
    fleet.cloud.machines = refuse_once
    keeper.run(lambda tick: None, lambda tick: True, slept.append, patient=True)
    assert slept == [300.0] and logged[0].endswith("listing TPUs: permission denied; trying again in 5 min")


def test_keeper_acts_again_once_the_disk_has_room(tmp_path, monkeypatch):
    cloud, logged = FakeCloud(), []
    store = DocumentStore(LocalBucket(tmp_path), "gpt2", "here")
    store.change(lambda _: Document("gpt2", "google", "model", MANAGED_FLEET, MANAGED_FLEET.zones))
    clock = Clock(wall=lambda: cloud.now, steady=lambda: cloud.now)
    keeper = Keeper(cloud, store, History(tmp_path / "history.db"), clock, threads=1)
    keeper.log_line = logged.append
    with monkeypatch.context() as full_disk:
        full_disk.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left on device")))
        keeper.run(lambda tick: None, lambda tick: cloud.now > START + 100, cloud.advance)
        assert cloud.existing == {} and "gpt2.json cannot be written: No space left on device" in logged[0]
    keeper.run(lambda tick: None, lambda tick: tick.converged, cloud.advance)
    assert cloud.names("ready") == ["gpt2-head", "v2-usc1b-0", "v2-usc1f-0", "v2-usc1f-1"]


def test_fleet_is_not_done_while_one_of_its_jobs_runs(tmp_path):
    """The second job has no report yet."""
    fleet = ManagedFleet(tmp_path, desired(pool()), down_when=DownWhen(done=True))
    keeper = fleet.keeper()
    fleet.run(keeper, 300)
    old = Job("old", "small", "true", "never", (Assignment("small", phase="done"),))
    fleet.store.change(lambda found: replace(with_job(found, old), work=WorkStatus(done=True)))
    fleet.store.change(lambda found: with_job(found, replace(old, name="new", assignments=(Assignment("small"),))))
    assert fleet.document.work.done is False
    fleet.change_document(work=WorkStatus(done=True))
    assert fleet.run(keeper, 100).document.desired.down is None
    fleet.store.change(lambda found: replace(with_job(found, replace(old, name="new")), work=WorkStatus(done=True)))
    assert fleet.run(keeper, 300).document.desired.down == "down_when: the work is done"


def test_unwritable_or_damaged_history_stops_no_keeper(fleet):
    (fleet.folder / "file").write_text("")
    history = History(fleet.folder / "file" / "history.db")
    fleet.run(Keeper(fleet.cloud, fleet.store, history, fleet.clock, threads=1), 600)
    assert len(fleet.ready) == 4 and history.trouble and "File exists" in history.trouble
    damaged = fleet.folder / "damaged" / "history.db"
    damaged.parent.mkdir()
    damaged.write_bytes(b"no database at all" * 100)
    assert History(damaged).state() is None and History(damaged).events() == []
    fleet.run(fleet.keeper("damaged"), 30)


UNUSED_PID = 2**22 + 1


def test_second_keeper_takes_over_once_the_lease_expires(fleet):
    cloud, first, second = fleet.cloud, fleet.keeper("first"), fleet.keeper("second")
    for _ in range(40):
        assert first.tick().leads and not second.tick().leads
        cloud.advance(10)
    assert len(fleet.ready) == 4
    cloud.preempt((A, "v2-usc1f-0"))
    stopped_at = cloud.now
    while not second.tick().leads:
        cloud.advance(5)
    assert LEASE_S - 20 <= cloud.now - stopped_at <= LEASE_S + 10, "it was renewed up to 20 s before"
    fleet.run(second, 600)
    assert len(fleet.ready) == 4
    assert not first.tick().leads, "the first is back and sees who leads"


@pytest.mark.parametrize("request_", ["machines", "delete"])
def test_keeper_that_slept_during_a_request_deletes_nothing_its_successor_created(tmp_path, request_):
    fleet = ManagedFleet(tmp_path, desired(pool(count=2)))
    cloud, first, second = fleet.cloud, fleet.keeper("first"), fleet.keeper("second")
    fleet.run(first, 600)
    second.tick()
    cloud.preempt((A, "v2-usc1f-0"))
    cloud.preempt((A, "v2-usc1f-1"))
    send = getattr(cloud, request_)

    def send_and_sleep(argument):
        response = send(argument)
        setattr(cloud, request_, send)
        fleet.run(second, 900)
        return response

    setattr(cloud, request_, send_and_sleep)
    fleet.run(first, 10)
    assert {machine.state for machine in cloud.deleted} <= {"dead", "deleting"}
    assert len(fleet.ready) == 2


def test_lease_is_free_at_once_when_its_process_on_this_computer_is_dead_or_released_it(fleet):
    first, second = fleet.keeper("first"), fleet.keeper("second")
    first._pid = UNUSED_PID
    assert first.tick().leads and second.tick().leads
    second.release()
    assert fleet.keeper("third").tick().leads
    fleet.store.change(lambda document: replace(document, lease=None))
    first, second = fleet.keeper("first"), fleet.keeper("second")  # on two computers of the same host name
    for keeper, computer in ((first, "one"), (second, "other")):
        keeper._computer, keeper._pid = computer, UNUSED_PID
    for _ in range(6):
        assert first.tick().leads and not second.tick().leads
        fleet.cloud.advance(10)


def test_event_is_reported_once_though_another_command_writes_the_document(tmp_path):
    fleet = ManagedFleet(tmp_path, desired(pool()))
    keeper, machines = fleet.keeper(), fleet.cloud.machines
    fleet.run(keeper, 600)
    fleet.cloud.preempt((A, "v2-usc1f-0"))

    def collide(zones):
        fleet.store.change(lambda document: replace(document, zones=(*document.zones, B)))
        fleet.cloud.machines = machines
        return machines(zones)

    fleet.cloud.machines = collide
    fleet.run(keeper, 200)
    kinds = [event.kind for event in fleet.document.events]
    history = History(tmp_path / "computer" / "history.db")
    assert kinds.count("preempted") == 1 and [event.kind for event in history.events()] == kinds


def test_keeper_that_cannot_renew_its_lease_stops_acting(fleet):
    keeper, bucket = fleet.keeper(), fleet.cloud.bucket("state")
    fleet.run(keeper, 600)
    write, bucket.write = bucket.write, lambda *_: (_ for _ in ()).throw(Unreachable("no network"))
    fleet.run(keeper, 50)
    fleet.cloud.preempt((A, "v2-usc1f-0"))
    assert not keeper.tick().leads
    fleet.run(keeper, 300)
    assert len(fleet.cloud.existing) == 4 and len(fleet.ready) == 3
    bucket.write = write
    fleet.run(keeper, 600)
    assert len(fleet.ready) == 4


def test_keeper_elsewhere_takes_over_from_a_lost_head_and_returns_the_lease_to_the_next(tmp_path, monkeypatch):
    fleet = ManagedFleet(tmp_path, kept_on="head")
    first = fleet.keeper("first")
    fleet.run(first, 600)
    first.stand_back()
    assert not first.tick().leads, "the keeper on the head may take the lease for a minute"
    monkeypatch.setenv(MACHINE_VARIABLE, "gpt2-head")
    head = fleet.keeper("head")
    assert head.tick().leads and not first.tick().leads
    fleet.cloud.preempt((A, "gpt2-head"), "404")
    assert first.tick().leads, "at once, as its machine is gone"
    fleet.run(first, 600)
    assert "gpt2-head" in fleet.ready
    first.stand_back()
    fleet.run(first, LEASE_S + 20)
    assert first.tick().leads, "nobody took it"


def test_only_the_keeper_on_the_head_looks_often_while_another_one_leads(tmp_path, monkeypatch):
    fleet = ManagedFleet(tmp_path, kept_on="head")
    leader = fleet.keeper("leader")
    fleet.run(leader, 600)
    pauses = {}
    for name, machine in (("other", ""), ("head", "gpt2-head")):
        monkeypatch.setenv(MACHINE_VARIABLE, machine)
        found = pauses[name] = []
        fleet.keeper(name).run(lambda tick: None, lambda tick, found=found: len(found) == 2, found.append)
        leader.tick()
    assert max(pauses["head"]) < min(pauses["other"])


def test_up_beside_a_keeper_ends_with_its_reason_once_the_quota_is_used_up(tmp_path):
    fleet = ManagedFleet(tmp_path, desired(pool(count=5, zones=(A,))))
    fleet.cloud.quota[spec_quota(replace(fleet.document.desired.pools[0].spec, zone=A))] = 2
    leader, watcher = fleet.keeper(), fleet.keeper("other computer")
    fleet.run(leader, 300)
    before = fleet.document.desired
    change_desired(fleet.store, replace(before, revision=before.revision + 1), before)  # the user runs `up`

    def tick_both() -> None:
        for _ in range(60):
            fleet.run(leader, 10)
            tick = watcher.tick()
            assert not tick.leads and not is_up(tick)

    with pytest.raises(RunFailed, match=r"3 of pool small: us-central1-f: quota of v2-8 .* is used up"):
        tick_both()


def test_silent_zone_without_machines_holds_up_neither_the_next_zone_nor_the_end(tmp_path):
    fleet = ManagedFleet(tmp_path, desired(pool(count=2, zones=(A, B))))
    fleet.change_document(used_zones=())
    fleet.cloud.unreachable = {A}
    fleet.run(fleet.keeper(), 600)
    assert [machine.zone for machine in fleet.cloud.existing.values()] == [B, B]
    assert fleet.document.used_zones == (B,)
    fleet.cloud.unreachable = {B}
    fleet.run(fleet.keeper("other computer"), 600)
    assert len(fleet.cloud.existing) == 2, "its machines in the zone are unknown"
    fleet.cloud.unreachable = {A}
    fleet.change(down="asked")
    assert fleet.run(fleet.keeper(), 600).done


def test_zone_that_the_project_may_not_use_does_not_hold_up_the_next(tmp_path):
    fleet = ManagedFleet(tmp_path, desired(pool(count=2, zones=(A, B))))
    create = fleet.cloud.create

    def refuse_first(spec):
        if spec.zone == A:
            raise Denied(f"Permission denied on 'locations/{A}'")
        return create(spec)

    fleet.cloud.create = refuse_first
    fleet.run(fleet.keeper(), 600)
    assert [machine.zone for machine in fleet.cloud.existing.values()] == [B, B]


def test_others_see_why_machines_are_missing_and_when_they_are_requested_again(tmp_path):
    fleet = ManagedFleet(tmp_path, desired(pool(count=5, zones=(A,))))
    fleet.cloud.capacity[A], fleet.cloud.refuses_late = 2, False
    keeper = fleet.keeper()
    tick = fleet.run(keeper, 120)

    def shown() -> str:
        document, now = fleet.document, fleet.cloud.now
        listing = fleet.cloud.machines((A,))
        (missing,) = fleet_object(document, listing, (), now)["missing"]
        (line,) = [line for line in summary_lines(document, listing, now) if "missing" in line]
        assert missing["pool"] == "small" and missing["why"] in line
        return line

    assert tick.leads and re.search(r"3 v2-8 missing: .*no capacity for v2-8.*; next try (in \d+ s|now)", shown())
    keeper.release()
    assert "no capacity for v2-8" in shown() and "next try" not in shown(), "nobody tries again"
    fleet.cloud.capacity.clear()
    fleet.run(fleet.keeper(), 600)
    assert not fleet_object(fleet.document, fleet.cloud.machines((A,)), (), fleet.cloud.now)["missing"]


def test_keeper_that_ends_a_second_after_a_refusal_has_stored_it(tmp_path):
    fleet = ManagedFleet(tmp_path, desired(pool(count=3, zones=(A,))))
    fleet.cloud.quota[spec_quota(replace(fleet.document.desired.pools[0].spec, zone=A))] = 2
    keeper = fleet.keeper()
    fleet.run(keeper, 2, every=1)
    keeper.release()
    (wait,) = fleet.document.waits
    assert wait.missing == 1 and "quota of v2-8 in us-central1-f is used up" in wait.why
