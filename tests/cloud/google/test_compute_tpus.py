"""TPUs that Compute Engine creates, through the product's own calls."""

import json
from contextlib import suppress
from dataclasses import replace

import pytest

from tests.cloud.google.conftest import spec
from tests.waiting import until
from tpuswarm.catalog import accelerators
from tpuswarm.cloud.errors import Invalid, NoCapacity, NoQuota, NotFound, Taken
from tpuswarm.cloud.google.access import Access
from tpuswarm.cloud.google.instances import instance_from_spec, list_aggregated, machine_from_instance
from tpuswarm.cloud.google.project import Project
from tpuswarm.cloud.google.provider import GoogleProvider
from tpuswarm.cloud.google.quotas import allowance
from tpuswarm.cloud.google.slices import PARTS, Slices, group_from_spec, policy_from_spec, template_from_spec
from tpuswarm.cloud.protocol import Disk, TpuSpec
from tpuswarm.cloud.rehearsal.connect import send_command

ZONE, IMAGE = "us-east5-a", "ubuntu-os-accelerator-images/ubuntu-accel-2204-amd64-tpu-v5e-v5p-v6e"
SINGLE_HOSTS = [tpu for tpu in accelerators() if tpu.hosts == 1 and tpu.machine_type]


@pytest.fixture
def cloud(endpoints):
    """A provider of a project of its own, without machines."""
    cloud = GoogleProvider(Access("by-compute", endpoints))
    yield cloud
    delete_all(cloud)


def v6e(name: str, how="spot", zone=ZONE, **fields) -> TpuSpec:
    return replace(spec(name, zone, "v6e-8", how, **fields), runtime=IMAGE, api="compute")


def listed(cloud):
    return {machine.name: machine for machine in cloud.machines([]).machines}


def ready(cloud, name):
    return until(lambda: (machine := listed(cloud).get(name)) and machine.state == "ready" and machine)


def error_of(cloud, operation):
    return until(lambda: cloud.outcome(operation).error)


@pytest.mark.parametrize("tpu", SINGLE_HOSTS, ids=lambda tpu: tpu.name)
def test_type_goes_to_compute_engine_and_comes_back_under_our_name(tpu):
    body = instance_from_spec(replace(v6e("a"), type=tpu.name, runtime=tpu.image("compute")), "p")
    assert body["machineType"].endswith(f"/{tpu.machine_type}")
    assert tpu.image("compute").rpartition("/")[2] in body["disks"][0]["initializeParams"]["sourceImage"]
    shown = {**body, "zone": f"zones/{ZONE}", "status": "RUNNING"}
    machine = machine_from_instance(shown)
    assert (machine.type, machine.kind, machine.api, machine.how) == (tpu.name, "tpu", "compute", "spot")


def test_tpu_has_what_its_pool_asks_for_and_goes_without_a_trace(cloud):
    disks = f"{Project(cloud.access)._compute('zones')}/{ZONE}/disks"
    cloud.access.post("making a disk", disks, {"name": "data"})
    wanted = v6e("one", "on-demand", tags=("t",), metadata={"a": "1"}, disks=(Disk("data", True),))
    operation = cloud.create(wanted)
    machine = ready(cloud, "one")
    assert until(lambda: cloud.outcome(operation).done)
    assert (machine.type, machine.zone, machine.how, machine.fleet, machine.pool) == (
        "v6e-8",
        ZONE,
        "on-demand",
        "f1e2",
        "small",
    )
    assert len(machine.workers) == 1 and machine.workers[0].external and machine.metadata["a"] == "1"
    assert until(lambda: cloud.guest_attributes(machine, 0, "hostkeys/"))["ssh-ed25519"]
    cloud.stop(machine)
    until(lambda: listed(cloud)["one"].state == "stopped")
    cloud.start(listed(cloud)["one"])
    cloud.set_metadata(ready(cloud, "one"), {"b": "2"})
    until(lambda: listed(cloud)["one"].metadata.get("b") == "2")
    cloud.delete(machine)
    until(lambda: not listed(cloud))
    assert [disk["name"] for disk in cloud.access.get("disks", disks)["items"]] == ["data"], (
        "only the user's disk stays"
    )
    with pytest.raises(NotFound):
        cloud.delete(machine)
    cloud.access.rest("DELETE", f"{disks}/data", {})


def test_preempted_tpu_is_gone_or_dead_and_can_be_deleted(cloud, place):
    cloud.create(v6e("brief"))
    ready(cloud, "brief")
    send_command(place, "preempt", name="brief")
    until(lambda: not listed(cloud))
    # Somebody's own choice: Google only stops it, and it stays listed as TERMINATED.
    body = instance_from_spec(v6e("kept"), cloud.project)
    body["scheduling"]["instanceTerminationAction"] = "STOP"
    cloud.access.post("creating", cloud._zone_url(ZONE, "instances"), body)
    ready(cloud, "kept")
    send_command(place, "preempt", name="kept")
    dead = until(lambda: (machine := listed(cloud).get("kept")) and machine.state == "dead" and machine)
    assert (dead.said, dead.why) == ("TERMINATED", "Instance was preempted.")


def flex(name: str, zone: str, **times: float) -> TpuSpec:
    return v6e(name, "flex-start", zone, **times)


def test_flex_start_waits_for_capacity_and_runs_for_a_limited_time(cloud, place):
    zone = "us-south1-ai1b"
    send_command(place, "stockout", zone=zone)
    operation = cloud.create(flex("line", zone, max_run_s=3600.0))
    cloud.create(replace(flex("group", zone), type="v6e-16"))
    cloud.create(flex("hasty", zone, wait_s=90.0))
    until(lambda: {"waiting"} == {machine.state for machine in listed(cloud).values()} and "hasty" not in listed(cloud))
    found = listed(cloud)
    assert {name: machine.how for name, machine in found.items()} == dict.fromkeys(("line", "group"), "flex-start")
    send_command(place, "stockout", zone=zone, over=True)
    assert ready(cloud, "line").created == found["line"].created, "the same machine, no longer waiting"
    assert until(lambda: cloud.outcome(operation)) == (True, None)
    assert len(ready(cloud, "group").workers) == 4
    until(lambda: "line" not in listed(cloud))  # after an hour


def test_flex_start_that_gets_nothing_in_time_is_no_capacity(cloud, place):
    zone = "us-central1-ai1a"
    send_command(place, "stockout", zone=zone)
    error = error_of(cloud, cloud.create(flex("late", zone, wait_s=90.0)))
    send_command(place, "stockout", zone=zone, over=True)
    assert isinstance(error, NoCapacity) and not listed(cloud)


@pytest.mark.parametrize("how", ["spot", "on-demand", "reserved", "flex-start"])
def test_googles_client_knows_every_field_of_the_requests(how):
    from google.cloud import compute_v1

    wanted = replace(v6e("a", how), reservation="r" if how == "reserved" else None, disks=(Disk("data", True),))
    assert compute_v1.Instance.from_json(json.dumps(instance_from_spec(wanted, "p")))
    assert compute_v1.InstanceTemplate.from_json(json.dumps(template_from_spec(wanted, "p")))
    assert compute_v1.ResourcePolicy.from_json(json.dumps(policy_from_spec(wanted)))
    group = group_from_spec(wanted, dict.fromkeys(PARTS, "x"))
    assert compute_v1.InstanceGroupManager.from_json(json.dumps(group))


def test_refusals_say_whether_capacity_or_quota_lacks_and_leave_nothing(cloud, place):
    zone = "us-east5-b"
    send_command(place, "stockout", zone=zone)
    assert isinstance(error_of(cloud, cloud.create(v6e("full", zone=zone))), NoCapacity)
    send_command(place, "stockout", zone=zone, over=True)
    send_command(place, "quota", zone=zone, generation="v6e", limit=8)
    cloud.create(v6e("first", zone=zone))
    ready(cloud, "first")
    error = error_of(cloud, cloud.create(v6e("second", zone=zone)))
    assert isinstance(error, NoQuota) and error.limit == "PREEMPTIBLE_TPU_V6E"
    quotas = Project(cloud.access).quotas(["compute"])
    assert [allowance(quotas, "v6e-8", how, zone, "compute").limit for how in ("spot", "on-demand")] == [8, 8]
    cloud.create(replace(v6e("other", zone=zone), how="on-demand"))  # a quota of its own
    cloud.create(replace(v6e("old", zone=zone), api="tpu", runtime="v2-alpha-tpuv6e"))  # so has the TPU API
    for name in ("other", "old"):
        ready(cloud, name)
    assert sorted(listed(cloud)) == ["first", "old", "other"]
    with pytest.raises(NoQuota, match="'ct6e-standard-8t' does not exist in zone 'us-west4-a'; take this zone out"):
        cloud.create(v6e("elsewhere", zone="us-west4-a"))


SLICE = replace(v6e("quad"), type="v6e-16")


def left_of_slices(cloud):
    """Return what a slice may leave behind: its parts by kind, and its hosts and disks."""
    kinds = ("instanceTemplates", "resourcePolicies", "instanceGroupManagers", "instances", "disks")
    return {kind: found for kind in kinds if (found := list_aggregated(cloud.access, kind)[0])}


def test_slice_comes_with_all_hosts_and_goes_without_a_trace(cloud):
    operation = cloud.create(replace(SLICE, labels={"mine": "1"}, metadata={"a": "1"}))
    machine = ready(cloud, "quad")
    assert cloud.outcome(operation) == (True, None)
    assert (machine.type, machine.zone, machine.how, machine.api) == ("v6e-16", ZONE, "spot", "compute")
    assert (machine.fleet, machine.pool, machine.labels["mine"]) == ("f1e2", "small", "1")
    assert len({worker.internal for worker in machine.workers}) == 4 and machine.metadata["a"] == "1"
    keys = [until(lambda n=n: cloud.guest_attributes(machine, n, "hostkeys/"))["ssh-ed25519"] for n in range(4)]
    assert len(set(keys)) == 4, "each host has its own"
    cloud.set_metadata(machine, {"b": "2"})
    hosts = list_aggregated(cloud.access, "instances")[0]
    assert all({"key": "b", "value": "2"} in host["metadata"]["items"] for host in hosts) and len(hosts) == 4
    with pytest.raises(Invalid, match="4 hosts, which the cloud cannot stop"):
        cloud.stop(machine)
    with pytest.raises(Taken):
        cloud.create(SLICE)
    delete_all(cloud)
    assert not left_of_slices(cloud)
    with pytest.raises(NotFound):
        cloud.delete(machine)


def delete_all(cloud):
    """Delete what is listed until nothing is, as a keeper does."""
    while found := listed(cloud):
        for machine in found.values():
            if machine.state != "deleting":
                with suppress(NotFound):
                    cloud.delete(machine)
        until(lambda: all(machine.state != "deleting" for machine in listed(cloud).values()))


def test_slice_that_loses_one_host_has_ended_as_a_whole(cloud, place):
    cloud.create(SLICE)
    machine = ready(cloud, "quad")
    send_command(place, "preempt", name=machine.workers[2].name)
    dead = until(lambda: (found := listed(cloud)["quad"]).state == "dead" and found)
    assert dead.said == "TERMINATED" and "3 of 4 hosts are left" in dead.why
    delete_all(cloud)
    assert not left_of_slices(cloud)


def test_slice_without_capacity_or_quota_has_no_host_and_says_why(cloud, place):
    zone = "us-east5-b"
    send_command(place, "quota", zone=zone, generation="v6e", limit=15)
    cloud.create(replace(SLICE, zone=zone))
    dead = until(lambda: (found := listed(cloud)["quad"]).state == "dead" and found)
    assert isinstance(dead.error, NoQuota) and not dead.workers
    send_command(place, "quota", zone=zone, generation="v6e", limit=None)
    delete_all(cloud)
    send_command(place, "stockout", zone=zone)
    cloud.create(replace(SLICE, zone=zone))
    dead = until(lambda: (found := listed(cloud)["quad"]).state == "dead" and found)
    assert isinstance(dead.error, NoCapacity) and not dead.workers
    send_command(place, "stockout", zone=zone, over=True)
    delete_all(cloud)
    assert not left_of_slices(cloud)


@pytest.mark.parametrize("calls", range(3))
def test_creation_that_is_cut_short_leaves_nothing_that_is_not_listed(cloud, monkeypatch, calls):
    """The process is killed before its n-th change; whoever lists the project then can delete what it made."""

    class Killed(BaseException):
        pass

    class Dying(Slices):
        done = 0

        def _count(self):
            self.done += 1
            if self.done > calls:
                raise Killed

    real_post, dying = cloud.access.post, Dying(cloud.access)
    with monkeypatch.context() as patch:
        patch.setattr(cloud.access, "post", lambda *args, **more: (dying._count(), real_post(*args, **more))[1])
        with suppress(Killed):
            dying.create(SLICE)
    assert (set(left_of_slices(cloud)) == set()) == (not listed(cloud))
    delete_all(cloud)
    assert not left_of_slices(cloud)


def test_project_says_which_machine_types_and_images_there_are(cloud):
    project = Project(cloud.access)
    assert {"ct6e-standard-8t", "ct5p-hightpu-4t", "n2-highmem-8"} <= set(project.machine_types(ZONE))
    assert "ct6e-standard-8t" not in project.machine_types("us-west4-a")
    assert project.has_image(IMAGE) and not project.has_image(f"{IMAGE}-and-v9")
