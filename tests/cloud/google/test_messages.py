"""Machines to and from Google's message types."""

import datetime
import json
from dataclasses import replace

import pytest
from google.cloud import tpu_v2
from google.rpc import status_pb2

from tpuswarm.catalog import accelerators
from tpuswarm.cloud.errors import NoQuota
from tpuswarm.cloud.google.access import Access
from tpuswarm.cloud.google.instances import instance_from_spec, list_aggregated, machine_from_instance, to_metadata
from tpuswarm.cloud.google.nodes import (
    REQUEST_STATES,
    machine_from_node,
    machines_from_requests,
    node_from_spec,
    request_from_spec,
)
from tpuswarm.cloud.protocol import FLEET_LABEL, POOL_LABEL, Disk, Machine, TpuSpec, VmSpec, Worker
from tpuswarm.fleet.apply import gcloud

PLACE = "projects/p/locations/us-central1-f"
SPEC = TpuSpec("n1", "us-central1-f", "v2-8", "spot", "f1e2", "small", "tpu-ubuntu2204-base", tags=("t",))
HEAD = VmSpec("head", "us-central1-f", "n2-highmem-8", "f1e2", "head", "debian-cloud/debian-12", 50, tags=("t",))


def to_rest(message) -> dict:
    text = type(message).to_json(message, use_integers_for_enums=False, always_print_fields_with_no_presence=False)
    return json.loads(text)


def test_node_has_labels_metadata_network_and_disks():
    node = node_from_spec(
        replace(SPEC, labels={"mine": "1"}, metadata={"startup-script": "x"}, disks=(Disk("d", True),)), "p"
    )
    assert node.labels == {"mine": "1", FLEET_LABEL: "f1e2", POOL_LABEL: "small"}
    assert node.metadata == {"startup-script": "x", "enable-guest-attributes": "TRUE", "enable-oslogin": "FALSE"}
    assert node.accelerator_type == "v2-8" and not node.accelerator_config
    assert node.scheduling_config.spot and node.network_config.enable_external_ips
    assert node.service_account.scope == ["https://www.googleapis.com/auth/cloud-platform"]
    assert node.data_disks[0].source_disk == "projects/p/zones/us-central1-f/disks/d"
    assert node.data_disks[0].mode.name == "READ_ONLY"


def test_user_labels_never_replace_the_fleet_label():
    assert node_from_spec(replace(SPEC, labels={FLEET_LABEL: "other"}), "p").labels[FLEET_LABEL] == "f1e2"
    assert instance_from_spec(replace(HEAD, labels={FLEET_LABEL: "other"}), "p")["labels"][FLEET_LABEL] == "f1e2"


@pytest.mark.parametrize("accelerator", [a for a in accelerators() if a.api_name], ids=lambda a: a.name)
def test_type_goes_to_the_api_and_comes_back_under_our_name(accelerator):
    node = node_from_spec(replace(SPEC, type=accelerator.name), "p")
    node.name = f"{PLACE}/nodes/n1"
    assert node.accelerator_type == accelerator.api_name
    assert machine_from_node(to_rest(node)).type == accelerator.name


def test_queued_resource_requests_one_node_of_the_same_name():
    request = request_from_spec(replace(SPEC, how="queued", wait_s=7200.0), "p")
    (node,) = request.tpu.node_spec
    assert (node.parent, node.node_id, node.node.labels[FLEET_LABEL]) == (PLACE, "n1", "f1e2")
    assert request.queueing_policy.valid_until_duration.total_seconds() == 7200
    assert "guaranteed" not in request and "spot" not in request and not request.reservation_name
    spot = request_from_spec(replace(SPEC, how="spot", wait_s=7200.0), "p")
    assert "spot" in spot and not spot.tpu.node_spec[0].node.scheduling_config.spot, "the tier says it"
    reserved = request_from_spec(replace(SPEC, how="reserved", reservation="r"), "p")
    assert reserved.reservation_name == f"{PLACE}/reservations/r" and not reserved.queueing_policy
    # What `gcloud compute tpus queued-resources create --reserved` sends for any reservation of the project.
    assert request_from_spec(replace(SPEC, how="reserved"), "p").reservation_name == f"{PLACE}/reservations/-"
    assert gcloud.create(replace(SPEC, how="reserved", reservation="r"), "p").startswith(
        "gcloud alpha compute tpus queued-resources create n1 "
    ), "only there --reservation exists"


@pytest.mark.parametrize("state", tpu_v2.Node.State)
def test_each_node_state_is_mapped(state):
    machine = machine_from_node(
        to_rest(tpu_v2.Node(name=f"{PLACE}/nodes/n1", accelerator_type="v2-8", state=state, health="HEALTHY"))
    )
    assert machine.said == state.name
    assert (machine.state == "dead") == (state.name in ("PREEMPTED", "TERMINATED"))
    assert machine.healthy is (True if state.name == "READY" else None)


def test_node_as_google_shows_it():
    node = tpu_v2.Node(
        name=f"{PLACE}/nodes/n1",
        accelerator_type="v5litepod-16",
        state="READY",
        health="TIMEOUT",
        health_description="no answer since noon",
        symptoms=[tpu_v2.Symptom(symptom_type="OUT_OF_MEMORY"), tpu_v2.Symptom(details="worker 3 is slow")],
        create_time=datetime.datetime(2026, 11, 22, 12, tzinfo=datetime.UTC),
        queued_resource=f"{PLACE}/queuedResources/q1",
        network_endpoints=[
            tpu_v2.NetworkEndpoint(ip_address="10.0.0.2", access_config={"external_ip": "34.1.2.3"}),
            tpu_v2.NetworkEndpoint(ip_address="10.0.0.3"),
        ],
    )
    machine = machine_from_node(to_rest(node))
    assert (machine.name, machine.zone, machine.type, machine.kind) == ("n1", "us-central1-f", "v5e-16", "tpu")
    assert machine.healthy is False
    assert machine.why == "no answer since noon; OUT_OF_MEMORY; worker 3 is slow"
    assert machine.created == 1795348800.0
    assert machine.workers == (Worker("10.0.0.2", "34.1.2.3"), Worker("10.0.0.3", None))
    assert (machine.how, machine.request, machine.fleet) == ("queued", "q1", None)


def test_node_under_maintenance_is_repairing_not_unhealthy():
    """ "Will resume running once rescheduled": https://cloud.google.com/tpu/docs/reference/rest/v2/projects.locations.nodes"""
    node = tpu_v2.Node(name=f"{PLACE}/nodes/n1", accelerator_type="v2-8", state="READY", health="UNHEALTHY_MAINTENANCE")
    machine = machine_from_node(to_rest(node))
    assert (machine.state, machine.said, machine.healthy) == ("repairing", "UNHEALTHY_MAINTENANCE", None)


def test_unknown_type_keeps_its_name():
    of = {"name": f"{PLACE}/nodes/n1"}
    assert machine_from_node(to_rest(tpu_v2.Node(**of, accelerator_type="v9-8"))).type == "v9-8"
    config = tpu_v2.AcceleratorConfig(type_="V4", topology="2x2x9")
    assert machine_from_node(to_rest(tpu_v2.Node(**of, accelerator_config=config))).type == "v4:2x2x9"


def request_in(state: str, **fields) -> dict:
    request = request_from_spec(replace(SPEC, how="queued"), "p")
    request.name = f"{PLACE}/queuedResources/n1"
    request.state = tpu_v2.QueuedResourceState(state=state, **fields)
    return to_rest(request)


@pytest.mark.parametrize("state", tpu_v2.QueuedResourceState.State)
def test_queued_resource_without_a_node_is_waiting_or_dead(state):
    (machine,) = machines_from_requests([request_in(state.name)], [], frozenset(), "p")
    assert (machine.name, machine.request, machine.fleet, machine.type) == ("n1", "n1", "f1e2", "v2-8")
    assert machine.state == REQUEST_STATES.get(state.name, "repairing")
    assert (machine.state == "dead") == (state.name in ("ACTIVE", "FAILED", "SUSPENDING", "SUSPENDED"))


def test_new_states_and_codes_of_a_queued_resource_are_tolerated():
    request = request_in("ACCEPTED")
    request["state"]["state"] = "PREPARING"
    assert machines_from_requests([request], [], frozenset(), "p")[0].state == "repairing"
    request = request_in("FAILED")
    request["state"]["failedData"] = {"error": {"code": 99, "message": "out of luck"}}
    (machine,) = machines_from_requests([request], [], frozenset(), "p")
    assert machine.state == "dead" and "out of luck" in str(machine.error)


def test_queued_resource_and_its_node_are_one_machine():
    node = Machine("n1", "us-central1-f", "tpu", "v2-8", "ready", "READY")
    assert machines_from_requests([request_in("ACTIVE")], [node], frozenset(), "p") == []
    elsewhere = Machine("n1", "us-central1-b", "tpu", "v2-8", "ready", "READY")
    assert len(machines_from_requests([request_in("ACTIVE")], [elsewhere], frozenset(), "p")) == 1
    unreachable = frozenset({"us-central1-f"})  # its node may be there
    assert machines_from_requests([request_in("ACTIVE")], [], unreachable, "p") == []


def test_failed_request_has_an_error():
    why = "Quota limit 'TPUV2sPerProjectPerZoneForTPUAPI' has been exceeded. Limit: 0 in zone us-central1-f."
    failed = {"failed_data": {"error": status_pb2.Status(code=8, message=why)}}
    (machine,) = machines_from_requests([request_in("FAILED", **failed)], [], frozenset(), "p")
    assert machine.why == why
    assert isinstance(machine.error, NoQuota) and machine.error.limit == "TPUV2sPerProjectPerZoneForTPUAPI"


def vm_to_rest(instance: dict, **fields) -> dict:
    shown = dict(instance)
    place = "https://www.googleapis.com/compute/v1/projects/p/zones/us-central1-f"
    shown |= {"zone": place, "machineType": f"{place}/{shown['machineType'].split('/', 2)[2]}", "status": "RUNNING"}
    return shown | fields


def parse_instance(body: dict):
    """Parse a request's body with Google's message, which refuses unknown fields."""
    from google.cloud import compute_v1  # takes seconds

    return compute_v1.Instance.from_json(json.dumps(body))


def test_vm_and_its_disk_have_labels_network_and_account():
    spec = replace(HEAD, ip_forward=True, subnetwork="sub", service_account="sa@p.iam.gserviceaccount.com")
    instance = parse_instance(instance_from_spec(spec, "p"))
    (disk,) = instance.disks
    ours = {FLEET_LABEL: "f1e2", POOL_LABEL: "head"}
    assert instance.labels == ours and disk.initialize_params.labels == ours
    assert disk.auto_delete and disk.initialize_params.disk_size_gb == 50
    assert disk.initialize_params.source_image == "projects/debian-cloud/global/images/family/debian-12"
    # The type whose price is shown; Google's default for this series is pd-standard.
    assert disk.initialize_params.disk_type == "zones/us-central1-f/diskTypes/pd-balanced"
    newer = parse_instance(instance_from_spec(replace(HEAD, type="n4-standard-8"), "p"))
    assert not newer.disks[0].initialize_params.disk_type, "Hyperdisk Balanced, the only one"
    assert instance.can_ip_forward
    (interface,) = instance.network_interfaces
    assert interface.subnetwork == "projects/p/regions/us-central1/subnetworks/sub"
    assert instance.scheduling.provisioning_model == "STANDARD"
    assert instance.service_accounts[0].email == "sa@p.iam.gserviceaccount.com"
    inside = parse_instance(instance_from_spec(replace(HEAD, external_ips=False), "p"))
    assert not inside.network_interfaces[0].access_configs


def test_rented_vm_ends_itself():
    instance = parse_instance(instance_from_spec(replace(HEAD, spot=True, ends=1795348800.0), "p"))
    assert instance.scheduling.termination_time == "2026-11-22T12:00:00+00:00"
    assert instance.scheduling.instance_termination_action == "DELETE"
    assert instance.scheduling.on_host_maintenance == "TERMINATE"
    metadata = parse_instance({"metadata": to_metadata({"a": "1"}, "f")}).metadata
    assert metadata.fingerprint == "f" and metadata.items[0].value == "1"


def test_each_vm_state_is_mapped():
    from google.cloud import compute_v1  # takes seconds

    plain, spot = instance_from_spec(HEAD, "p"), instance_from_spec(replace(HEAD, spot=True), "p")
    for status in [status.name for status in compute_v1.Instance.Status if status.value]:
        machine = machine_from_instance(vm_to_rest(plain, status=status))
        assert machine.said == status and machine.state != "dead"
        assert (machine_from_instance(vm_to_rest(spot, status=status)).state == "dead") == (machine.state == "stopped")


def test_vm_as_google_shows_it():
    interface = {"networkIP": "10.0.0.9", "accessConfigs": [{"natIP": "35.1.1.1"}]}
    shown = vm_to_rest(
        instance_from_spec(HEAD, "p"), networkInterfaces=[interface], creationTimestamp="2026-11-22T04:00:00.000-08:00"
    )
    machine = machine_from_instance(shown)
    assert (machine.name, machine.zone, machine.kind, machine.type) == ("head", "us-central1-f", "vm", "n2-highmem-8")
    assert machine.workers == (Worker("10.0.0.9", "35.1.1.1"),)
    assert (machine.created, machine.fleet, machine.pool) == (1795348800.0, "f1e2", "head")
    assert (
        machine_from_instance(vm_to_rest(instance_from_spec(HEAD, "p"), status="STAGING", lastStopTimestamp="…")).state
        == "starting"
    )


def test_vms_come_from_all_pages_and_unreachable_zones_are_named(monkeypatch):
    shown = vm_to_rest(instance_from_spec(HEAD, "p"))
    other = {**shown, "name": "other"}
    pages = {
        "": {
            "items": {
                "zones/us-central1-f": {"instances": [shown]},
                "zones/us-central1-b": {"warning": {"code": "NO_RESULTS_ON_PAGE"}},
                "zones/asia-east1-c": {"warning": {"code": "UNREACHABLE"}},
            },
            "nextPageToken": "2",
        },
        "2": {
            "items": {"zones/us-central1-f": {"instances": [other]}},
            "unreachables": ["projects/p/zones/me-west1-a"],
        },
    }
    monkeypatch.setattr(Access, "get", lambda self, doing, url, pageToken="", **query: pages[pageToken])
    vms, unreachable = list_aggregated(Access("p"), "instances")
    assert [vm["name"] for vm in vms] == ["head", "other"]
    assert unreachable == {"asia-east1-c", "me-west1-a"}
