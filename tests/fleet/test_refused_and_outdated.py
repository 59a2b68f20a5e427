"""Plans after a refusal for quota or capacity, and after a change of the file that machines do not follow."""

from dataclasses import replace

import pytest

from tests.fleet.loop import EUROPE, A, B, C, pool, started, vm
from tpuswarm.cloud.errors import NoCapacity
from tpuswarm.fleet.decide.actions import Create, Grow
from tpuswarm.fleet.decide.limits import spec_quota


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
