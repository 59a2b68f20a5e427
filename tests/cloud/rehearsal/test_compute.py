"""Compute Engine and smaller APIs, through Google's own clients."""

from functools import cache

import pytest
from google.api_core import exceptions

from tests.waiting import until

PROJECT, ZONE = "computing", "us-central1-f"
HERE = {"project": PROJECT, "zone": ZONE}


@pytest.fixture(scope="module")
def compute_v1():
    """Google's module, whose import takes seconds."""
    from google.cloud import compute_v1

    return compute_v1


@pytest.fixture(scope="module")
def compute(endpoints, compute_v1):
    """Clients by name, such as `Instances`."""
    where = {"api_endpoint": endpoints.http}
    return cache(
        lambda name: getattr(compute_v1, f"{name}Client")(credentials=endpoints.credentials(), client_options=where)
    )


def error_codes(compute, operation):
    if operation.zone:
        done = compute("ZoneOperations").wait(**HERE, operation=operation.name)
    else:
        done = compute("GlobalOperations").wait(project=PROJECT, operation=operation.name)
    assert done.status.name == "DONE"
    return [error.code for error in done.error.errors]


def vm(compute_v1, name, **fields):
    interface = compute_v1.NetworkInterface(access_configs=[compute_v1.AccessConfig(name="external-nat")])
    machine_type = f"zones/{ZONE}/machineTypes/n2-standard-8"
    return compute_v1.Instance(name=name, machine_type=machine_type, network_interfaces=[interface], **fields)


def test_vm_has_a_disk_labels_tags_and_another_external_address_after_a_restart(compute, compute_v1):
    """Its life through the product's own calls: tests/cloud/google/test_provider.py."""
    vms = compute("Instances")
    head = vm(compute_v1, "head", labels={"a": "b"})
    assert error_codes(compute, vms.insert_unary(**HERE, instance_resource=head)) == []
    made = vms.get(**HERE, instance="head")
    first = made.network_interfaces[0]
    assert made.status == "RUNNING" and first.network_i_p.startswith("127.")
    assert compute("Disks").get(**HERE, disk="head").size_gb == 10
    for label, names in (("b", ["head"]), ("c", [])):
        request = compute_v1.AggregatedListInstancesRequest(project=PROJECT, filter=f"labels.a={label}")
        assert [found.name for _, part in vms.aggregated_list(request) for found in part.instances] == names
    assert [found.name for found in vms.list(**HERE)] == ["head"]
    tags = compute_v1.Tags(items=["t"], fingerprint=made.tags.fingerprint)
    assert error_codes(compute, vms.set_tags_unary(**HERE, instance="head", tags_resource=tags)) == []
    stale = compute_v1.Metadata(items=[], fingerprint="stale")
    with pytest.raises(exceptions.PreconditionFailed):
        vms.set_metadata_unary(**HERE, instance="head", metadata_resource=stale)
    for change, status in ((vms.stop_unary, "TERMINATED"), (vms.start_unary, "RUNNING")):
        assert error_codes(compute, change(**HERE, instance="head")) == []
        assert vms.get(**HERE, instance="head").status == status
    again = vms.get(**HERE, instance="head").network_interfaces[0]
    assert again.network_i_p == first.network_i_p
    assert again.access_configs[0].nat_i_p != first.access_configs[0].nat_i_p
    assert error_codes(compute, vms.delete_unary(**HERE, instance="head")) == []
    for client, name in ((vms, {"instance": "head"}), (compute("Disks"), {"disk": "head"})):
        with pytest.raises(exceptions.NotFound):
            client.get(**HERE, **name)


def test_spot_vms_are_preempted_and_zones_run_out(compute, compute_v1, weather):
    vms = compute("Instances")
    spot = compute_v1.Scheduling(provisioning_model="SPOT", instance_termination_action="DELETE")
    error_codes(compute, vms.insert_unary(**HERE, instance_resource=vm(compute_v1, "brief", scheduling=spot)))
    weather("preempt", name="brief")

    def gone():
        try:
            vms.get(**HERE, instance="brief")
        except exceptions.NotFound:
            return True

    until(gone)
    weather("break", name=ZONE, fault="vm-stockout")
    failed = error_codes(compute, vms.insert_unary(**HERE, instance_resource=vm(compute_v1, "none-left")))
    weather("break", name=ZONE, fault="vm-stockout", mend=True)
    assert failed == ["ZONE_RESOURCE_POOL_EXHAUSTED"] and not list(vms.list(**HERE))


def test_networks_and_rules(compute, compute_v1):
    network = compute_v1.Network(name="net", auto_create_subnetworks=True)
    error_codes(compute, compute("Networks").insert_unary(project=PROJECT, network_resource=network))
    assert sorted(found.name for found in compute("Networks").list(project=PROJECT)) == ["default", "net"]
    subnetwork = compute("Subnetworks").get(project=PROJECT, region="us-central1", subnetwork="net")
    assert subnetwork.ip_cidr_range.endswith(".0/20")
    rule = compute_v1.Firewall(
        name="rule",
        network=f"projects/{PROJECT}/global/networks/net",
        allowed=[compute_v1.Allowed(I_p_protocol="tcp", ports=["22"])],
        source_ranges=["1.2.3.4/32"],
    )
    error_codes(compute, compute("Firewalls").insert_unary(project=PROJECT, firewall_resource=rule))
    assert compute("Firewalls").get(project=PROJECT, firewall="rule").network.endswith("/networks/net")
    with pytest.raises(exceptions.BadRequest, match="already being used"):
        compute("Networks").delete_unary(project=PROJECT, network="net")
    error_codes(compute, compute("Firewalls").delete_unary(project=PROJECT, firewall="rule"))
    error_codes(compute, compute("Networks").delete_unary(project=PROJECT, network="net"))
    assert [found.name for found in compute("Networks").list(project=PROJECT)] == ["default"]
