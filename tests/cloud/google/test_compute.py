"""VMs, buckets and a project's set-up against the local cloud, through Google's own clients."""

from dataclasses import replace

import pytest

from tests.cloud.google.conftest import AVAILABLE, in_state, only_machine
from tests.local_cloud import until
from tpuswarm.cloud.errors import Changed, NotFound, Taken
from tpuswarm.cloud.google.access import Access
from tpuswarm.cloud.google.buckets import bucket_url
from tpuswarm.cloud.google.firewall import fleet_rules, opens_all_ports, rules_open_to_strangers
from tpuswarm.cloud.google.project import APIS, Project
from tpuswarm.cloud.protocol import VmSpec

HEAD = VmSpec("head", AVAILABLE, "n2-highmem-2", "f1e2", "head", "ubuntu-os-cloud/ubuntu-2404-lts-amd64", 20)


@pytest.fixture(scope="module")
def project(endpoints):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tpuswarm.cloud.google.project.POLL_INTERVAL_S", 0.02)
        yield Project(Access("set-up", endpoints))


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
    items = google._instance("looking", machine)["metadata"]["items"]
    assert {item["key"]: item["value"] for item in items} == {
        "a": "1",
        "b": "2",
        "enable-guest-attributes": "TRUE",
        "enable-oslogin": "FALSE",
    }
    assert google.guest_attributes(machine, 0, "nothing/") == {}
    google.delete(machine)
    until(lambda: only_machine(google) is None)
    with pytest.raises(NotFound):
        google.delete(machine)


def test_object_is_written_only_over_the_generation_read(google, project):
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
    assert first.write("fleet.json", b"two", one) == two, "the same bytes: the answer was lost, not the race"
    with pytest.raises(NotFound, match="there is no bucket absent"):
        google.bucket("absent").read("fleet.json")


def test_bucket_has_a_region_and_labels(project):
    assert project.find_bucket("here") is None
    project.make_bucket("here", "europe-west4", {"tpuswarm": "mine"})
    assert project.find_bucket("here").region == "europe-west4"
    with pytest.raises(Taken):
        project.make_bucket("here", "europe-west4", {})
    project.label_bucket("here", {"tpuswarm-fleet": "f1e2"})
    project.label_bucket("here", {"tpuswarm-fleet": "another"})
    bucket = project._access.get("looking", bucket_url(project._access, "here"))
    assert bucket["labels"] == {"tpuswarm": "mine", "tpuswarm-fleet": "f1e2"}


def test_fleet_network_joins_its_machines_only(project):
    assert not project.has_network("own")
    project.make_network("own", "tpuswarm mine")
    assert project.has_network("own")
    assert project.subnetwork("own", "us-central1") and project.subnetwork("absent", "us-central1") is None
    for rule in fleet_rules("own", "tpuswarm-mine", "tpuswarm mine"):
        project.make_rule(rule)
        assert rule in project.rules()
        with pytest.raises(Taken):
            project.make_rule(rule)
    assert opens_all_ports(project.rules(), "own", ["tpuswarm-mine"])
    assert rules_open_to_strangers(project.rules(), "own", ["tpuswarm-mine"]) == []


def test_apis_billing_quotas_and_account(project):
    assert project.apis() >= set(APIS)
    project.turn_on("tpu.googleapis.com")
    assert project.billing()
    assert any(quota.id.startswith("TPUV2s") for quota in project.quotas())
    assert project.default_account()
