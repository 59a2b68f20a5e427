"""The keeper: killed anywhere, begun again anywhere; two of them; damaged state; clocks that jump."""

import errno
from dataclasses import replace

import pytest

from tests.fleet.cloud_model import Cloud, Killed
from tests.fleet.keepers import WANTED, A, ask, begin, keeper, ready, run, store
from tests.fleet.loop import desired, pool
from tpuswarm.cloud.errors import Denied, Unreachable
from tpuswarm.cloud.protocol import Machine
from tpuswarm.fleet.core.desired import Budget, DownWhen
from tpuswarm.fleet.core.jobs import Job, Seat
from tpuswarm.fleet.core.memory import Work
from tpuswarm.fleet.keeping.clock import Clock
from tpuswarm.fleet.keeping.document import (
    Document,
    DocumentStore,
    LocalBucket,
    path_of,
    with_job,
)
from tpuswarm.fleet.keeping.history import History
from tpuswarm.fleet.keeping.keeper import Keeper


def test_it_brings_a_fleet_up_and_down(tmp_path):
    cloud = Cloud()
    begin(cloud)
    keeping = keeper(cloud, tmp_path)
    tick = run(keeping, cloud, 600)
    assert ready(cloud) == ["gpt2-head", "v2-usc1b-0", "v2-usc1f-0", "v2-usc1f-1"] and tick.converged
    assert [each.kind for each in tick.document.events].count("ready") == 4
    ask(cloud, down="asked")
    assert not keeping.tick().done
    assert run(keeping, cloud, 200).done and cloud.there == {}


def test_calls_do_not_grow_with_machines(tmp_path):
    counts = []
    for count in (2, 60):
        cloud = Cloud()
        begin(cloud, desired(pool(count=count)))
        keeping = keeper(cloud, tmp_path / str(count))
        run(keeping, cloud, 600)
        cloud.calls.clear()
        keeping.tick()
        counts.append(len(cloud.calls))
    assert counts == [1, 1]


def test_killed_at_every_effect_and_begun_again_on_any_computer(tmp_path):
    """Every effect of a life with preemptions, scaling and an end, before and after it, on the same or another disk."""

    def life(cloud: Cloud, name: str, same_disk: bool) -> int:
        """The whole life, with one kill where the fuse has it; how often it was killed."""
        kills = 0
        steps = [
            lambda: None,
            lambda: cloud.preempt((A, "v2-usc1f-0")),
            lambda: cloud.capacity.update({A: 0}),
            lambda: cloud.preempt(next(key for key in cloud.there if key[1].startswith("v2")), "404"),
            lambda: ask(cloud, pools=(replace(WANTED.pools[0], count=1), *WANTED.pools[1:])),
            lambda: ask(cloud, down="asked"),
        ]
        keeping = keeper(cloud, tmp_path / f"{name}-0")
        for step in steps:
            armed, cloud.fuse.left = cloud.fuse.left, None
            step()
            cloud.fuse.left = armed
            for _ in range(3):
                try:
                    run(keeping, cloud, 750, every=50.0)
                    break
                except Killed:
                    kills += 1
                    keeping = keeper(cloud, tmp_path / (f"{name}-0" if same_disk else f"{name}-{kills}"))
            wanted = store(cloud).load()
            assert wanted
            if wanted.desired.down is None:
                assert len(ready(cloud)) == sum(each.count for each in wanted.desired.pools), (step, cloud.there)
        assert cloud.there == {}
        return kills

    begin(whole := Cloud())
    whole.fuse.count = 0
    life(whole, "whole", True)
    effects = whole.fuse.count
    assert 30 < effects < 200
    for number in range(0, effects, 2):
        begin(cloud := Cloud())
        cloud.fuse.left, cloud.fuse.after = number, number % 4 == 0
        assert life(cloud, f"{number}", same_disk=number % 8 < 4) <= 1


def test_idleness_is_what_somebody_has_watched(tmp_path):
    cloud = Cloud()
    begin(cloud, replace(WANTED, down_when=DownWhen(idle_s=1800.0)))

    def work(phase: str, busy_at: float) -> None:
        job = Job("train", "small", "python train.py", "preempted", (Seat("small", phase=phase),))
        store(cloud).change(lambda found: replace(found, work=Work(busy_at=busy_at), jobs=(job,)))

    run(keeper(cloud, tmp_path), cloud, 600)
    work("running", cloud.now)
    cloud.advance(7200)  # nobody has looked, and it runs
    keeping = keeper(cloud, tmp_path)
    assert run(keeping, cloud, 3600).document.desired.down is None
    work("done", cloud.now - 3600)
    cloud.advance(7200)  # the computer sleeps
    assert run(keeping, cloud, 1700).document.desired.down is None
    assert run(keeping, cloud, 200).document.desired.down == "down_when: nothing has run for 30 min"


def test_what_ends_a_fleet_is_stored_before_anything_is_deleted(tmp_path):
    cloud = Cloud()
    begin(cloud, replace(WANTED, down_when=DownWhen(at=cloud.now + 700)))
    keeping = keeper(cloud, tmp_path)
    run(keeping, cloud, 600)
    delete = cloud.delete

    def watched(machine: Machine) -> str:
        assert b"its date has come" in cloud.bucket("state").objects[path_of("gpt2")].data
        return delete(machine)

    cloud.delete = watched
    run(keeping, cloud, 600)
    found = store(cloud).load()
    assert cloud.there == {} and cloud.deleted and found and found.desired.down == "down_when: its date has come"


def test_costs_are_counted_while_nobody_looks_and_after_a_change_of_keepers(tmp_path):
    cloud = Cloud()
    begin(cloud, replace(desired(pool(count=2)), budget=Budget()))
    run(keeper(cloud, tmp_path / "1"), cloud, 600)
    cloud.advance(36_000)
    tick = run(keeper(cloud, tmp_path / "2"), cloud, 100)
    spent = tick.document.ledger.pools["small"]
    assert spent.hours == pytest.approx(2 * (cloud.now - 1_800_000_000) / 3600, rel=0.03)
    assert spent.dollars == pytest.approx(spent.hours * 1.35)


def test_a_jump_of_the_clock_costs_nothing_and_deletes_nothing(tmp_path):
    cloud, ahead = Cloud(), [0.0]
    begin(cloud)
    clock = Clock(wall=lambda: cloud.now + ahead[0], steady=lambda: cloud.now)
    keeping = Keeper(cloud, store(cloud), History(tmp_path / "history.db"), clock, threads=1)
    run(keeping, cloud, 600)
    before = keeping.tick().document.ledger.dollars
    for jump in (86_400.0, -200_000.0):
        ahead[0] += jump
        cloud.advance(1)
        tick = keeping.tick()
        assert not tick.plan.actions and "the clock has jumped by" in tick.document.events[-1].text
        for _ in range(20):  # also where nothing is stored in the look that sees it
            assert tick.document.ledger.dollars == pytest.approx(before, abs=0.1)
            cloud.advance(1)
            tick = keeping.tick()


def test_a_jump_of_the_clock_is_not_forgotten_where_the_cloud_does_not_answer(tmp_path):
    cloud, ahead = Cloud(), [0.0]
    begin(cloud)
    clock = Clock(wall=lambda: cloud.now + ahead[0], steady=lambda: cloud.now)
    keeping = Keeper(cloud, store(cloud), History(tmp_path / "history.db"), clock, threads=1)
    run(keeping, cloud, 600)
    before = keeping.tick().document.ledger.dollars
    ahead[0] += 86_400.0
    bucket = cloud.bucket("state")
    bucket.reachable = False
    with pytest.raises(Unreachable):
        keeping.tick()
    bucket.reachable = True
    tick = run(keeping, cloud, 30)
    assert tick.document.ledger.dollars == pytest.approx(before, abs=0.1) and not tick.plan.actions


def test_a_keeper_in_the_background_outlives_what_a_person_has_to_mend(tmp_path):
    cloud = Cloud()
    begin(cloud)
    look, said, slept = cloud.machines, [], []

    def refuse(zones):
        cloud.machines = look
        raise Denied("listing TPUs: permission denied")

    cloud.machines = refuse
    keeping = keeper(cloud, tmp_path)
    keeping.told = said.append
    with pytest.raises(Denied):
        keeping.run(lambda tick: None, lambda tick: True, slept.append)
    cloud.machines = refuse
    keeping.run(lambda tick: None, lambda tick: True, slept.append, patient=True)
    assert slept == [300.0] and said[0].endswith("listing TPUs: permission denied; asked again in 5 min")


def test_a_full_disk_stops_no_keeper(tmp_path, monkeypatch):
    """Nothing is done while the document cannot be written, and all of it afterwards."""
    cloud, said = Cloud(), []
    local = DocumentStore(LocalBucket(tmp_path), "gpt2", "here")
    local.change(lambda _: Document("gpt2", "google", "model", WANTED, WANTED.zones))
    clock = Clock(wall=lambda: cloud.now, steady=lambda: cloud.now)
    keeping = Keeper(cloud, local, History(tmp_path / "history.db"), clock, threads=1)
    keeping.told = said.append
    with monkeypatch.context() as full:
        full.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left on device")))
        keeping.run(lambda tick: None, lambda tick: cloud.now > 1_800_000_100, cloud.advance)
        assert cloud.there == {} and "gpt2.json cannot be written: No space left on device" in said[0]
    keeping.run(lambda tick: None, lambda tick: tick.converged, cloud.advance)
    assert len(ready(cloud)) == 4


def test_a_fleet_is_not_done_while_a_job_of_it_is_not_over(tmp_path):
    """Another job was stored, and who carries jobs out has not looked since."""
    cloud = Cloud()
    begin(cloud, replace(desired(pool(count=1)), down_when=DownWhen(done=True)))
    keeping = keeper(cloud, tmp_path)
    run(keeping, cloud, 300)
    old = Job("old", "small", "true", "never", (Seat("small", phase="done"),))
    store(cloud).change(lambda found: replace(with_job(found, old), work=Work(done=True)))
    store(cloud).change(lambda found: with_job(found, replace(old, name="new", seats=(Seat("small"),))))
    assert store(cloud).load().work.done is False
    store(cloud).change(lambda found: replace(found, work=Work(done=True)))
    assert run(keeping, cloud, 100).document.desired.down is None
    store(cloud).change(lambda found: replace(with_job(found, replace(old, name="new")), work=Work(done=True)))
    assert run(keeping, cloud, 300).document.desired.down == "down_when: the work is done"
