"""What happens to machines by itself: preemption, maintenance, queues."""

import pytest
from google.api_core import exceptions
from google.cloud import tpu_v2

from tests.cloud.rehearsal.conftest import PROJECT, TPU, done, until

HERE = f"{PROJECT}/locations/us-central1-b"
State, Waiting = tpu_v2.Node.State, tpu_v2.QueuedResourceState.State
EXTERNAL = tpu_v2.Node(TPU, network_config={"enable_external_ips": True})


def state(tpu, name):
    try:
        return tpu.get_node(name=name).state.name
    except exceptions.NotFound:
        return "404"


@pytest.mark.parametrize(
    ("ending", "shown"), [("preempted", "PREEMPTED"), ("terminated", "TERMINATED"), ("gone", "404")]
)
def test_a_preempted_node_shows_in_one_of_three_ways(tpu, ready, weather, ending, shown):
    name = ready(HERE, f"to-be-{ending}").name
    weather("preempt", name=f"to-be-{ending}", ending=ending)
    until(lambda: state(tpu, name) == shown)


def test_maintenance_is_a_repair_after_which_the_external_address_is_another(tpu, ready, weather):
    before = ready(HERE, "repaired", EXTERNAL)
    weather("maintenance", name="repaired")
    during = tpu.get_node(name=before.name)
    assert (during.state.name, during.health.name) == ("REPAIRING", "UNHEALTHY_MAINTENANCE")
    until(lambda: state(tpu, before.name) == "READY")
    after = tpu.get_node(name=before.name).network_endpoints[0]
    assert after.ip_address == before.network_endpoints[0].ip_address
    assert after.access_config.external_ip != before.network_endpoints[0].access_config.external_ip


def test_a_node_may_get_stuck_and_be_deleted_while_it_is_created(tpu, weather):
    weather("break", name="us-central2-b", fault="stuck")
    parent = f"{PROJECT}/locations/us-central2-b"
    node = tpu_v2.Node(accelerator_type="v4-8", runtime_version="tpu-ubuntu2204-base")
    creating = tpu.create_node(parent=parent, node_id="stuck", node=node)
    done(tpu, tpu.delete_node(name=f"{parent}/nodes/stuck"))
    assert state(tpu, f"{parent}/nodes/stuck") == "404"
    assert not tpu.get_operation({"name": creating.operation.name}).done


def queue(tpu, parent, name, **fields):
    node = {"parent": parent, "node_id": f"{name}-n", "node": TPU}
    wanted = tpu_v2.QueuedResource(tpu={"node_spec": [node]}, **fields)
    done(tpu, tpu.create_queued_resource(parent=parent, queued_resource_id=name, queued_resource=wanted))
    return f"{parent}/queuedResources/{name}"


def test_a_request_waits_becomes_a_node_and_ends_with_it(tpu, tpu_by_rest, weather):
    parent = f"{PROJECT}/locations/asia-east1-c"
    weather("stockout", zone="asia-east1-c")
    name = queue(tpu, parent, "patient", spot={})

    def shown():
        return tpu.get_queued_resource(name=name).state.state

    assert shown() == Waiting.WAITING_FOR_RESOURCES and state(tpu, f"{parent}/nodes/patient-n") == "404"
    weather("stockout", zone="asia-east1-c", over=True)
    until(lambda: shown() == Waiting.ACTIVE)
    node = tpu.get_node(name=f"{parent}/nodes/patient-n")
    assert node.queued_resource == name and node.scheduling_config.spot and node.state == State.READY
    with pytest.raises(exceptions.FailedPrecondition, match="use force"):
        tpu.delete_queued_resource(name=name)

    done(tpu, tpu.reset_queued_resource(name=name))
    until(lambda: shown() == Waiting.ACTIVE)
    weather("preempt", name="patient-n")
    until(lambda: shown() == Waiting.SUSPENDED)
    assert [each.name for each in tpu_by_rest.list_queued_resources(parent=parent)] == [name]
    forced = tpu_v2.DeleteQueuedResourceRequest(name=name, force=True)
    done(tpu, tpu.delete_queued_resource(request=forced))
    assert state(tpu, f"{parent}/nodes/patient-n") == "404"
    with pytest.raises(exceptions.NotFound):
        tpu.get_queued_resource(name=name)


def test_a_request_that_is_not_met_in_time_fails_and_stays_listed(tpu, weather):
    parent = f"{PROJECT}/locations/us-central1-a"
    weather("stockout", zone="us-central1-a")
    node = tpu_v2.Node(accelerator_type="v3-8", runtime_version="tpu-ubuntu2204-base")
    spec = {"parent": parent, "node_id": "late-n", "node": node}
    policy = {"valid_until_duration": {"seconds": 60}}
    wanted = tpu_v2.QueuedResource(tpu={"node_spec": [spec]}, queueing_policy=policy)
    tpu.create_queued_resource(parent=parent, queued_resource_id="late", queued_resource=wanted)
    name = f"{parent}/queuedResources/late"
    until(lambda: tpu.get_queued_resource(name=name).state.state == Waiting.FAILED)
    assert "validity" in tpu.get_queued_resource(name=name).state.failed_data.error.message
    done(tpu, tpu.delete_queued_resource(name=name))


def test_several_slices_come_from_one_request(tpu):
    parent = f"{PROJECT}/locations/us-central1-b"
    several = {"parent": parent, "multislice_params": {"node_count": 2, "node_id_prefix": "twin"}, "node": TPU}
    wanted = tpu_v2.QueuedResource(tpu={"node_spec": [several]})
    tpu.create_queued_resource(parent=parent, queued_resource_id="twins", queued_resource=wanted)
    until(lambda: state(tpu, f"{parent}/nodes/twin-0") == state(tpu, f"{parent}/nodes/twin-1") == "READY")
