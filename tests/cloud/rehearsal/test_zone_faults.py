"""Preemption, maintenance and queues of the local cloud."""

from datetime import UTC, datetime, timedelta

import pytest
from google.api_core import exceptions
from google.cloud import tpu_v2

from tests.cloud.rehearsal.conftest import PARENT, PROJECT, TPU, wait_until_done
from tests.local_cloud import slow_clock
from tests.waiting import until

State, QueueState = tpu_v2.Node.State, tpu_v2.QueuedResourceState.State
EXTERNAL = tpu_v2.Node(TPU, network_config={"enable_external_ips": True})


def state(tpu, name):
    try:
        return tpu.get_node(name=name).state.name
    except exceptions.NotFound:
        return "404"


def queue(tpu, parent, name, spec, **fields):
    request = tpu_v2.QueuedResource(tpu={"node_spec": [{"parent": parent, "node": TPU} | spec]}, **fields)
    tpu.create_queued_resource(parent=parent, queued_resource_id=name, queued_resource=request)
    return f"{parent}/queuedResources/{name}"


@pytest.mark.parametrize(
    ("ending", "final_state"), [("preempted", "PREEMPTED"), ("terminated", "TERMINATED"), ("gone", "404")]
)
def test_preempted_node_ends_in_one_of_three_states(tpu, ready, weather, ending, final_state):
    name = ready(PARENT, f"to-be-{ending}").name
    weather("preempt", name=f"to-be-{ending}", ending=ending)
    until(lambda: state(tpu, name) == final_state)


def test_maintenance_is_a_repair_that_changes_the_external_address(tpu, ready, place, weather):
    before = ready(PARENT, "repaired", EXTERNAL)
    with slow_clock(place):
        weather("maintenance", name="repaired")
        during = tpu.get_node(name=before.name)
        assert (during.state.name, during.health.name) == ("REPAIRING", "UNHEALTHY_MAINTENANCE")
    until(lambda: state(tpu, before.name) == "READY")
    after = tpu.get_node(name=before.name).network_endpoints[0]
    assert after.ip_address == before.network_endpoints[0].ip_address
    assert after.access_config.external_ip != before.network_endpoints[0].access_config.external_ip


def test_node_stuck_in_creation_can_be_deleted(tpu, weather):
    weather("break", name="us-central2-b", fault="stuck")
    parent = f"{PROJECT}/locations/us-central2-b"
    node = tpu_v2.Node(accelerator_type="v4-8", runtime_version="tpu-ubuntu2204-base")
    creating = tpu.create_node(parent=parent, node_id="stuck", node=node)
    wait_until_done(tpu, tpu.delete_node(name=f"{parent}/nodes/stuck"))
    assert state(tpu, f"{parent}/nodes/stuck") == "404"
    assert not tpu.get_operation({"name": creating.operation.name}).done


def test_queued_request_waits_becomes_a_node_and_ends_with_it(tpu, tpu_by_rest, weather):
    parent = f"{PROJECT}/locations/asia-east1-c"
    weather("stockout", zone="asia-east1-c")
    name = queue(tpu, parent, "patient", {"node_id": "patient-n"}, spot={})

    def request_state():
        return tpu.get_queued_resource(name=name).state.state

    until(lambda: request_state() == QueueState.WAITING_FOR_RESOURCES)
    assert state(tpu, f"{parent}/nodes/patient-n") == "404"
    weather("stockout", zone="asia-east1-c", over=True)
    until(lambda: request_state() == QueueState.ACTIVE)
    node = tpu.get_node(name=f"{parent}/nodes/patient-n")
    assert node.queued_resource == name and node.scheduling_config.spot and node.state == State.READY
    with pytest.raises(exceptions.FailedPrecondition, match="use force"):
        tpu.delete_queued_resource(name=name)

    wait_until_done(tpu, tpu.reset_queued_resource(name=name))
    until(lambda: request_state() == QueueState.ACTIVE)
    weather("preempt", name="patient-n")
    until(lambda: request_state() == QueueState.SUSPENDED)
    assert [request.name for request in tpu_by_rest.list_queued_resources(parent=parent)] == [name]
    forced = tpu_v2.DeleteQueuedResourceRequest(name=name, force=True)
    wait_until_done(tpu, tpu.delete_queued_resource(request=forced))
    assert state(tpu, f"{parent}/nodes/patient-n") == "404"
    with pytest.raises(exceptions.NotFound):
        tpu.get_queued_resource(name=name)


def test_requests_count_against_the_quota_until_they_are_deleted(tpu, weather):
    zone = "asia-east1-c"
    parent = f"projects/husks/locations/{zone}"
    weather("quota", zone=zone, generation="v2", limit=8)

    def is_refused():
        try:
            tpu.create_node(parent=parent, node_id="second", node=TPU)
        except exceptions.ResourceExhausted as error:
            return "Quota limit 'TPUV2s" in str(error)
        return False

    name = queue(tpu, parent, "first", {"node_id": "first-n"})
    assert is_refused(), "in flight"
    until(lambda: tpu.get_queued_resource(name=name).state.state == QueueState.ACTIVE)
    weather("preempt", name="first-n", ending="gone")
    until(lambda: tpu.get_queued_resource(name=name).state.state == QueueState.SUSPENDED)
    assert is_refused(), "suspended"
    wait_until_done(tpu, tpu.delete_queued_resource(name=name))
    assert not is_refused()
    weather("quota", zone=zone, generation="v2", limit=None)


def test_single_hosts_of_v5e_have_a_quota_of_their_own(tpu, weather):
    zone = "us-west4-a"
    parent = f"projects/serving/locations/{zone}"
    weather("quota", zone=zone, generation="v5e", limit=16)
    weather("quota", zone=zone, generation="v5e-serving", limit=4)
    fits, refused = (
        tpu_v2.Node(accelerator_type=f"v5litepod-{chips}", runtime_version="v2-alpha-tpuv5-lite") for chips in (16, 8)
    )
    tpu.create_node(parent=parent, node_id="training", node=fits)
    with pytest.raises(exceptions.ResourceExhausted, match="TPUV5sLitepodServingPerProjectPerZoneForTPUAPI"):
        tpu.create_node(parent=parent, node_id="serving", node=refused)


def test_expired_request_fails_at_its_time_though_the_clocks_speed_changes_and_stays_listed(tpu, weather, place):
    parent = f"{PROJECT}/locations/us-central1-a"
    weather("stockout", zone="us-central1-a")
    node = tpu_v2.Node(accelerator_type="v3-8", runtime_version="tpu-ubuntu2204-base")
    policy = {"valid_until_time": datetime.now(UTC) + timedelta(seconds=1)}
    name = queue(tpu, parent, "late", {"node_id": "late-n", "node": node}, queueing_policy=policy)
    with slow_clock(place):
        until(lambda: tpu.get_queued_resource(name=name).state.state == QueueState.FAILED)
    assert "validity" in tpu.get_queued_resource(name=name).state.failed_data.error.message
    wait_until_done(tpu, tpu.delete_queued_resource(name=name))


def test_one_request_makes_several_slices(tpu):
    queue(tpu, PARENT, "twins", {"multislice_params": {"node_count": 2, "node_id_prefix": "twin"}})
    until(lambda: state(tpu, f"{PARENT}/nodes/twin-0") == state(tpu, f"{PARENT}/nodes/twin-1") == "READY")
