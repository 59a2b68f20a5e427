"""Which of several keepers leads a fleet, also when computers sleep or the head is lost."""

from dataclasses import replace

import pytest

from tests.fleet.loop import A, B, ManagedFleet, desired, pool
from tpuswarm.cloud.errors import Unreachable
from tpuswarm.fleet.keeping.history import History
from tpuswarm.fleet.keeping.keeper import HERE, TERM

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
    assert TERM - 20 <= cloud.now - stopped_at <= TERM + 10, "it was renewed up to 20 s before"
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


def test_lease_is_free_at_once_when_its_process_is_dead_or_released_it(fleet):
    first, second = fleet.keeper("first"), fleet.keeper("second")
    first._pid = UNUSED_PID
    assert first.tick().leads and second.tick().leads
    second.release()
    assert fleet.keeper("third").tick().leads


def test_lease_is_not_taken_from_another_computer_of_the_same_host_name(fleet):
    first, second = fleet.keeper("first"), fleet.keeper("second")
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
    monkeypatch.setenv(HERE, "gpt2-head")
    head = fleet.keeper("head")
    assert head.tick().leads and not first.tick().leads
    fleet.cloud.preempt((A, "gpt2-head"), "404")
    assert first.tick().leads, "at once, as its machine is gone"
    fleet.run(first, 600)
    assert "gpt2-head" in fleet.ready
    first.stand_back()
    fleet.run(first, TERM + 20)
    assert first.tick().leads, "nobody took it"
