"""The provider against the local cloud, through Google's own clients; a project's set-up: tests/fleet."""

from dataclasses import replace

import pytest

from tests.cloud.google.conftest import (
    AVAILABLE,
    HEAD,
    HIDDEN,
    NO_QUOTA,
    STOCKOUT,
    UNREACHABLE,
    in_state,
    only_machine,
    spec,
)
from tests.local_cloud import slow_clock
from tests.waiting import until
from tpuswarm.cloud.errors import Changed, Invalid, NoCapacity, NoQuota, NotFound, NotSignedIn, Taken
from tpuswarm.cloud.google.access import Access
from tpuswarm.cloud.google.endpoints import Endpoints
from tpuswarm.cloud.google.project import Project
from tpuswarm.cloud.google.provider import GoogleProvider
from tpuswarm.cloud.rehearsal.connect import send_command

PARENT = f"projects/my-project/locations/{AVAILABLE}"


def test_slice_is_one_machine_with_several_workers(google, place):
    with slow_clock(place):
        operation = google.create(spec("n1", type_="v2-32", how="spot", labels={"mine": "1"}, external_ips=False))
        assert only_machine(google).state == "creating" and not google.outcome(operation).error
    machine = in_state(google, "ready")
    assert google.outcome(operation) == (True, None)
    assert (machine.name, machine.zone, machine.type, machine.how) == ("n1", AVAILABLE, "v2-32", "spot")
    assert (machine.fleet, machine.pool, machine.labels["mine"]) == ("f1e2", "small", "1")
    assert len(machine.workers) == 4 and all(worker.internal and not worker.external for worker in machine.workers)
    assert machine.healthy and machine.request is None
    first, last = (until(lambda at=at: google.guest_attributes(machine, at, "hostkeys/")) for at in (0, 3))
    assert first["ssh-ed25519"] and last["ssh-ed25519"] and first != last
    assert google.guest_attributes(machine, 0, "nothing/here") == {}
    with pytest.raises(Taken):
        google.create(spec("n1"))
    with pytest.raises(Invalid, match="slice of 4 hosts"):
        google.stop(machine)
    google.delete(machine)
    until(lambda: only_machine(google) is None)
    with pytest.raises(NotFound):
        google.delete(machine)


def test_on_demand_machine_stops_starts_and_takes_metadata(google):
    google.create(spec("n1", metadata={"startup-script": "true"}))
    google.stop(in_state(google, "ready"))
    google.start(in_state(google, "stopped"))
    machine = in_state(google, "ready")
    with pytest.raises(Invalid, match="could not be started again"):
        google.stop(replace(machine, how="spot"))
    operation = google.set_metadata(machine, {"ssh-keys": "me:key"})
    until(lambda: google.outcome(operation).done)
    assert dict(google.access.tpu.get_node(name=f"{PARENT}/nodes/n1").metadata) == {
        "startup-script": "true",
        "ssh-keys": "me:key",
        "enable-guest-attributes": "TRUE",
        "enable-oslogin": "FALSE",
    }


@pytest.mark.parametrize("how", ["queued", "spot"])
def test_queued_request_and_its_node_are_one_machine(google, place, how):
    google.create(spec("n1", zone=STOCKOUT, how=how, wait_s=7200.0))
    waiting = only_machine(google, STOCKOUT)
    assert (waiting.state, waiting.name, waiting.request, waiting.fleet) == ("waiting", "n1", "n1", "f1e2")
    send_command(place, "stockout", zone=STOCKOUT, over=True)
    machine = in_state(google, "ready", STOCKOUT)
    send_command(place, "stockout", zone=STOCKOUT)
    assert (machine.name, machine.request, machine.how) == ("n1", "n1", how)
    if how == "spot":
        send_command(place, "preempt", name="n1")
        machine = in_state(google, "dead", STOCKOUT)
    google.delete(machine)
    until(lambda: only_machine(google, STOCKOUT) is None)
    assert not list(google.access.tpu.list_queued_resources(parent=f"projects/my-project/locations/{STOCKOUT}"))


def test_zones_without_capacity_quota_access_or_answer(google):
    operation = google.create(spec("n1", zone=STOCKOUT))
    error = until(lambda: google.outcome(operation).error)
    assert isinstance(error, NoCapacity) and str(error).startswith("create of n1: There is no more capacity")
    words = r"creating n1 in us-central1-c: Quota limit 'TPUV2sPerProject.*request more"
    with pytest.raises(NoQuota, match=words) as refused:
        google.create(spec("n1", zone=NO_QUOTA))
    assert refused.value.limit == "TPUV2sPerProjectPerZoneForTPUAPI"
    with pytest.raises(NoQuota, match="was granted"):
        google.create(spec("n1", zone=HIDDEN))
    listing = google.machines([AVAILABLE, HIDDEN])
    assert HIDDEN not in listing.unreachable and UNREACHABLE in listing.unreachable


def test_exhausted_addresses_of_a_region_are_a_quota_by_name(google, place):
    send_command(place, "quota", zone="europe-west4", generation="IN_USE_ADDRESSES", limit=5)
    google.create(spec("n1", type_="v2-32"))
    google.create(spec("inside", type_="v2-32", external_ips=False))
    failed = google.create(spec("n2", type_="v2-32"))
    error = until(lambda: google.outcome(failed).error)
    google.create(spec("n3", type_="v2-32", how="queued"))
    queued = until(lambda: next((one for one in google.machines([AVAILABLE]).machines if one.said == "FAILED"), None))
    google.create(HEAD)
    with pytest.raises(NoQuota) as refused:
        google.create(replace(HEAD, name="second"))
    for found in (error, queued.error, refused.value):
        assert isinstance(found, NoQuota) and found.limit == "IN_USE_ADDRESSES" and "external_ips = false" in str(found)
    quotas = Project(google.access).region_quotas("europe-west4")
    assert quotas["IN_USE_ADDRESSES"] == (5, 5) and quotas["INSTANCES"].usage == 9
    send_command(place, "quota", zone="europe-west4", generation="IN_USE_ADDRESSES", limit=None)


def test_vm_is_created_stopped_started_changed_and_deleted(google):
    operation = google.create(replace(HEAD, ip_forward=True, tags=("t",), metadata={"a": "1"}))
    machine = in_state(google, "ready")
    until(lambda: google.outcome(operation) == (True, None))
    assert (machine.name, machine.zone, machine.kind, machine.type) == ("head", AVAILABLE, "vm", "n2-highmem-2")
    assert (machine.fleet, machine.pool, machine.how) == ("f1e2", "head", "on-demand")
    assert machine.workers[0].internal and machine.workers[0].external and machine.created > 0
    with pytest.raises(Taken):
        google.create(HEAD)
    google.stop(machine)
    google.start(in_state(google, "stopped"))
    machine = in_state(google, "ready")
    operation = google.set_metadata(machine, {"b": "2"})
    until(lambda: google.outcome(operation).done)
    with pytest.raises(Invalid, match="must be larger than existing size '20' GB"):
        google.grow_disk(machine, 20)
    operation = google.grow_disk(machine, 30)
    until(lambda: google.outcome(operation).done and only_machine(google).disk_gib == 30)
    items = google.access.get("looking", google._instance_url(machine))["metadata"]["items"]
    assert {item["key"]: item["value"] for item in items} == {
        "a": "1",
        "b": "2",
        "enable-guest-attributes": "TRUE",
        "enable-oslogin": "FALSE",
    }
    assert google.guest_attributes(machine, 0, "nothing/") == {}
    assert until(lambda: google.guest_attributes(machine, 0, "hostkeys/"))["ssh-ed25519"]
    google.delete(machine)
    until(lambda: only_machine(google) is None)
    with pytest.raises(NotFound):
        google.delete(machine)


def test_object_is_written_only_over_the_generation_read(google):
    Project(google.access).make_bucket("shared", "us-central1", {"tpuswarm": "mine"})
    first, second = google.bucket("shared"), google.bucket("shared")
    assert first.read("fleet.json") is None
    one = first.write("fleet.json", b"one", 0)
    with pytest.raises(Changed):
        second.write("fleet.json", b"two", 0)
    assert second.read("fleet.json") == (b"one", one)
    two = second.write("fleet.json", b"two", one)
    assert two != one
    with pytest.raises(Changed):
        first.write("fleet.json", b"three", one)
    assert first.write("fleet.json", b"two", one) == two, "the same bytes: the answer was lost, not the race"
    with pytest.raises(NotFound, match="there is no bucket absent"):
        google.bucket("absent").read("fleet.json")


def test_cloud_nat_is_found_for_its_network_and_region(google):
    project, network = Project(google.access), "projects/my-project/global/networks/default"
    assert not project.has_nat("default", "us-east5")
    url = google.access.url("compute.googleapis.com", "compute/v1/projects/my-project/regions/us-east5/routers")
    google.access.post("making a router", url, {"name": "r", "network": network, "nats": [{"name": "n"}]})
    assert project.has_nat("default", "us-east5")
    assert not project.has_nat("other", "us-east5") and not project.has_nat("default", "us-central1")


def test_types_runtimes_and_forgotten_operations(google):
    assert "v2-8" in google.types(AVAILABLE)
    assert "tpu-ubuntu2204-base" in google.runtimes(AVAILABLE)
    assert google.outcome(f"{PARENT}/operations/operation-0") == (True, None)


def test_wrong_token_is_refused_with_the_way_to_sign_in(endpoints):
    stranger = GoogleProvider(Access("my-project", Endpoints(endpoints.rpc, endpoints.http, "wrong")))
    with pytest.raises(NotSignedIn, match="gcloud auth application-default login"):
        stranger.types(AVAILABLE)
