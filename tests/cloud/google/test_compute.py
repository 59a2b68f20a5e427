"""VMs, buckets and a project's set-up against the local cloud, through Google's own clients."""

import dataclasses

import pytest

from tests.cloud.google.conftest import FINE, until
from tpuswarm.cloud.errors import Changed, NotFound, Taken
from tpuswarm.cloud.google.access import Access
from tpuswarm.cloud.google.buckets import bucket_url
from tpuswarm.cloud.google.firewall import joins, lets_strangers_in, wanted
from tpuswarm.cloud.google.project import APIS, Project
from tpuswarm.cloud.protocol import VmSpec

HEAD = VmSpec("head", FINE, "n2-highmem-2", "f1e2", "head", "ubuntu-os-cloud/ubuntu-2404-lts-amd64", 20)


def only(google):
    found = google.machines([]).machines
    assert len(found) <= 1
    return found[0] if found else None


def ready(google):
    return until(lambda: (found := only(google)) and found.state == "ready" and found)


@pytest.fixture(scope="module")
def project(endpoints):
    return Project(Access("set-up", endpoints))


def test_a_vm_from_its_creation_to_its_end(google):
    operation = google.create(dataclasses.replace(HEAD, ip_forward=True, tags=("t",), metadata={"a": "1"}))
    machine = ready(google)
    until(lambda: google.outcome(operation) == (True, None))
    assert (machine.name, machine.zone, machine.kind, machine.type) == ("head", FINE, "vm", "n2-highmem-2")
    assert (machine.fleet, machine.pool, machine.how) == ("f1e2", "head", "on-demand")
    assert machine.workers[0].internal and machine.workers[0].external and machine.created > 0
    with pytest.raises(Taken):
        google.create(HEAD)
    google.stop(machine)
    google.start(until(lambda: (found := only(google)).state == "stopped" and found))
    machine = ready(google)
    until(lambda: google.outcome(google.set_metadata(machine, {"b": "2"})).done)
    items = google._instance("looking", machine)["metadata"]["items"]
    assert {each["key"]: each["value"] for each in items} == {
        "a": "1",
        "b": "2",
        "enable-guest-attributes": "TRUE",
        "enable-oslogin": "FALSE",
    }
    assert google.guest_attributes(machine, 0, "nothing/") == {}
    google.delete(machine)
    until(lambda: only(google) is None)
    with pytest.raises(NotFound):
        google.delete(machine)


def test_objects_are_written_only_by_who_read_them_last(google, project):
    project.make_bucket("shared", "us-central1", {"tpuswarm": "mine"})
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
    assert first.write("fleet.json", b"two", one) == two, "the same bytes are there: its answer was lost, not the race"
    first.delete("fleet.json")
    first.delete("fleet.json")
    assert first.read("fleet.json") is None


def test_a_bucket_that_is_not_there_is_not_taken_for_an_empty_one(google):
    with pytest.raises(NotFound, match="there is no bucket absent"):
        google.bucket("absent").read("fleet.json")


def test_a_bucket_knows_its_region_and_takes_labels(project):
    assert project.bucket_region("here") is None
    project.make_bucket("here", "europe-west4", {"tpuswarm": "mine"})
    assert project.bucket_region("here") == "europe-west4"
    with pytest.raises(Taken):
        project.make_bucket("here", "europe-west4", {})
    project.label_bucket("here", {"tpuswarm-fleet": "f1e2"})
    project.label_bucket("here", {"tpuswarm-fleet": "another"})
    found = project._access.get("looking", bucket_url(project._access, "here"))
    assert found["labels"] == {"tpuswarm": "mine", "tpuswarm-fleet": "f1e2"}


def test_a_network_of_the_fleets_own_joins_its_machines_and_nobody_else(project):
    assert not project.has_network("own")
    project.make_network("own", "tpuswarm mine")
    assert project.has_network("own")
    assert project.subnetwork("own", "us-central1") and project.subnetwork("absent", "us-central1") is None
    for rule in wanted("own", "tpuswarm-mine", "tpuswarm mine"):
        project.make_rule(rule)
        assert rule in project.rules()
        with pytest.raises(Taken):
            project.make_rule(rule)
    assert joins(project.rules(), "own", ["tpuswarm-mine"])
    assert lets_strangers_in(project.rules(), "own", ["tpuswarm-mine"]) == []


def test_apis_billing_quota_and_account(project):
    assert project.apis() >= set(APIS)
    project.turn_on("tpu.googleapis.com")
    assert project.billing()
    assert any(each.id.startswith("TPUV2s") for each in project.quotas())
    assert project.default_account()
