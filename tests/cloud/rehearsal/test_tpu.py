"""The TPU API, asked by Google's own clients by gRPC and REST."""

import pytest
from google.api_core import exceptions
from google.cloud import tpu_v2
from google.protobuf import field_mask_pb2

from tests.cloud.rehearsal.conftest import PROJECT, TPU, done

HERE = f"{PROJECT}/locations/us-central1-b"
State = tpu_v2.Node.State
POD = tpu_v2.Node(accelerator_type="v2-32", runtime_version="tpu-ubuntu2204-base")


@pytest.fixture(params=["grpc", "rest"])
def client(request, tpu, tpu_by_rest):
    return tpu if request.param == "grpc" else tpu_by_rest


@pytest.mark.parametrize(("network", "subnetwork"), [("own", ""), ("own", "default"), ("default", "own")])
def test_a_subnetwork_that_is_not_of_the_network_is_refused(tpu, network, subnetwork):
    node = tpu_v2.Node(TPU, network_config={"network": network, "subnetwork": subnetwork})
    with pytest.raises(exceptions.InvalidArgument, match=f"is not in network '{network}'"):
        tpu.create_node(parent=HERE, node_id="lost", node=node)


def test_a_node_from_its_creation_to_its_end(client):
    name = f"{HERE}/nodes/one"
    creating = client.create_node(parent=HERE, node_id="one", node=TPU)
    assert client.get_node(name=name).state == State.CREATING
    assert creating.metadata.verb == "create" and creating.metadata.target == name
    assert done(client, creating).WhichOneof("result") == "response"
    made = client.get_node(name=name)
    assert (made.state, made.health.name, made.accelerator_config.topology) == (State.READY, "HEALTHY", "2x2")
    assert made.network_endpoints[0].ip_address.startswith("127.") and not made.network_endpoints[0].access_config

    mask = field_mask_pb2.FieldMask(paths=["metadata", "labels", "network_config.enable_external_ips"])
    change = tpu_v2.Node(
        name=name, metadata={"a": "b"}, labels={"c": "d"}, network_config={"enable_external_ips": True}
    )
    done(client, client.update_node(node=change, update_mask=mask))
    made = client.get_node(name=name)
    assert made.metadata == {"a": "b"} and made.labels == {"c": "d"}
    assert made.network_endpoints[0].access_config.external_ip.startswith("127.")

    done(client, client.stop_node(request={"name": name}))
    assert client.get_node(name=name).state == State.STOPPED
    done(client, client.start_node(request={"name": name}))
    assert client.get_node(name=name).state == State.READY

    operations = client.list_operations({"name": HERE}).operations
    assert creating.operation.name in [each.name for each in operations]
    client.cancel_operation({"name": creating.operation.name})
    client.delete_operation({"name": creating.operation.name})
    with pytest.raises(exceptions.NotFound):
        client.get_operation({"name": creating.operation.name})

    done(client, client.delete_node(name=name))
    with pytest.raises(exceptions.NotFound):
        client.get_node(name=name)


def test_what_a_zone_offers(client):
    types = {each.type_: each.accelerator_configs for each in client.list_accelerator_types(parent=HERE)}
    assert [each.topology for each in types["v2-8"]] == ["2x2"] and "v5litepod-8" not in types
    assert client.get_accelerator_type(name=f"{HERE}/acceleratorTypes/v2-8").type_ == "v2-8"
    versions = [each.version for each in client.list_runtime_versions(parent=HERE)]
    assert client.get_runtime_version(name=f"{HERE}/runtimeVersions/{versions[0]}").version == versions[0]
    assert "us-central1-b" in [each.location_id for each in client.list_locations({"name": PROJECT}).locations]
    assert client.get_location({"name": HERE}).location_id == "us-central1-b"


@pytest.mark.parametrize(
    ("name", "node", "kind", "said"),
    [
        ("a", {"accelerator_config": {"type_": "V2", "topology": "2x2"}}, exceptions.InvalidArgument, "Only one of"),
        ("a", {"runtime_version": ""}, exceptions.InvalidArgument, "runtime_version"),
        ("a", {"accelerator_type": "v5litepod-8"}, exceptions.NotFound, "acceleratorTypes/v5litepod-8"),
        ("a", {"accelerator_type": "v9-8"}, exceptions.NotFound, "v9-8"),
        ("A_1", {}, exceptions.InvalidArgument, "Invalid node id"),
    ],
)
def test_a_node_that_would_not_be_made_is_refused(client, name, node, kind, said):
    fields = {"accelerator_type": "v2-8", "runtime_version": "tpu-ubuntu2204-base", **node}
    # REST's errors are the parents of those of gRPC.
    with pytest.raises(kind.__mro__[1] if client.transport.kind == "rest" else kind, match=said):
        client.create_node(parent=HERE, node_id=name, node=tpu_v2.Node(**fields))


def test_a_quota_is_code_8_with_its_name_and_a_stockout_fails_later_without(client, weather):
    zone, kind = "us-central1-c", client.transport.kind
    parent = f"projects/{kind}/locations/{zone}"
    weather("quota", zone=zone, generation="v2", limit=8)
    weather("stockout", zone=zone)
    creating = client.create_node(parent=parent, node_id="first", node=TPU)
    with pytest.raises(exceptions.TooManyRequests) as refused:
        client.create_node(parent=parent, node_id="second", node=TPU)
    assert refused.value.reason == "RATE_LIMIT_EXCEEDED"
    assert refused.value.metadata["quota_limit"] == "TPUV2sPerProjectPerZoneForTPUAPI"
    kinds = [each["@type"] if isinstance(each, dict) else type(each).__name__ for each in refused.value.details]
    assert any("QuotaFailure" in each for each in kinds)
    assert "Limit: 8 in zone us-central1-c" in refused.value.message

    failed = done(client, creating)
    assert failed.error.code == 8 and "no more capacity in the zone" in failed.error.message
    assert not any("QuotaFailure" in each.type_url for each in failed.error.details)
    with pytest.raises(exceptions.NotFound):  # a creation that failed leaves nothing to describe
        client.get_node(name=f"{parent}/nodes/first")


def test_zones_that_are_hidden_or_do_not_answer(client, weather):
    weather("break", name="europe-west4-b", fault="hidden")
    weather("break", name="us-west4-a", fault="unreachable")
    hidden, dark = f"{PROJECT}/locations/europe-west4-b", f"{PROJECT}/locations/us-west4-a"
    with pytest.raises(exceptions.Forbidden, match=r"Permission denied on 'locations/europe-west4-b'"):
        client.list_accelerator_types(parent=hidden)
    assert "europe-west4-b" not in [each.location_id for each in client.list_locations({"name": PROJECT}).locations]
    with pytest.raises(exceptions.ServiceUnavailable):
        client.list_nodes(parent=dark)
    pages = list(client.list_nodes(parent=f"{PROJECT}/locations/-").pages)
    assert list(pages[0].unreachable) == [dark]


def test_lists_have_pages(client, tpu):
    parent, kind = f"projects/pages-{client.transport.kind}/locations/us-central1-b", client.transport.kind
    for number in range(3):
        tpu.create_node(parent=parent, node_id=f"n{number}", node=TPU)
    found = client.list_nodes(request={"parent": f"projects/pages-{kind}/locations/-", "page_size": 2})
    assert [[node.name[-2:] for node in page.nodes] for page in found.pages] == [["n0", "n1"], ["n2"]]


def test_pods_cannot_stop_and_spot_cannot_start_again(tpu, ready):
    europe = f"{PROJECT}/locations/europe-west4-a"
    assert len(ready(europe, "pod", POD).network_endpoints) == 4
    with pytest.raises(exceptions.FailedPrecondition, match="can only be deleted"):
        tpu.stop_node(request={"name": f"{europe}/nodes/pod"})
    spot = tpu_v2.Node(TPU, scheduling_config={"spot": True})
    ready(europe, "spot", spot)
    done(tpu, tpu.stop_node(request={"name": f"{europe}/nodes/spot"}))
    with pytest.raises(exceptions.FailedPrecondition, match="cannot be started again"):
        tpu.start_node(request={"name": f"{europe}/nodes/spot"})
