"""The gcloud commands that do the same as tpuswarm."""

import shlex
from collections.abc import Mapping
from datetime import UTC, datetime

from tpuswarm.catalog import find
from tpuswarm.catalog.accelerators import format_topology
from tpuswarm.catalog.prices import region_of
from tpuswarm.cloud.google.instances import TPU_DISK_GIB, machine_type_of, run_seconds, wait_seconds
from tpuswarm.cloud.google.slices import spec_of_hosts
from tpuswarm.cloud.protocol import FLEET_LABEL, POOL_LABEL, Machine, Spec, TpuSpec, VmSpec
from tpuswarm.fleet.decide.region_quotas import host_count

TPU_VM = ("gcloud", "compute", "tpus", "tpu-vm")
QUEUED = ("gcloud", "compute", "tpus", "queued-resources")
INSTANCES = ("gcloud", "compute", "instances")
POLICIES = ("gcloud", "compute", "resource-policies")
TEMPLATES = ("gcloud", "compute", "instance-templates")
GROUPS = ("gcloud", "compute", "instance-groups", "managed")


def create(spec: Spec, project: str) -> str:
    """Return the command that creates a machine, without SSH keys: gcloud adds its own."""
    if isinstance(spec, TpuSpec) and spec.api == "tpu":
        return _create_tpu(spec, project)
    if isinstance(spec, TpuSpec) and find(spec.type).hosts > 1:
        return _create_slice(spec, project)
    return _create_instance(spec, project)


def delete(machine: Machine, project: str) -> str:
    """Return the command that deletes a machine, with its queued request."""
    options = [f"--project={project}", f"--zone={machine.zone}", "--quiet"]
    if machine.is_instance and machine.kind == "tpu" and host_count(machine.type) > 1:
        region = [f"--project={project}", f"--region={region_of(machine.zone)}", "--quiet"]
        lines = [
            [*GROUPS, "delete", machine.name, *options],
            [*POLICIES, "delete", machine.name, *region],
            [*TEMPLATES, "delete", machine.name, *region],
        ]
        return " && ".join(map(shlex.join, lines))
    if machine.is_instance:
        return shlex.join([*INSTANCES, "delete", machine.name, *options])
    if machine.request:
        return shlex.join([*QUEUED, "delete", machine.request, *options, "--force"])
    return shlex.join([*TPU_VM, "delete", machine.name, *options])


def stop_or_start(machine: Machine, verb: str, project: str) -> str:
    words = INSTANCES if machine.is_instance else TPU_VM
    return shlex.join([*words, verb, machine.name, f"--project={project}", f"--zone={machine.zone}"])


def grow_disk(machine: Machine, gib: int, project: str) -> str:
    options = [f"--size={gib}GB", f"--project={project}", f"--zone={machine.zone}", "--quiet"]
    return shlex.join(["gcloud", "compute", "disks", "resize", machine.name, *options])


def _create_tpu(spec: TpuSpec, project: str) -> str:
    queued = spec.is_queued
    program = [*(QUEUED if queued else TPU_VM), "create"]
    if spec.reservation:
        program.insert(1, "alpha")  # --reservation exists nowhere else
    words = [*program, spec.name, f"--project={project}", f"--zone={spec.zone}"]
    words += [f"--node-id={spec.name}"] if queued else []
    words += [f"--accelerator-type={find(spec.type).api_name or spec.type}"]
    words += [f"--{'runtime-version' if queued else 'version'}={spec.runtime}"]
    words += ["--spot"] if spec.how == "spot" else []
    words += [f"--reservation={spec.reservation}", "--reserved"] if spec.reservation else []
    words += [f"--valid-until-duration={spec.wait_s:.0f}s"] if queued and spec.wait_s else []
    words += _common_options(spec, "--internal-ips", "--subnetwork")
    for disk in spec.disks:
        source = f"projects/{project}/zones/{spec.zone}/disks/{disk.name}"
        words += [f"--data-disk=source={source},mode={'read-only' if disk.read_only else 'read-write'}"]
    return shlex.join(words)


def _create_slice(spec: TpuSpec, project: str) -> str:
    """Return the commands for a template, a topology, and a group of all hosts."""
    region, links = region_of(spec.zone), f"projects/{project}/regions/{region_of(spec.zone)}"
    template = [*TEMPLATES, "create", spec.name, f"--project={project}", f"--instance-template-region={region}"]
    template += [f"--region={region}"] if spec.subnetwork else []  # the subnetwork's
    template += _instance_options(spec_of_hosts(spec))
    policy = [*POLICIES, "create", "workload-policy", spec.name, f"--project={project}", f"--region={region}"]
    policy += ["--type=HIGH_THROUGHPUT", f"--accelerator-topology={format_topology(find(spec.type).topology)}"]
    group = [*GROUPS, "create", spec.name, f"--project={project}", f"--zone={spec.zone}"]
    group += [f"--template={links}/instanceTemplates/{spec.name}", f"--size={find(spec.type).hosts}"]
    group += ["--target-size-policy-mode=bulk", "--default-action-on-vm-failure=do-nothing"]
    group += [f"--workload-policy={links}/resourcePolicies/{spec.name}"]
    return " && ".join(map(shlex.join, (template, policy, group)))


def _create_instance(spec: Spec, project: str) -> str:
    words = [*INSTANCES, "create", spec.name, f"--project={project}", f"--zone={spec.zone}"]
    if isinstance(spec, TpuSpec) and spec.how == "flex-start":
        words += [f"--request-valid-for-duration={wait_seconds(spec)}s"]
    return shlex.join(words + _instance_options(spec))


def _instance_options(spec: Spec) -> list[str]:
    image_project, _, family = (spec.image if isinstance(spec, VmSpec) else spec.runtime).partition("/")
    words = [f"--machine-type={machine_type_of(spec)}", f"--image-project={image_project}", f"--image-family={family}"]
    words += [f"--boot-disk-size={spec.disk_gib if isinstance(spec, VmSpec) else TPU_DISK_GIB}GB"]
    if spec.how == "spot" or isinstance(spec, TpuSpec):
        words += ["--maintenance-policy=TERMINATE"]
    words += ["--provisioning-model=SPOT"] if spec.how == "spot" else []
    if isinstance(spec, VmSpec):
        words += [f"--boot-disk-type={spec.disk_type}"] if spec.disk_type else []
        words += ["--can-ip-forward"] if spec.ip_forward else []
        if spec.ends is not None:
            ends = datetime.fromtimestamp(spec.ends, UTC).isoformat(timespec="seconds")
            words += [f"--termination-time={ends}"]
    elif spec.how == "flex-start":
        words += ["--provisioning-model=FLEX_START", f"--max-run-duration={run_seconds(spec)}s"]
        words += ["--reservation-affinity=none"]
    elif spec.reservation:
        words += ["--provisioning-model=RESERVATION_BOUND", "--reservation-affinity=specific"]
        words += [f"--reservation={spec.reservation}"]
    if spec.how in ("spot", "reserved", "flex-start") or (isinstance(spec, VmSpec) and spec.ends is not None):
        words += ["--instance-termination-action=DELETE"]
    words += _common_options(spec, "--no-address", "--subnet")
    if isinstance(spec, TpuSpec):
        words += [f"--disk=name={disk.name},mode={'ro' if disk.read_only else 'rw'}" for disk in spec.disks]
    return [*words, "--scopes=cloud-platform"]


def _common_options(spec: Spec, no_external_ips: str, subnet: str) -> list[str]:
    words = [] if spec.network == "default" else [f"--network={spec.network}"]
    words += [f"{subnet}={spec.subnetwork}"] if spec.subnetwork else []
    words += [f"--tags={','.join(spec.tags)}"] if spec.tags else []
    words += [] if spec.external_ips else [no_external_ips]
    labels: Mapping[str, str] = {**spec.labels, FLEET_LABEL: spec.fleet, POOL_LABEL: spec.pool}
    words += [f"--labels={','.join(f'{key}={value}' for key, value in labels.items())}"]
    if metadata := [f"{key}={value}" for key, value in spec.metadata.items() if key != "ssh-keys"]:
        # A value may contain a comma, so use another separator: `gcloud topic escaping`.
        words += [f"--metadata=^~^{'~'.join(metadata)}"]
    return words + ([f"--service-account={spec.service_account}"] if spec.service_account else [])
