"""Who leads a fleet: several keepers, computers that sleep, a head that is lost."""

from dataclasses import replace

from tests.fleet.cloud_model import Cloud
from tests.fleet.keepers import WANTED, A, B, begin, keeper, ready, run, store
from tests.fleet.loop import desired, pool
from tpuswarm.cloud.errors import Unreachable
from tpuswarm.fleet.keeping.history import History
from tpuswarm.fleet.keeping.keeper import HERE, TERM


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


def test_who_has_slept_in_the_middle_of_a_look_touches_nothing_that_another_has_made(tmp_path):
    """Once while the lists come, once between two things that it does."""
    for verb in ("machines", "delete"):
        cloud = Cloud()
        begin(cloud, desired(pool(count=2)))
        first, second = keeper(cloud, tmp_path / f"{verb}-1"), keeper(cloud, tmp_path / f"{verb}-2")
        run(first, cloud, 600)
        second.tick()
        cloud.preempt((A, "v2-usc1f-0"))
        cloud.preempt((A, "v2-usc1f-1"))
        call = getattr(cloud, verb)

        def asleep(what, cloud=cloud, second=second, verb=verb, call=call):
            answer = call(what)
            setattr(cloud, verb, call)
            run(second, cloud, 900)
            return answer

        setattr(cloud, verb, asleep)
        run(first, cloud, 10)
        assert {each.state for each in cloud.deleted} <= {"dead", "deleting"}, "none that the second has made"
        assert len(ready(cloud)) == 2


def test_two_computers_of_one_name_do_not_take_the_lease_from_each_other(tmp_path):
    cloud = Cloud()
    begin(cloud)
    first, second = keeper(cloud, tmp_path / "1"), keeper(cloud, tmp_path / "2")
    for each, name in ((first, "one"), (second, "other")):
        each._computer, each._pid = name, 2**22 + 1  # that no process has here
    for _ in range(6):
        assert first.tick().leads and not second.tick().leads
        cloud.advance(10)


def test_the_lease_of_a_process_that_is_dead_here_is_free_at_once(tmp_path):
    cloud = Cloud()
    begin(cloud)
    first = keeper(cloud, tmp_path / "1")
    first._pid = 2**22 + 1
    assert first.tick().leads and keeper(cloud, tmp_path / "2").tick().leads


def test_what_happens_while_another_command_writes_is_told_all_the_same(tmp_path):
    cloud = Cloud()
    begin(cloud, desired(pool()))
    keeping = keeper(cloud, tmp_path)
    run(keeping, cloud, 600)
    cloud.preempt((A, "v2-usc1f-0"))
    look = cloud.machines

    def collide(zones):
        store(cloud).change(lambda found: replace(found, zones=(*found.zones, B)))
        cloud.machines = look
        return look(zones)

    cloud.machines = collide
    run(keeping, cloud, 200)
    told = [each.kind for each in store(cloud).load().events]
    assert told.count("preempted") == 1 and [each.kind for each in History(tmp_path / "history.db").events()] == told


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


def test_a_keeper_elsewhere_takes_over_from_a_head_that_is_gone_and_leaves_it_to_the_next(tmp_path, monkeypatch):
    cloud = Cloud()
    begin(cloud, replace(WANTED, kept_on="head"))
    first = keeper(cloud, tmp_path / "1")
    run(first, cloud, 600)
    first.stand_back()
    assert not first.tick().leads  # the one on the head may have the lease, for a minute
    monkeypatch.setenv(HERE, "gpt2-head")
    head = keeper(cloud, tmp_path / "2")
    assert head.tick().leads and not first.tick().leads
    cloud.preempt((A, "gpt2-head"), "404")
    assert first.tick().leads  # at once: it lived on a machine that is gone
    run(first, cloud, 600)
    assert "gpt2-head" in ready(cloud)
    first.stand_back()
    run(first, cloud, TERM + 20)
    assert first.tick().leads  # nobody took it
