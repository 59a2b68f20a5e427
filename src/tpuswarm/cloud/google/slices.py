"""TPUs of several hosts in Compute Engine: an instance template, a workload policy and a group of instances.

The three have the slice's name. The template is made first and deleted last, so it shows all that is left of a slice.
https://docs.cloud.google.com/compute/docs/tpus/create-tpu-mig-multi-host-slice
"""

import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

from tpuswarm.catalog import find
from tpuswarm.catalog.accelerators import format_topology
from tpuswarm.catalog.prices import region_of
from tpuswarm.cloud.errors import CloudError, Denied, Invalid, NoQuota, NotFound, Unreachable
from tpuswarm.cloud.google.access import Access, wait_until
from tpuswarm.cloud.google.answers import answer_from_operation
from tpuswarm.cloud.google.failures import cloud_error_for
from tpuswarm.cloud.google.instances import COMPUTE_HOST, how_of, instance_from_spec, list_aggregated
from tpuswarm.cloud.google.nodes import parse_timestamp
from tpuswarm.cloud.protocol import REMAINS, How, Machine, State, TpuSpec, Worker

SLICE_LABEL, ZONE_LABEL, TYPE_LABEL = "tpuswarm-slice", "tpuswarm-zone", "tpuswarm-type"
"""Labels of a slice's template and hosts, which have neither field of their own."""
NEW_S = 300.0
"""A template without hosts is a slice that is being made for so long; then the group must say that hosts will come."""
ENDED_STATUSES = ("STOPPING", "STOPPED", "SUSPENDING", "SUSPENDED", "TERMINATED", "DEPROVISIONING")


class SliceParts(NamedTuple):
    """A slice's template and group from REST; None: it has no group."""

    template: Mapping[str, Any]
    group: Mapping[str, Any] | None


class Slices:
    """The calls for slices of one project."""

    def __init__(self, access: Access):
        self._access = access

    def create(self, spec: TpuSpec) -> str:
        """Make a slice's parts; return the path of the group's operation.

        Removes the parts if one is refused. Keeps them after a lost answer: the group may exist, and the listing tells.
        """
        doing, region = f"creating {spec.name} in {spec.zone}", f"regions/{region_of(spec.zone)}"
        links = {kind: f"projects/{self._access.project}/{region}/{kind}/{spec.name}" for kind in PARTS}
        self._make(doing, f"{region}/instanceTemplates", template_from_spec(spec, self._access.project))
        try:
            self._make(doing, f"{region}/resourcePolicies", policy_from_spec(spec))
            group = group_from_spec(spec, links)
            answer = self._access.post(doing, self._url(f"zones/{spec.zone}/instanceGroupManagers"), group)
        except Unreachable:
            raise
        except CloudError:
            with suppress(CloudError):  # a part that stays is listed
                self.delete_parts(doing, region, spec.name)
            raise
        return f"projects/{self._access.project}/zones/{spec.zone}/operations/{answer['name']}"

    def delete(self, machine: Machine) -> str:
        """Begin to delete a slice's hosts, or what is left without them. Raises NotFound if nothing is."""
        doing, zone = f"deleting {machine.name} in {machine.zone}", f"zones/{machine.zone}"
        try:
            answer = self._delete(doing, f"{zone}/instanceGroupManagers/{machine.name}")
        except NotFound:
            return self.delete_parts(doing, f"regions/{region_of(machine.zone)}", machine.name)
        return f"projects/{self._access.project}/{zone}/operations/{answer['name']}"

    def delete_parts(self, doing: str, region: str, name: str) -> str:
        """Delete policy and template of a slice without hosts. Raises NotFound if there is no template."""
        try:
            operation = self._delete(doing, f"{region}/resourcePolicies/{name}")
            self._wait(doing, f"{region}/operations/{operation['name']}")
        except NotFound:
            pass  # only the template is left
        answer = self._delete(doing, f"{region}/instanceTemplates/{name}")
        return f"projects/{self._access.project}/{region}/operations/{answer['name']}"

    def list_parts(self) -> tuple[list[SliceParts], frozenset[str]]:
        """List the slices that tpuswarm made, and zones and regions that do not answer.

        List the hosts later: a stable group then has all that it will have.
        """
        templates, unreachable = list_aggregated(self._access, "instanceTemplates")
        templates = [one for one in templates if SLICE_LABEL in one.get("properties", {}).get("labels", {})]
        groups, silent = list_aggregated(self._access, "instanceGroupManagers") if templates else ([], frozenset())
        by_name = {(group["zone"].rsplit("/", 1)[-1], group["name"]): group for group in groups if "zone" in group}
        parts = [SliceParts(template, by_name.get(_slice_key(template))) for template in templates]
        return parts, unreachable | silent

    def _make(self, doing: str, path: str, body: Mapping[str, Any]) -> None:
        operation = self._access.post(doing, self._url(path), body)
        self._wait(doing, f"{path.rpartition('/')[0]}/operations/{operation['name']}")

    def _wait(self, doing: str, operation: str) -> None:
        def is_done() -> bool:
            answer = self._access.get(doing, self._url(operation))
            if error := answer_from_operation(answer):
                raise cloud_error_for(error, doing, self._access.project)
            return bool(answer["status"] == "DONE")

        wait_until(doing, is_done)

    def _delete(self, doing: str, path: str) -> dict[str, Any]:
        answer = self._access.call_once(doing, lambda: self._access.rest("DELETE", self._url(path), {}).json())
        return dict(answer)

    def _url(self, path: str) -> str:
        return self._access.url(COMPUTE_HOST, f"compute/v1/projects/{self._access.project}/{path}")


PARTS = ("instanceTemplates", "resourcePolicies")


def template_from_spec(spec: TpuSpec, project: str) -> dict[str, Any]:
    """Return the body of regionInstanceTemplates.insert: an instance's, with plain names and without its own name."""
    properties = instance_from_spec(spec_of_hosts(spec), project)
    for name in ("name", "params"):
        properties.pop(name, None)
    properties["machineType"] = properties["machineType"].rsplit("/", 1)[-1]
    for disk in properties["disks"]:
        disk |= {"source": disk["source"].rsplit("/", 1)[-1]} if "source" in disk else {}
    return {"name": spec.name, "properties": properties}


def spec_of_hosts(spec: TpuSpec) -> TpuSpec:
    """Return the spec with the labels that tell a slice's hosts from other instances."""
    return replace(spec, labels={**spec.labels, SLICE_LABEL: spec.name, ZONE_LABEL: spec.zone, TYPE_LABEL: spec.type})


def policy_from_spec(spec: TpuSpec) -> dict[str, Any]:
    """Return the body of resourcePolicies.insert: chips connected in this topology when the hosts are created."""
    topology = format_topology(find(spec.type).topology)
    return {"name": spec.name, "workloadPolicy": {"type": "HIGH_THROUGHPUT", "acceleratorTopology": topology}}


def group_from_spec(spec: TpuSpec, links: Mapping[str, str]) -> dict[str, Any]:
    """Return the body of instanceGroupManagers.insert: all hosts or none, and none replaced alone.

    Groups of TPUs refuse another mode than BULK, and resize requests (a public log of July 2026).
    """
    return {
        "name": spec.name,
        "baseInstanceName": spec.name,
        "instanceTemplate": links["instanceTemplates"],
        "targetSize": find(spec.type).hosts,
        "targetSizePolicy": {"mode": "BULK"},
        "resourcePolicies": {"workloadPolicy": links["resourcePolicies"]},
        "instanceLifecyclePolicy": {"defaultActionOnFailure": "DO_NOTHING"},
    }


def machines_from_slices(
    slices: Iterable[SliceParts], instances: Iterable[Mapping[str, Any]], unreachable: frozenset[str], project: str
) -> list[Machine]:
    """Convert slices and their hosts among `instances`, which were listed later; skips unreachable zones.

    Hosts without a template are a slice too: they cost money.
    """
    hosts: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for instance in instances:
        if name := slice_of(instance):
            hosts.setdefault((instance["zone"].rsplit("/", 1)[-1], name), []).append(instance)
    known = {_slice_key(parts.template): parts for parts in slices}
    known |= {key: SliceParts(_template_of(key[1], hosts[key]), None) for key in hosts if key not in known}
    return [_machine(parts, hosts.get(key, []), project) for key, parts in known.items() if key[0] not in unreachable]


def slice_of(instance: Mapping[str, Any]) -> str | None:
    """Return the name of the slice that an instance belongs to; None: it is a machine of its own."""
    name: str | None = instance.get("labels", {}).get(SLICE_LABEL)
    return name


def _template_of(name: str, hosts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a template that says what its hosts say."""
    first = min(hosts, key=lambda host: str(host.get("creationTimestamp", "")))
    return {"name": name, "creationTimestamp": first.get("creationTimestamp"), "properties": first}


def _slice_key(template: Mapping[str, Any]) -> tuple[str, str]:
    return template["properties"]["labels"][ZONE_LABEL], template["name"]


def _machine(parts: SliceParts, instances: Iterable[Mapping[str, Any]], project: str) -> Machine:
    template, group = parts
    properties = template["properties"]
    labels = properties["labels"]
    hosts = sorted(instances, key=lambda instance: str(instance["name"]))  # by number, as their metadata lists them
    created = parse_timestamp(template.get("creationTimestamp"))
    error = None if group is None else _refusal(group, template["name"], project)
    how = how_of(properties.get("scheduling", {}))
    state, said, why = _state(group, hosts, find(labels[TYPE_LABEL]).hosts, how, error, time.time() - created)
    return Machine(
        name=template["name"],
        zone=labels[ZONE_LABEL],
        kind="tpu",
        type=labels[TYPE_LABEL],
        state=state,
        said=said,
        why=why,
        how=how,
        api="compute",
        created=created,
        workers=tuple(map(_worker, hosts)),
        labels=labels,
        metadata={item["key"]: item.get("value", "") for item in properties.get("metadata", {}).get("items", ())},
        error=error if state == "dead" else None,
    )


def _state(
    group: Mapping[str, Any] | None,
    hosts: list[Mapping[str, Any]],
    count: int,
    how: How,
    error: CloudError | None,
    age_s: float,
) -> tuple[State, str, str]:
    """Return state, the cloud's word for it, and why. A slice that has lost one host has ended."""
    if group is None and not hosts:
        return ("creating" if age_s < NEW_S else "dead"), REMAINS, "it has no hosts"
    group = group or {}  # not listed, though its hosts are
    statuses = [str(host.get("status", "")) for host in hosts]
    if group.get("currentActions", {}).get("deleting") or group.get("targetSize") == 0:
        return "deleting", "DELETING", ""
    if statuses == ["RUNNING"] * count:
        return "ready", "RUNNING", ""
    for host in hosts:
        if host.get("status") in ENDED_STATUSES:
            return "dead", "TERMINATED", f"host {host['name']}: {host.get('statusMessage') or host['status']}"
    if _is_settled(group) and (hosts or age_s >= NEW_S):
        return "dead", "TERMINATED", f"{len(hosts)} of {count} hosts are left"
    is_waiting = how == "flex-start" and "RUNNING" not in statuses
    if error and (not is_waiting or isinstance(error, NoQuota | Denied | Invalid)):
        return "dead", error.code, str(error)
    said = next((status for status in statuses if status != "RUNNING"), "CREATING")
    return ("waiting" if is_waiting else "creating"), said, ""  # waiting has no limit in Compute Engine


def _is_settled(group: Mapping[str, Any]) -> bool:
    """Whether the group will make no more hosts."""
    status = group.get("status", {})
    is_in_progress = status.get("bulkInstanceOperation", {}).get("inProgress")
    return bool(status.get("isStable")) and not is_in_progress and not group.get("currentActions", {}).get("creating")


def _refusal(group: Mapping[str, Any], name: str, project: str) -> CloudError | None:
    """Return why Compute Engine has not made the hosts so far, if it says so."""
    progress = group.get("status", {}).get("bulkInstanceOperation", {}).get("lastProgressCheck", {})
    answer = answer_from_operation(progress)
    return cloud_error_for(answer, f"creating the hosts of {name}", project) if answer else None


def _worker(host: Mapping[str, Any]) -> Worker:
    first: Mapping[str, Any] = next(iter(host.get("networkInterfaces", ())), {})
    external = next((config.get("natIP") for config in first.get("accessConfigs", ())), None)
    return Worker(first.get("networkIP"), external, str(host["name"]))
