"""Managed instance groups of TPUs: templates, workload policies, and groups whose hosts come all or not at all."""

import secrets
from typing import Any

from tpuswarm.catalog import Accelerator, accelerators
from tpuswarm.catalog.accelerators import format_topology
from tpuswarm.cloud.rehearsal.common.api import Call, Rejected
from tpuswarm.cloud.rehearsal.common.hosts import RehearsedHost
from tpuswarm.cloud.rehearsal.common.timetable import Timetable
from tpuswarm.cloud.rehearsal.common.zone_faults import ZoneFaults
from tpuswarm.cloud.rehearsal.compute.instances import Instances
from tpuswarm.cloud.rehearsal.compute.resources import Resource, Resources, format_now
from tpuswarm.cloud.rehearsal.compute.tpus import find_exhausted_quota, quota_message, stockout_message, tpu_of

PART_S, CREATE_S, RETRY_S, DELETE_S = 3, 30, 30, 25
KINDS = {"instanceTemplates": "instanceTemplate", "resourcePolicies": "resourcePolicy"}


class Groups:
    """compute.regionInstanceTemplates, resourcePolicies and instanceGroupManagers."""

    def __init__(self, resources: Resources, timetable: Timetable, zone_faults: ZoneFaults, instances: Instances):
        self._resources, self._timetable = resources, timetable
        self._zone_faults, self._instances = zone_faults, instances
        instances.find_slice = self._slice_of
        for what in ("filled", "deleted"):
            timetable.register(f"group {what}", getattr(self, f"_{what}"))

    def paths(self) -> list[str]:
        return [path for path, _ in self._resources.table.items() if "/instanceGroupManagers/" in path]

    def members(self, path: str) -> list[str]:
        """Return the paths of a group's instances, in the order of their numbers."""
        prefix = f"{path.partition('/instanceGroupManagers/')[0]}/instances/"
        return sorted(f"{prefix}{one['name']}" for one in self._resources.under(prefix) if _group_of(one) == path)

    def list_hosts(self, path: str) -> list[RehearsedHost]:
        return [host for member in self.members(path) for host in self._instances.list_hosts(member)]

    # The API.

    def insert_part(self, call: Call) -> Resource:
        """Add a template or a policy of a region."""
        kind = call.path["kind"]
        if kind == "resourcePolicies" and not (call.body.get("workloadPolicy") or {}).get("type"):
            raise Rejected(400, "required", "Required field 'resource.workloadPolicy.type' not specified")
        path = f"projects/{call.path['project']}/regions/{call.path['region']}/{kind}/{call.body.get('name', '')}"
        self._resources.add(path, call.body, KINDS[kind])
        return self._resources.begin("insert", path, PART_S)

    def delete_part(self, call: Call) -> Resource:
        place = f"projects/{call.path['project']}/regions/{call.path['region']}"
        path = f"{place}/{call.path['kind']}/{call.path['name']}"
        self._resources.get(path)
        for group in self.paths():
            if path in _links(self._resources.get(group)):
                message = f"The resource '{path}' is already being used by '{group}'"
                raise Rejected(400, "resourceInUseByAnotherResource", message)
        operation = self._resources.begin("delete", path, PART_S)
        self._resources.table.pop(path)
        return operation

    def insert(self, call: Call) -> Resource:
        place = f"projects/{call.path['project']}/zones/{call.path['zone']}"
        path = f"{place}/instanceGroupManagers/{call.body.get('name', '')}"
        self._instances.check_reachable(call.path["zone"])
        links = _links(call.body)
        parts = [self._resources.get(link) for link in links]
        size = int(call.body.get("targetSize") or 0)
        if len(links) == 2:
            if (call.body.get("targetSizePolicy") or {}).get("mode") != "BULK":
                message = "MIGs with TPU accelerator topology require BULK mode in target size policy"
                raise Rejected(400, "invalid", message)
            tpu = _slice(parts[0], parts[1])
            if tpu is None or size not in (0, tpu.hosts):
                raise Rejected(400, "invalid", f"Target size {size} does not match the accelerator topology.")
        status = {"isStable": size == 0, "bulkInstanceOperation": {"inProgress": size > 0}}
        fields = {**call.body, "currentActions": {"creating": size, "deleting": 0}, "status": status}
        group = self._resources.add(path, fields, "instanceGroupManager")
        self._timetable.schedule(CREATE_S, "group filled", path, group["id"])
        return self._resources.begin("insert", path, PART_S)

    def delete(self, call: Call) -> Resource:
        self._instances.check_reachable(call.path["zone"])
        path = f"projects/{call.path['project']}/zones/{call.path['zone']}/instanceGroupManagers/{call.path['name']}"
        group = self._resources.get(path)
        members = self.members(path)
        actions = {"creating": 0, "deleting": len(members) or 1}
        self._resources.table.put(path, {**group, "currentActions": actions, "status": {"isStable": False}})
        for member in members:
            self._instances.begin_stop(member)
        return self._resources.begin("delete", path, DELETE_S, "group deleted", path, group["id"])

    def list_members(self, call: Call) -> Resource:
        """Answer listManagedInstances."""
        path = f"projects/{call.path['project']}/zones/{call.path['zone']}/instanceGroupManagers/{call.path['name']}"
        self._resources.get(path)
        found = [self._resources.get(member) for member in self.members(path)]
        return {
            "managedInstances": [
                {"instance": one["selfLink"], "instanceStatus": one["status"], "currentAction": "NONE"} for one in found
            ]
        }

    # Events of the timetable.

    def _filled(self, path: str, group_id: str) -> None:
        group = self._resources.table.get(path)
        if group is None or group["id"] != group_id or group["currentActions"]["deleting"]:
            return
        zone, size = path.split("/")[3], int(group.get("targetSize") or 0)
        template = self._resources.get(_links(group)[0])
        prefix = f"{path.partition('/instanceGroupManagers/')[0]}/instances/"
        wanted = template["properties"]
        quota = find_exhausted_quota(self._zone_faults, zone, wanted, self._resources.under(prefix), size)
        if self._zone_faults.has_fault(zone, "stuck"):
            return
        if self._zone_faults.has_fault(zone, "stockout") or quota:
            code = "QUOTA_EXCEEDED" if quota else "ZONE_RESOURCE_POOL_EXHAUSTED"
            message = quota_message(*quota, zone) if quota else stockout_message(path.split("/")[1], zone)
            check = {"timestamp": format_now(), "error": {"errors": [{"code": code, "message": message}]}}
            status = {"isStable": False, "bulkInstanceOperation": {"inProgress": True, "lastProgressCheck": check}}
            self._resources.table.put(path, {**group, "status": status})
            self._timetable.schedule(RETRY_S, "group filled", path, group_id)
            return
        names = sorted({f"{group['baseInstanceName']}-{secrets.token_hex(2)}" for _ in range(4 * size)})[:size]
        for number, name in enumerate(names):
            self._instances.add_member(f"{prefix}{name}", wanted, path, number, self._slice_of_group(group))
        status = {"isStable": True, "bulkInstanceOperation": {"inProgress": False}}
        self._resources.table.put(path, {**group, "status": status, "currentActions": {"creating": 0, "deleting": 0}})

    def _deleted(self, path: str, group_id: str, operation: str) -> None:
        group = self._resources.table.get(path)
        if group is not None and group["id"] == group_id:
            for member in self.members(path):
                self._instances.remove(member)
            self._resources.table.pop(path)

    def _slice_of(self, instance: Resource) -> tuple[Accelerator, list[RehearsedHost]] | None:
        """Return the slice that an instance belongs to, and all its hosts; None: no slice."""
        path = _group_of(instance)
        group = self._resources.table.get(path) if path else None
        tpu = self._slice_of_group(group) if group else None
        return (tpu, self.list_hosts(path)) if path and tpu else None

    def _slice_of_group(self, group: Resource) -> Accelerator | None:
        parts = [self._resources.table.get(link) for link in _links(group)]
        return _slice(parts[0], parts[1]) if len(parts) == 2 and parts[0] and parts[1] else None


def _slice(template: Resource, policy: Resource) -> Accelerator | None:
    """Return the slice of a template's machines in a policy's topology."""
    host, topology = tpu_of(template["properties"]), policy["workloadPolicy"].get("acceleratorTopology")
    for tpu in accelerators():
        if host and tpu.generation == host.generation and format_topology(tpu.topology) == topology:
            return tpu
    return None


def _links(group: Resource) -> list[str]:
    """Return the paths of a group's template and, if it has one, of its policy."""
    links = [group.get("instanceTemplate") or "", (group.get("resourcePolicies") or {}).get("workloadPolicy") or ""]
    return [f"projects/{link.partition('projects/')[2]}" for link in links if link]


def _group_of(instance: Resource) -> str:
    items: list[dict[str, Any]] = (instance.get("metadata") or {}).get("items", [])
    link = next((item["value"] for item in items if item["key"] == "created-by"), "")
    return str(link)
