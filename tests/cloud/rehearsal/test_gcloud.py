"""Real gcloud, if installed, takes the local cloud for Google's."""

import json
import os
import shlex
import shutil
import subprocess
from dataclasses import replace

import pytest

from tests.waiting import until
from tpuswarm.cloud.google.access import Access
from tpuswarm.cloud.google.instances import list_aggregated
from tpuswarm.cloud.google.provider import GoogleProvider
from tpuswarm.cloud.google.slices import PARTS, group_from_spec
from tpuswarm.cloud.protocol import Disk, TpuSpec, VmSpec
from tpuswarm.cloud.rehearsal.connect import gcloud_variables
from tpuswarm.fleet.apply import gcloud as gcloud_line

needs_gcloud = pytest.mark.skipif(not shutil.which("gcloud"), reason="gcloud is not installed")
pytestmark = [pytest.mark.long, needs_gcloud]
ZONE = "--zone=us-central1-f"


@pytest.fixture
def gcloud(place, endpoints):
    def run(*words: str) -> list[str]:
        variables = {**os.environ, **gcloud_variables(place, endpoints), "CLOUDSDK_CORE_PROJECT": "by-gcloud"}
        words = ("gcloud", "compute", *words, "--quiet")
        done = subprocess.run(words, env=variables, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    return run


def test_gcloud_manages_tpus(gcloud, tpu):
    kind = ["--accelerator-type=v2-8", "--version=tpu-ubuntu2204-base"]
    gcloud("tpus", "tpu-vm", "create", "one", ZONE, *kind, "--labels=a=b")
    assert gcloud("tpus", "tpu-vm", "list", "--zone=-", "--format=value(name,state)") == ["one", "READY"]
    gcloud("tpus", "tpu-vm", "delete", "one", ZONE)
    kind[1] = "--runtime-version=tpu-ubuntu2204-base"
    spot = ["--node-id=two-n", "--spot", "--valid-until-duration=1h"]
    gcloud("tpus", "queued-resources", "create", "two", ZONE, *kind, *spot)
    assert gcloud("tpus", "queued-resources", "list", ZONE, "--format=value(name.basename())") == ["two"]
    gcloud("tpus", "queued-resources", "delete", "two", ZONE, "--force")
    assert not list(tpu.list_nodes(parent="projects/by-gcloud/locations/-"))


def test_gcloud_manages_vms(gcloud):
    """The test of init goes through networks, rules, buckets and services."""
    image = ["--image-family=ubuntu-2204-lts", "--image-project=ubuntu-os-cloud"]
    gcloud("instances", "create", "head", ZONE, "--machine-type=n2-standard-8", *image, "--tags=a")
    assert gcloud("instances", "list", "--format=value(name,status)") == ["head", "RUNNING"]
    gcloud("instances", "delete", "head", ZONE)


IMAGE = "ubuntu-os-accelerator-images/ubuntu-accel-2204-amd64-tpu-v5e-v5p-v6e"
TPU = TpuSpec("a", "us-east5-a", "v6e-8", "on-demand", "f1e2", "small", IMAGE, "compute", tags=("t",))
SPECS = {
    "on demand": replace(TPU, name="a", disks=(Disk("data", True),), metadata={"text": "a,b"}),
    "spot": replace(TPU, name="b", how="spot", external_ips=False, subnetwork="default"),
    "TPU API": replace(TPU, name="c", how="spot", api="tpu", runtime="v2-alpha-tpuv6e"),
    "spot in line": replace(TPU, name="e", how="spot", api="tpu", runtime="v2-alpha-tpuv6e", wait_s=3600.0),
    "VM": VmSpec("d", TPU.zone, "n2-highmem-8", "f1e2", "head", "debian-cloud/debian-12", 50, spot=True, ends=4e9),
}


@pytest.mark.parametrize("spec", SPECS.values(), ids=list(SPECS))
def test_printed_line_makes_the_machine_that_the_product_makes(place, endpoints, gcloud, spec):
    ours, theirs = (GoogleProvider(Access(project, endpoints)) for project in ("by-product", "by-gcloud"))
    if spec.name == "a":
        for cloud in (ours, theirs):
            disks = cloud._zone_url(spec.zone, "disks")
            cloud.access.post("making a disk", disks, {"name": "data"})
    ours.create(spec)
    line = gcloud_line.create(spec, "by-gcloud")
    gcloud(*shlex.split(line)[2:])
    made = [until(lambda cloud=cloud: described(cloud, spec.name)) for cloud in (ours, theirs)]
    assert made[0] == made[1]


def test_printed_lines_of_a_slice_make_the_template_and_topology_that_the_product_makes(endpoints, gcloud):
    """The group's own line has a flag that gcloud knows since late 2025 only."""
    from google.cloud import compute_v1

    spec = replace(TPU, name="quad", type="v6e-16", how="spot", subnetwork="default")
    ours, theirs = (GoogleProvider(Access(project, endpoints)) for project in ("by-product", "by-gcloud"))
    ours.create(spec)
    *lines, group = gcloud_line.create(spec, "by-gcloud").split(" && ")
    for line in lines:
        gcloud(*shlex.split(line)[2:])
    parts = [
        [list_aggregated(cloud.access, kind)[0][0] for kind in ("instanceTemplates", "resourcePolicies")]
        for cloud in (ours, theirs)
    ]
    made, printed = (template["properties"] for template, _ in parts)
    assert (made["machineType"], made["tags"]) == (printed["machineType"], printed["tags"])
    assert made["scheduling"].items() <= printed["scheduling"].items()
    assert made["labels"].items() <= printed["labels"].items()
    assert parts[0][1]["workloadPolicy"] == parts[1][1]["workloadPolicy"]
    links = {kind: f"projects/by-gcloud/regions/us-east5/{kind}/quad" for kind in PARTS}
    body = group_from_spec(spec, links)
    assert compute_v1.InstanceGroupManager.from_json(json.dumps(body)), "Google's client knows all of its fields"
    assert f"--template={body['instanceTemplate']}" in group and f"--size={body['targetSize']}" in group
    assert f"--workload-policy={body['resourcePolicies']['workloadPolicy']}" in group


def described(cloud, name):
    """Return what must be equal of a machine that is ready."""
    machine = next((machine for machine in cloud.machines([]).machines if machine.name == name), None)
    if machine is None or machine.state != "ready":
        return None
    fields = {key: getattr(machine, key) for key in ("type", "zone", "kind", "how", "api", "labels", "disk_gib")}
    fields["metadata"] = {key: value for key, value in machine.metadata.items() if key in ("text", "a")}
    fields["external"] = bool(machine.workers[0].external)
    if machine.is_instance:
        shown = cloud.access.get("looking", cloud._instance_url(machine))
        keys = ("provisioningModel", "onHostMaintenance", "instanceTerminationAction", "terminationTime")
        fields["scheduling"] = {key: (shown["scheduling"].get(key) or "")[:19] for key in keys}
        fields["tags"], fields["disks"] = shown["tags"]["items"], [disk.get("mode") for disk in shown["disks"]]
        fields["scopes"] = shown["serviceAccounts"][0]["scopes"]
    return fields
