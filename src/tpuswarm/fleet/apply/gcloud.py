"""The gcloud lines that do what a fleet does, for a person to read, and to type where tpuswarm is not at hand."""

import shlex
from collections.abc import Mapping
from datetime import UTC, datetime

from tpuswarm.catalog import find
from tpuswarm.cloud.protocol import FLEET_LABEL, POOL_LABEL, Machine, Spec, TpuSpec, VmSpec

TPU_VM = ("gcloud", "compute", "tpus", "tpu-vm")
QUEUED = ("gcloud", "compute", "tpus", "queued-resources")
INSTANCES = ("gcloud", "compute", "instances")


def create(spec: Spec, project: str) -> str:
    """The line that creates it. Of its metadata the SSH keys are left out: gcloud brings its own."""
    return _vm(spec, project) if isinstance(spec, VmSpec) else _tpu(spec, project)


def delete(machine: Machine, project: str) -> str:
    """The line that deletes it, with its queued request."""
    place = [machine.name, f"--project={project}", f"--zone={machine.zone}", "--quiet"]
    if machine.kind == "vm":
        return shlex.join([*INSTANCES, "delete", *place])
    if machine.request:
        return shlex.join([*QUEUED, "delete", machine.request, *place[1:], "--force"])
    return shlex.join([*TPU_VM, "delete", *place])


def stop_or_start(machine: Machine, verb: str, project: str) -> str:
    """The line that stops or starts it."""
    words = TPU_VM if machine.kind == "tpu" else INSTANCES
    return shlex.join([*words, verb, machine.name, f"--project={project}", f"--zone={machine.zone}"])


def _tpu(spec: TpuSpec, project: str) -> str:
    queued = spec.how in ("queued", "reserved")
    words = [*(QUEUED if queued else TPU_VM), "create", spec.name, *_place(spec, project)]
    words += [f"--node-id={spec.name}"] if queued else []
    words += [f"--accelerator-type={find(spec.type).api_name or spec.type}"]
    words += [f"--{'runtime-version' if queued else 'version'}={spec.runtime}"]
    words += ["--spot"] if spec.how == "spot" else []
    words += [f"--reservation={spec.reservation}", "--reserved"] if spec.reservation else []
    words += [f"--valid-until-duration={spec.wait_s:.0f}s"] if queued and spec.wait_s else []
    words += _network(spec) + ([] if spec.external_ips else ["--internal-ips"])
    words += [f"--labels={_pairs({**spec.labels, FLEET_LABEL: spec.fleet, POOL_LABEL: spec.pool})}"]
    words += _metadata(spec.metadata)
    words += [f"--service-account={spec.service_account}"] if spec.service_account else []
    for disk in spec.disks:
        source = f"projects/{project}/zones/{spec.zone}/disks/{disk.name}"
        words += [f"--data-disk=source={source},mode={'read-only' if disk.read_only else 'read-write'}"]
    return shlex.join(words)


def _vm(spec: VmSpec, project: str) -> str:
    image_project, family = spec.image.split("/")
    words = [*INSTANCES, "create", spec.name, *_place(spec, project), f"--machine-type={spec.type}"]
    words += [f"--image-project={image_project}", f"--image-family={family}", f"--boot-disk-size={spec.disk_gib}GB"]
    words += ["--provisioning-model=SPOT"] if spec.spot else []
    if spec.ends is not None:
        ends = datetime.fromtimestamp(spec.ends, UTC).isoformat(timespec="seconds")
        words += [f"--termination-time={ends}", "--instance-termination-action=DELETE"]
    words += _network(spec) + ([] if spec.external_ips else ["--no-address"])
    words += ["--can-ip-forward"] if spec.ip_forward else []
    words += [f"--labels={_pairs({**spec.labels, FLEET_LABEL: spec.fleet, POOL_LABEL: spec.pool})}"]
    words += _metadata(spec.metadata)
    words += [f"--service-account={spec.service_account}"] if spec.service_account else []
    return shlex.join([*words, "--scopes=cloud-platform"])


def _place(spec: Spec, project: str) -> list[str]:
    return [f"--project={project}", f"--zone={spec.zone}"]


def _network(spec: Spec) -> list[str]:
    words = [] if spec.network == "default" else [f"--network={spec.network}"]
    words += [f"--subnetwork={spec.subnetwork}"] if spec.subnetwork else []
    return words + ([f"--tags={','.join(spec.tags)}"] if spec.tags else [])


def _metadata(metadata: Mapping[str, str]) -> list[str]:
    shown = {key: value for key, value in metadata.items() if key != "ssh-keys"}
    # With another separator than the comma, which a value may hold: `gcloud topic escaping`.
    return [f"--metadata=^~^{'~'.join(f'{key}={value}' for key, value in shown.items())}"] if shown else []


def _pairs(labels: Mapping[str, str]) -> str:
    return ",".join(f"{key}={value}" for key, value in labels.items())
