"""The keeper: killed anywhere, begun again anywhere; two of them; damaged state; clocks that jump."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.fleet.cloud_model import Cloud, Killed
from tests.fleet.loop import desired, pool, vm
from tpuswarm.cloud.errors import Changed, Unreachable
from tpuswarm.cloud.protocol import Machine
from tpuswarm.fleet.core.desired import Budget, DownWhen
from tpuswarm.fleet.keeping.clock import Clock
from tpuswarm.fleet.keeping.document import Damaged, Document, LocalBucket, Store, path_of
from tpuswarm.fleet.keeping.history import History
from tpuswarm.fleet.keeping.keeper import TERM, Keeper, Tick

A, B = "us-central1-f", "us-central1-b"
WANTED = desired(pool("small", 2, (A, B)), pool("line", 1, (B,), "queued"), vm("head"))


def store(cloud: Cloud) -> Store:
    return Store(cloud.bucket("state"), "gpt2", "gs://state")


def begin(cloud: Cloud, wanted=WANTED) -> None:
    store(cloud).change(lambda _: Document("gpt2", "google", "model", wanted, wanted.zones))


def ask(cloud: Cloud, **what: object) -> None:
    store(cloud).change(lambda found: replace(found, desired=replace(found.desired, **what)))


def keeper(cloud: Cloud, folder: Path) -> Keeper:
    clock = Clock(wall=lambda: cloud.now, steady=lambda: cloud.now)
    return Keeper(cloud, store(cloud), History(folder / "history.db"), clock, threads=1)


def run(keeping: Keeper, cloud: Cloud, seconds: float, every: float = 10.0) -> Tick:
    end = cloud.now + seconds
    while True:
        tick = keeping.tick()
        cloud.advance(every)
        if cloud.now >= end:
            return tick


def ready(cloud: Cloud) -> list[str]:
    return sorted(each.name for each in cloud.there.values() if each.state == "ready")


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


def test_the_second_keeper_watches_and_takes_over(tmp_path):
    cloud = Cloud()
    begin(cloud)
    first, second = keeper(cloud, tmp_path / "1"), keeper(cloud, tmp_path / "2")
    for _ in range(40):
        assert first.tick().leads and not second.tick().leads
        cloud.advance(10)
    assert len(ready(cloud)) == 4
    cloud.preempt((A, "v2-usc1f-0"))
    stood = cloud.now
    while not second.tick().leads:  # the first is gone
        cloud.advance(5)
    assert TERM - 20 <= cloud.now - stood <= TERM + 10  # it was renewed up to 20 s before
    run(second, cloud, 600)
    assert len(ready(cloud)) == 4
    assert not first.tick().leads  # it has come back, and sees who leads


def test_a_lease_that_was_given_back_is_free_at_once(tmp_path):
    cloud = Cloud()
    begin(cloud)
    first = keeper(cloud, tmp_path / "1")
    assert first.tick().leads
    first.release()
    assert keeper(cloud, tmp_path / "2").tick().leads


def test_a_keeper_that_cannot_renew_its_lease_stops_acting(tmp_path):
    cloud = Cloud()
    begin(cloud)
    keeping = keeper(cloud, tmp_path)
    run(keeping, cloud, 600)
    bucket = cloud.bucket("state")
    write, bucket.write = bucket.write, lambda *_: (_ for _ in ()).throw(Unreachable("no network"))
    run(keeping, cloud, 50)
    cloud.preempt((A, "v2-usc1f-0"))
    assert not keeping.tick().leads
    run(keeping, cloud, 300)
    assert len(cloud.there) == 4 and len(ready(cloud)) == 3
    bucket.write = write
    run(keeping, cloud, 600)
    assert len(ready(cloud)) == 4


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
        cloud.advance(5)
        tick = keeping.tick()
        assert tick.document.ledger.dollars == pytest.approx(before, abs=0.1)
        assert not tick.plan.actions and "the clock has jumped by" in tick.document.events[-1].text


def test_damaged_state_is_a_sentence(tmp_path):
    cloud = Cloud()
    begin(cloud)
    bucket = cloud.bucket("state")
    bucket.write(path_of("gpt2"), b"{broken", 1)
    with pytest.raises(Damaged, match=r"gs://state/tpuswarm/fleets/gpt2\.json is damaged \(7 bytes\): `tpuswarm up`"):
        store(cloud).load()


def test_files_of_one_computer_are_a_bucket_too(tmp_path):
    bucket = LocalBucket(tmp_path)
    assert bucket.read("a/b.json") is None
    assert bucket.write("a/b.json", b"one\ntwo", 0) == 1
    with pytest.raises(Changed):
        bucket.write("a/b.json", b"other", 0)
    assert bucket.write("a/b.json", b"three", 1) == 2
    assert bucket.read("a/b.json") == (b"three", 2)
    bucket.delete("a/b.json")
    assert bucket.read("a/b.json") is None


def test_a_history_that_cannot_be_kept_is_said_and_nothing_else(tmp_path):
    cloud = Cloud()
    begin(cloud)
    (tmp_path / "file").write_text("")
    history = History(tmp_path / "file" / "history.db")
    clock = Clock(wall=lambda: cloud.now, steady=lambda: cloud.now)
    run(Keeper(cloud, store(cloud), history, clock, threads=1), cloud, 600)
    assert len(ready(cloud)) == 4 and history.trouble and "File exists" in history.trouble
    broken = tmp_path / "broken.db"
    broken.write_bytes(b"no database at all" * 100)
    assert History(broken).memory() is None and History(broken).events() == []
    run(keeper(cloud, tmp_path), cloud, 30)


def test_events_of_a_machine_are_remembered(tmp_path):
    cloud = Cloud()
    begin(cloud)
    run(keeper(cloud, tmp_path), cloud, 600)
    cloud.preempt((A, "v2-usc1f-0"))
    run(keeper(cloud, tmp_path / "x"), cloud, 30)
    run(keeping := keeper(cloud, tmp_path), cloud, 600)
    del keeping
    kinds = [each.kind for each in History(tmp_path / "history.db").events("v2-usc1f-0")]
    assert kinds[:2] == ["asked", "ready"] and "ready" in kinds[2:]
