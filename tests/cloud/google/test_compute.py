"""VMs and objects against the local cloud, through Google's own clients; a project's set-up: tests/fleet."""

from dataclasses import replace

import pytest

from tests.cloud.google.conftest import AVAILABLE, HEAD, in_state, only_machine
from tests.local_cloud import until
from tpuswarm.cloud.errors import Changed, Invalid, NotFound, Taken
from tpuswarm.cloud.google.project import Project


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
