"""The TPU API, over gRPC and REST, through Google's own clients."""

import pytest
from google.api_core import exceptions
from google.cloud import tpu_v2
from google.protobuf import field_mask_pb2

from tests.cloud.rehearsal.conftest import PARENT, PROJECT, TPU, wait_until_done
from tests.local_cloud import slow_clock

State = tpu_v2.Node.State
POD = tpu_v2.Node(accelerator_type="v2-32", runtime_version="tpu-ubuntu2204-base")


@pytest.fixture(params=["grpc", "rest"])
def client(request, tpu, tpu_by_rest):
    return tpu if request.param == "grpc" else tpu_by_rest


def locations(client):
    return [location.location_id for location in client.list_locations({"name": PROJECT}).locations]


@pytest.mark.parametrize(("network", "subnetwork"), [("own", ""), ("own", "default"), ("default", "own")])
def test_subnetwork_of_another_network_is_refused(tpu, network, subnetwork):
    node = tpu_v2.Node(TPU, network_config={"network": network, "subnetwork": subnetwork})
    with pytest.raises(exceptions.InvalidArgument, match=f"is not in network '{network}'"):
        tpu.create_node(parent=PARENT, node_id="lost", node=node)


def test_node_is_created_changed_stopped_started_and_deleted(client, place):
    name = f"{PARENT}/nodes/one"
    with slow_clock(place):
        creating = client.create_node(parent=PARENT, node_id="one", node=TPU)
        assert client.get_node(name=name).state == State.CREATING
    assert creating.metadata.verb == "create" and creating.metadata.target == name
    assert wait_until_done(client, creating).WhichOneof("result") == "response"
    node = client.get_node(name=name)
    assert (node.state, node.health.name, node.accelerator_config.topology) == (State.READY, "HEALTHY", "2x2")
    assert node.network_endpoints[0].ip_address.startswith("127.") and not node.network_endpoints[0].access_config

    mask = field_mask_pb2.FieldMask(paths=["metadata", "labels", "network_config.enable_external_ips"])
    change = tpu_v2.Node(
        name=name, metadata={"a": "b"}, labels={"c": "d"}, network_config={"enable_external_ips": True}
    )
    wait_until_done(client, client.update_node(node=change, update_mask=mask))
    node = client.get_node(name=name)
    assert node.metadata == {"a": "b"} and node.labels == {"c": "d"}
    assert node.network_endpoints[0].access_config.external_ip.startswith("127.")

    wait_until_done(client, client.stop_node(request={"name": name}))
    assert client.get_node(name=name).state == State.STOPPED
    wait_until_done(client, client.start_node(request={"name": name}))
    assert client.get_node(name=name).state == State.READY

    operations = client.list_operations({"name": PARENT}).operations
    assert creating.operation.name in [operation.name for operation in operations]
    client.cancel_operation({"name": creating.operation.name})
    client.delete_operation({"name": creating.operation.name})
    with pytest.raises(exceptions.NotFound):
        client.get_operation({"name": creating.operation.name})

    wait_until_done(client, client.delete_node(name=name))
    with pytest.raises(exceptions.NotFound):
        client.get_node(name=name)


def test_types_runtimes_and_locations(client):
    types = {offer.type_: offer.accelerator_configs for offer in client.list_accelerator_types(parent=PARENT)}
    assert [config.topology for config in types["v2-8"]] == ["2x2"] and "v5litepod-8" not in types
    assert client.get_accelerator_type(name=f"{PARENT}/acceleratorTypes/v2-8").type_ == "v2-8"
    versions = [runtime.version for runtime in client.list_runtime_versions(parent=PARENT)]
    assert client.get_runtime_version(name=f"{PARENT}/runtimeVersions/{versions[0]}").version == versions[0]
    assert "us-central1-b" in locations(client)
    assert client.get_location({"name": PARENT}).location_id == "us-central1-b"


@pytest.mark.parametrize(
    ("name", "fields", "error", "words"),
    [
        ("a", {"accelerator_config": {"type_": "V2", "topology": "2x2"}}, exceptions.InvalidArgument, "Only one of"),
        ("a", {"runtime_version": ""}, exceptions.InvalidArgument, "runtime_version"),
        ("a", {"runtime_version": "tpu-vm-tf-1.0"}, exceptions.InvalidArgument, 'cannot be "tpu-vm-tf-1.0"'),
        ("a", {"accelerator_type": "v5litepod-8"}, exceptions.InvalidArgument, "the accelerator v5litepod-8 was not"),
        ("a", {"accelerator_type": "v9-8"}, exceptions.NotFound, "v9-8"),
        ("A_1", {}, exceptions.InvalidArgument, "Invalid node id"),
    ],
)
def test_invalid_node_is_refused(client, name, fields, error, words):
    fields = {"accelerator_type": "v2-8", "runtime_version": "tpu-ubuntu2204-base", **fields}
    # REST raises the parents of gRPC's errors.
    with pytest.raises(error.__mro__[1] if client.transport.kind == "rest" else error, match=words):
        client.create_node(parent=PARENT, node_id=name, node=tpu_v2.Node(**fields))


def test_nodes_are_listed_in_pages(client, tpu):
    parent, kind = f"projects/pages-{client.transport.kind}/locations/us-central1-b", client.transport.kind
    for number in range(3):
        tpu.create_node(parent=parent, node_id=f"n{number}", node=TPU)
    nodes = client.list_nodes(request={"parent": f"projects/pages-{kind}/locations/-", "page_size": 2})
    assert [[node.name[-2:] for node in page.nodes] for page in nodes.pages] == [["n0", "n1"], ["n2"]]


def test_pods_cannot_stop_and_spot_nodes_cannot_restart(tpu, ready):
    europe = f"{PROJECT}/locations/europe-west4-a"
    assert len(ready(europe, "four-hosts", POD).network_endpoints) == 4
    with pytest.raises(exceptions.FailedPrecondition, match="can only be deleted"):
        tpu.stop_node(request={"name": f"{europe}/nodes/four-hosts"})
    spot = tpu_v2.Node(TPU, scheduling_config={"spot": True})
    ready(europe, "spot", spot)
    wait_until_done(tpu, tpu.stop_node(request={"name": f"{europe}/nodes/spot"}))
    with pytest.raises(exceptions.FailedPrecondition, match="cannot be started again"):
        tpu.start_node(request={"name": f"{europe}/nodes/spot"})
