"""Compute Engine and the small APIs, asked by Google's own clients."""

import pytest
from google.api_core import exceptions
from google.auth.transport.requests import AuthorizedSession
from google.cloud import compute_v1

from tests.cloud.rehearsal.conftest import until

PROJECT, ZONE = "computing", "us-central1-f"


@pytest.fixture(scope="module")
def compute(endpoints):
    """Clients by name, such as `Instances`."""
    where = {"api_endpoint": endpoints.http}
    made = {}

    def client(name):
        if name not in made:
            made[name] = getattr(compute_v1, f"{name}Client")(credentials=endpoints.credentials(), client_options=where)
        return made[name]

    return client


def over(compute, operation):
    """An operation's error codes, when it is over."""
    if operation.zone:
        found = compute("ZoneOperations").wait(project=PROJECT, zone=ZONE, operation=operation.name)
    else:
        found = compute("GlobalOperations").wait(project=PROJECT, operation=operation.name)
    assert found.status.name == "DONE"
    return [each.code for each in found.error.errors]


def vm(name, **fields):
    interface = compute_v1.NetworkInterface(access_configs=[compute_v1.AccessConfig(name="external-nat")])
    machine_type = f"zones/{ZONE}/machineTypes/n2-standard-8"
    return compute_v1.Instance(name=name, machine_type=machine_type, network_interfaces=[interface], **fields)


def test_a_vm_from_its_creation_to_its_end(compute):
    vms, here = compute("Instances"), {"project": PROJECT, "zone": ZONE}
    on = compute_v1.Metadata(items=[compute_v1.Items(key="enable-guest-attributes", value="TRUE")])
    asked = vms.insert_unary(**here, instance_resource=vm("head", labels={"a": "b"}, metadata=on))
    assert vms.get(**here, instance="head").status == "PROVISIONING" and over(compute, asked) == []
    with pytest.raises(exceptions.Conflict, match="already exists"):
        vms.insert_unary(**here, instance_resource=vm("head"))
    made = vms.get(**here, instance="head")
    first = made.network_interfaces[0]
    assert made.status == "RUNNING" and first.network_i_p.startswith("127.")
    assert compute("Disks").get(**here, disk="head").size_gb == 10

    for wanted, found in (("b", ["head"]), ("c", [])):
        question = compute_v1.AggregatedListInstancesRequest(project=PROJECT, filter=f"labels.a={wanted}")
        assert [each.name for _, part in vms.aggregated_list(question) for each in part.instances] == found
    assert [each.name for each in vms.list(**here)] == ["head"]

    tags = compute_v1.Tags(items=["t"], fingerprint=made.tags.fingerprint)
    assert over(compute, vms.set_tags_unary(**here, instance="head", tags_resource=tags)) == []
    stale = compute_v1.Metadata(items=[], fingerprint="stale")
    with pytest.raises(exceptions.PreconditionFailed):
        vms.set_metadata_unary(**here, instance="head", metadata_resource=stale)
    on.fingerprint = made.metadata.fingerprint
    assert over(compute, vms.set_metadata_unary(**here, instance="head", metadata_resource=on)) == []
    keys = compute_v1.GetGuestAttributesInstanceRequest(**here, instance="head", query_path="hostkeys/")
    assert until(lambda: vms.get_guest_attributes(keys).query_value.items)[0].key == "ssh-ed25519"

    assert over(compute, vms.stop_unary(**here, instance="head")) == []
    assert vms.get(**here, instance="head").status == "TERMINATED"
    assert over(compute, vms.start_unary(**here, instance="head")) == []
    again = vms.get(**here, instance="head").network_interfaces[0]
    assert again.network_i_p == first.network_i_p
    assert again.access_configs[0].nat_i_p != first.access_configs[0].nat_i_p
    assert over(compute, vms.delete_unary(**here, instance="head")) == []
    for client, name in ((vms, {"instance": "head"}), (compute("Disks"), {"disk": "head"})):
        with pytest.raises(exceptions.NotFound):
            client.get(**here, **name)


def test_spot_vms_are_taken_and_zones_have_none_left(compute, weather):
    vms, here = compute("Instances"), {"project": PROJECT, "zone": ZONE}
    spot = compute_v1.Scheduling(provisioning_model="SPOT", instance_termination_action="DELETE")
    over(compute, vms.insert_unary(**here, instance_resource=vm("brief", scheduling=spot)))
    weather("preempt", name="brief")

    def gone():
        try:
            vms.get(**here, instance="brief")
        except exceptions.NotFound:
            return True

    until(gone)
    weather("break", name=ZONE, fault="vm-stockout")
    failed = over(compute, vms.insert_unary(**here, instance_resource=vm("none-left")))
    weather("break", name=ZONE, fault="vm-stockout", mend=True)
    assert failed == ["ZONE_RESOURCE_POOL_EXHAUSTED"] and [each.name for each in vms.list(**here)] == []


def test_networks_and_rules(compute):
    network = compute_v1.Network(name="net", auto_create_subnetworks=True)
    over(compute, compute("Networks").insert_unary(project=PROJECT, network_resource=network))
    assert sorted(each.name for each in compute("Networks").list(project=PROJECT)) == ["default", "net"]
    subnetwork = compute("Subnetworks").get(project=PROJECT, region="us-central1", subnetwork="net")
    assert subnetwork.ip_cidr_range.endswith(".0/20")
    rule = compute_v1.Firewall(
        name="rule",
        network=f"projects/{PROJECT}/global/networks/net",
        allowed=[compute_v1.Allowed(I_p_protocol="tcp", ports=["22"])],
        source_ranges=["1.2.3.4/32"],
    )
    over(compute, compute("Firewalls").insert_unary(project=PROJECT, firewall_resource=rule))
    assert compute("Firewalls").get(project=PROJECT, firewall="rule").network.endswith("/networks/net")
    with pytest.raises(exceptions.BadRequest, match="already being used"):
        compute("Networks").delete_unary(project=PROJECT, network="net")
    over(compute, compute("Firewalls").delete_unary(project=PROJECT, firewall="rule"))
    over(compute, compute("Networks").delete_unary(project=PROJECT, network="net"))
    assert [each.name for each in compute("Networks").list(project=PROJECT)] == ["default"]


def test_a_new_projects_apis_are_off_and_can_be_turned_on(endpoints, weather, tpu):
    session, project = AuthorizedSession(endpoints.credentials()), "new-1"
    weather("break", name=project, fault="no-apis")
    with pytest.raises(exceptions.Forbidden) as off:
        tpu.list_nodes(parent=f"projects/{project}/locations/-")
    assert off.value.reason == "SERVICE_DISABLED" and off.value.metadata["service"] == "tpu.googleapis.com"
    services = f"{endpoints.http}/v1/projects/{project}/services"
    operation = session.post(f"{services}/tpu.googleapis.com:enable").json()["name"]
    until(lambda: session.get(f"{endpoints.http}/v1/{operation}").json()["done"])
    assert session.get(f"{services}/tpu.googleapis.com").json()["state"] == "ENABLED"
    assert session.get(f"{services}/compute.googleapis.com").json()["state"] == "DISABLED"
    assert list(tpu.list_nodes(parent=f"projects/{project}/locations/-")) == []

    assert session.get(f"{endpoints.http}/v1/projects/{project}/billingInfo").json()["billingEnabled"]
    weather("break", name=project, fault="no-billing")
    assert not session.get(f"{endpoints.http}/v1/projects/{project}/billingInfo").json()["billingEnabled"]
    with pytest.raises(exceptions.Forbidden) as unpaid:
        tpu.list_nodes(parent=f"projects/{project}/locations/-")
    assert unpaid.value.reason == "BILLING_DISABLED"


def test_quotas_are_told(endpoints, weather):
    weather("quota", zone="us-west1-c", generation="v5e", limit=16)
    session = AuthorizedSession(endpoints.credentials())
    path = f"/v1/projects/{PROJECT}/locations/global/services/tpu.googleapis.com/quotaInfos"
    found = {each["quotaId"]: each for each in session.get(endpoints.http + path).json()["quotaInfos"]}
    limits = found["TPUV5sPreemptibleLitepodPerProjectPerZoneForTPUAPI"]["dimensionsInfos"]
    assert next(each for each in limits if each["dimensions"]["zone"] == "us-west1-c")["details"]["value"] == "16"
