"""Instances of Compute Engine, VMs and TPUs, from PROVISIONING to their end."""

from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from typing import Any, Literal

from tpuswarm.catalog import Accelerator
from tpuswarm.cloud.rehearsal.common.api import PERMISSION_DENIED, Call, Refused, Rejected
from tpuswarm.cloud.rehearsal.common.hosts import Facts, Hosts, RehearsedHost
from tpuswarm.cloud.rehearsal.common.policies import default_account
from tpuswarm.cloud.rehearsal.common.region_quotas import Held, RegionQuotas
from tpuswarm.cloud.rehearsal.common.timetable import Timetable
from tpuswarm.cloud.rehearsal.common.zone_faults import ZoneFaults
from tpuswarm.cloud.rehearsal.compute.resources import BASE, Resource, Resources, fingerprint, format_now, zone_region
from tpuswarm.cloud.rehearsal.compute.tpus import (
    find_exhausted_quota,
    is_flex_start,
    is_spot,
    list_offers,
    no_machine_type,
    quota_message,
    stockout_message,
    tpu_attributes,
    tpu_of,
)

CREATE_S, DELETE_S, STOP_S, START_S, CHANGE_S = 20, 20, 20, 15, 2
PREEMPTION_NOTICE_S, REPAIR_S = 30, 60
MIN_WAIT_S, RETRY_S = 90, 30
"""A flex-start request that may wait for so long becomes PENDING
(https://docs.cloud.google.com/compute/docs/instances/instance-lifecycle)."""
GUESTS_KEY = "enable-guest-attributes"


class Instances:
    """compute.instances."""

    def __init__(
        self,
        resources: Resources,
        timetable: Timetable,
        zone_faults: ZoneFaults,
        hosts: Hosts,
        region_quotas: RegionQuotas,
    ):
        self._region_quotas = region_quotas
        region_quotas.sources.append(self._hosts_of_project)
        self._resources, self._timetable, self._zone_faults, self._hosts = resources, timetable, zone_faults, hosts
        self.find_slice: Callable[[Resource], tuple[Accelerator, list[RehearsedHost]] | None] = lambda instance: None
        """Returns the slice that an instance belongs to, and all its hosts."""
        for what in ("created", "tried", "expired", "ended", "deleted", "stopped", "started", "taken", "repaired"):
            timetable.register(f"instance {what}", getattr(self, f"_{what}"))

    def all(self) -> list[tuple[str, Resource]]:
        return [(path, resource) for path, resource in self._resources.table.items() if "/instances/" in path]

    def _hosts_of_project(self, project: str) -> Iterator[Held]:
        for path, instance in self.all():
            if path.startswith(f"projects/{project}/"):
                has_external = _has_external(instance["networkInterfaces"]) and instance["status"] != "TERMINATED"
                yield Held(path.split("/")[3], 1, has_external)

    def facts(self, host: RehearsedHost) -> Facts | None:
        """Return the facts of a host's VM; None if it is gone."""
        instance = self._resources.table.get(host.owner)
        if instance is None:
            return None
        _, project, _, zone, *_ = host.owner.split("/")
        attributes = {item["key"]: item.get("value", "") for item in instance["metadata"].get("items", [])}
        machine_type = instance["machineType"].rsplit("/", 1)[-1]
        tags, account = instance["tags"].get("items", []), requested_account(instance, project)
        if tpu := tpu_of(instance):
            slice_, workers = self.find_slice(instance) or (tpu, self._hosts.list_workers(host.owner))
            attributes = {**tpu_attributes(slice_, host, workers, zone), **attributes}
        return Facts(project, zone, machine_type, attributes, tags, is_spot(instance), account)

    # Members of groups.

    def add_member(self, path: str, body: Resource, group: str, number: int, tpu: Accelerator | None) -> None:
        """Add a running instance of a group."""
        _, project, _, zone, _, name = path.split("/")
        fields = self._fields({**deepcopy(body), "name": name}, project, zone, [{"key": "created-by", "value": group}])
        self._resources.add(path, fields, "instance")
        self._hosts.add(path, number, _has_external(fields["networkInterfaces"]), tpu)
        self._set_running(path)

    def begin_stop(self, path: str) -> None:
        self._set_status(path, "STOPPING")

    def list_hosts(self, path: str) -> list[RehearsedHost]:
        return self._hosts.list_workers(path)

    # Faults.

    def preempt(self, path: str) -> None:
        """Give notice to a VM's processes and preempt it later."""
        instance = self._find_running(path)
        self._hosts.give_notice(path)
        self._timetable.schedule(PREEMPTION_NOTICE_S, "instance taken", path, instance["id"])

    def maintain(self, path: str) -> None:
        """Reboot a VM; it gets a new external address."""
        instance = self._find_running(path)
        self._hosts.turn_off(path)
        self._set_status(path, "REPAIRING")
        self._timetable.schedule(REPAIR_S, "instance repaired", path, instance["id"])

    def _find_running(self, path: str) -> Resource:
        instance = self._resources.get(path)
        if instance["status"] != "RUNNING":
            raise Rejected(400, "resourceNotReady", f"{path} is {instance['status']}, not RUNNING")
        return instance

    # The API.

    def insert(self, call: Call) -> Resource:
        zone, project = self._location(call)
        body = dict(call.body)
        path = f"projects/{project}/zones/{zone}/instances/{body.get('name', '')}"
        if not body.get("machineType"):
            raise Rejected(400, "required", "Required field 'resource.machineType' not specified")
        if tpu_of(body) and _last(body["machineType"]) not in list_offers().get(zone, ()):
            raise Rejected(400, "invalid", no_machine_type(zone, project, _last(body["machineType"])))
        held = Held(zone, 1, _has_external(body.get("networkInterfaces") or [{}]))
        if quota := self._region_quotas.find_exhausted(project, held):
            region = zone_region(zone)
            limit = float(self._region_quotas.limit(region, quota))
            raise Rejected(403, "quotaExceeded", f"Quota '{quota}' exceeded.  Limit: {limit} in region {region}.")
        fields = self._fields(body, project, zone)
        others = self._resources.under(f"projects/{project}/zones/{zone}/instances/")
        exhausted = find_exhausted_quota(self._zone_faults, zone, fields, others)
        params = fields.pop("params", None) or {}
        wait_s = float((params.get("requestValidForDuration") or {}).get("seconds") or 0)
        if is_flex_start(fields) and not fields["scheduling"].get("maxRunDuration"):
            raise Rejected(400, "invalid", "scheduling.maxRunDuration must be specified for FLEX_START instances.")
        if is_flex_start(fields) and wait_s >= MIN_WAIT_S:
            instance = self._resources.add(path, {**fields, "status": "PENDING"}, "instance")
            operation = self._resources.begin("insert", path, wait_s, "instance expired", path, instance["id"])
            link = operation["selfLink"].removeprefix(BASE)
            self._timetable.schedule(RETRY_S, "instance tried", path, instance["id"], link)
            return operation
        instance = self._resources.add(path, fields, "instance")
        operation = self._resources.begin("insert", path, CREATE_S, "instance created", path, instance["id"])
        if exhausted:
            self.remove(path)
            operation_path = operation["selfLink"].removeprefix(BASE)
            self._resources.fail(operation_path, "QUOTA_EXCEEDED", quota_message(*exhausted, zone))
        return operation

    def _fields(self, body: Resource, project: str, zone: str, more_metadata: Iterable[Resource] = ()) -> Resource:
        """Return a new instance's fields; makes its disks."""
        interfaces = body.get("networkInterfaces") or [{}]
        for interface in interfaces:
            network = f"projects/{project}/global/networks/{_last(interface.get('network') or 'default')}"
            self._resources.get(network)
            interface["network"], interface["name"] = f"{BASE}{network}", "nic0"
            subnetwork = _last(interface.get("subnetwork") or network)
            interface["subnetwork"] = f"{BASE}projects/{project}/regions/{zone_region(zone)}/subnetworks/{subnetwork}"
        items = [*(body.get("metadata") or {}).get("items", []), *more_metadata]
        metadata = {"kind": "compute#metadata", "items": items}
        tags = {"items": list((body.get("tags") or {}).get("items", []))}
        labels = dict(body.get("labels") or {})
        scheduling = {"automaticRestart": True, "provisioningModel": "STANDARD", **(body.get("scheduling") or {})}
        if scheduling["provisioningModel"] == "SPOT":
            scheduling |= {"preemptible": True, "automaticRestart": False}
        fields = {
            **body,
            "machineType": f"{BASE}projects/{project}/zones/{zone}/machineTypes/{_last(body['machineType'])}",
            "status": "PROVISIONING",
            "networkInterfaces": interfaces,
            "metadata": {**metadata, "fingerprint": fingerprint(metadata)},
            "tags": {**tags, "fingerprint": fingerprint(tags)},
            "labels": labels,
            "labelFingerprint": fingerprint(labels),
            "scheduling": scheduling,
            "canIpForward": bool(body.get("canIpForward")),
        }
        disks = body.get("disks") or [{"boot": True, "autoDelete": True}]
        fields["disks"] = [
            self._make_disk(disk, number, project, zone, body.get("name", "")) for number, disk in enumerate(disks)
        ]
        return fields

    def _make_disk(self, disk: Resource, number: int, project: str, zone: str, name: str) -> Resource:
        disk = {"type": "PERSISTENT", "mode": "READ_WRITE", "deviceName": f"persistent-disk-{number}", **disk}
        if not disk.get("source"):
            params = disk.pop("initializeParams", None) or {}
            path = f"projects/{project}/zones/{zone}/disks/{params.get('diskName') or name}"
            size = str(params.get("diskSizeGb") or 10)
            body = {"sizeGb": size, "status": "READY", "labels": params.get("labels") or {}}
            kind = params.get("diskType") or f"zones/{zone}/diskTypes/pd-standard"
            body |= {"sourceImage": params.get("sourceImage", ""), "type": f"{BASE}projects/{project}/{kind}"}
            self._resources.add(path, body, "disk")
            disk["source"], disk["diskSizeGb"] = f"{BASE}{path}", size
        return disk

    def get(self, call: Call) -> Resource:
        return self._resources.get(self._path(call))

    def list_page(self, call: Call) -> Resource:
        zone, project = self._location(call)
        instances = self._resources.under(f"projects/{project}/zones/{zone}/instances/")
        return self._resources.page(instances, call, "instance")

    def delete(self, call: Call) -> Resource:
        return self._begin_change(call, "delete", "STOPPING", DELETE_S, "instance deleted")

    def stop(self, call: Call) -> Resource:
        return self._begin_change(call, "stop", "STOPPING", STOP_S, "instance stopped")

    def start(self, call: Call) -> Resource:
        path = self._path(call)
        status = self._resources.get(path)["status"]
        if status not in ("TERMINATED", "RUNNING"):
            raise Rejected(400, "resourceNotReady", f"The resource '{path}' is not ready")
        status = "PROVISIONING" if status == "TERMINATED" else status
        return self._begin_change(call, "start", status, START_S, "instance started")

    def _begin_change(self, call: Call, verb: str, status: str, seconds: float, event: str) -> Resource:
        path = self._path(call)
        instance = self._resources.get(path)
        self._set_status(path, status)
        return self._resources.begin(verb, path, seconds, event, path, instance["id"])

    def set_metadata(self, call: Call) -> Resource:
        return self._replace(call, "metadata", {"kind": "compute#metadata", "items": call.body.get("items", [])})

    def set_tags(self, call: Call) -> Resource:
        return self._replace(call, "tags", {"items": call.body.get("items", [])})

    def _replace(self, call: Call, part: Literal["metadata", "tags"], value: Resource) -> Resource:
        path = self._path(call)
        instance = self._resources.get(path)
        _check_fingerprint(call.body.get("fingerprint"), instance[part]["fingerprint"])
        self._resources.table.put(path, {**instance, part: {**value, "fingerprint": fingerprint(value)}})
        return self._resources.begin(f"set{part.title()}", path, CHANGE_S)

    def set_labels(self, call: Call) -> Resource:
        path = self._path(call)
        instance = self._resources.get(path)
        _check_fingerprint(call.body.get("labelFingerprint"), instance["labelFingerprint"])
        labels = call.body.get("labels", {})
        self._resources.table.put(path, {**instance, "labels": labels, "labelFingerprint": fingerprint(labels)})
        return self._resources.begin("setLabels", path, CHANGE_S)

    def guest_attributes(self, call: Call, read: Callable[[str, str], dict[str, str]]) -> Resource:
        """Answer getGuestAttributes; `read(host, path)` returns a host's values."""
        path = self._path(call)
        items = self._resources.get(path)["metadata"].get("items", [])
        if not any(item["key"] == GUESTS_KEY and item.get("value", "").upper() == "TRUE" for item in items):
            raise Rejected(412, "conditionNotMet", "Guest attributes endpoint access is disabled.")
        query = call.query.get("queryPath", "")
        attributes = [
            {"namespace": key.split("/", 1)[0], "key": key.split("/", 1)[1], "value": value}
            for host in self._hosts.list_workers(path)
            for key, value in read(host.id, query).items()
        ]
        if not attributes:
            raise Rejected(
                404, "notFound", f"The resource 'queryPath: {query}' of type 'Guest Attribute' was not found."
            )
        return {"kind": "compute#guestAttributes", "queryPath": query, "queryValue": {"items": attributes}}

    # Events of the timetable.

    def _created(self, path: str, instance_id: str, operation: str) -> None:
        instance = self._find_same(path, instance_id)
        if instance is None:
            return
        _, project, _, zone, *_ = path.split("/")
        tpu = tpu_of(instance)
        if self._zone_faults.has_fault(zone, "stuck") and tpu:
            return
        if self._zone_faults.has_fault(zone, "stockout" if tpu else "vm-stockout"):
            self.remove(path)
            self._resources.fail(operation, "ZONE_RESOURCE_POOL_EXHAUSTED", stockout_message(project, zone))
            return
        self._hosts.add(path, 0, _has_external(instance["networkInterfaces"]), tpu)
        self._set_running(path)

    def _tried(self, path: str, instance_id: str, operation: str) -> None:
        """Give a waiting instance its capacity, if there is some and quota too."""
        instance = self._find_same(path, instance_id)
        if instance is None or instance["status"] != "PENDING":
            return
        zone = path.split("/")[3]
        others = [one for one in self._resources.under(path.rpartition("/")[0] + "/") if one["id"] != instance_id]
        if self._zone_faults.has_fault(zone, "stockout", "unreachable", "stuck") or find_exhausted_quota(
            self._zone_faults, zone, instance, [one for one in others if one["status"] != "PENDING"]
        ):
            self._timetable.schedule(RETRY_S, "instance tried", path, instance_id, operation)
            return
        self._hosts.add(path, 0, _has_external(instance["networkInterfaces"]), tpu_of(instance))
        self._set_running(path)
        self._resources.finish(operation)

    def _expired(self, path: str, instance_id: str, operation: str) -> None:
        instance = self._find_same(path, instance_id)
        if instance is not None and instance["status"] == "PENDING":
            self.remove(path)
            message = stockout_message(path.split("/")[1], path.split("/")[3])
            self._resources.fail(operation, "ZONE_RESOURCE_POOL_EXHAUSTED", message)

    def _ended(self, path: str, instance_id: str) -> None:
        """Delete an instance that has run for its maxRunDuration."""
        if self._find_same(path, instance_id):
            self.remove(path)

    def _deleted(self, path: str, instance_id: str, operation: str) -> None:
        if self._find_same(path, instance_id):
            self.remove(path)

    def _stopped(self, path: str, instance_id: str, operation: str) -> None:
        if self._find_same(path, instance_id):
            self._hosts.turn_off(path)
            self._set_status(path, "TERMINATED", lastStopTimestamp=format_now())

    def _started(self, path: str, instance_id: str, operation: str) -> None:
        self._boot(path, instance_id, "PROVISIONING")

    def _repaired(self, path: str, instance_id: str) -> None:
        self._boot(path, instance_id, "REPAIRING")

    def _taken(self, path: str, instance_id: str) -> None:
        instance = self._find_same(path, instance_id)
        if instance is None:
            return
        if instance["scheduling"].get("instanceTerminationAction") == "DELETE":
            self.remove(path)
            return
        self._hosts.turn_off(path)
        message = "Instance was preempted."
        self._set_status(path, "TERMINATED", lastStopTimestamp=format_now(), statusMessage=message)

    def _boot(self, path: str, instance_id: str, status: str) -> None:
        if (instance := self._find_same(path, instance_id)) and instance["status"] == status:
            self._hosts.boot(path, has_new_external=True)
            self._set_running(path)

    def _set_running(self, path: str) -> None:
        (host,) = self._hosts.list_workers(path)
        first, *others = self._resources.get(path)["networkInterfaces"]
        first = {**first, "networkIP": host.internal}
        if host.external:
            requested = (first.get("accessConfigs") or [{}])[0]
            first["accessConfigs"] = [
                {"name": "external-nat", "type": "ONE_TO_ONE_NAT", **requested, "natIP": host.external}
            ]
        if is_flex_start(self._resources.get(path)):
            duration = float(self._resources.get(path)["scheduling"]["maxRunDuration"]["seconds"])
            self._timetable.schedule(duration, "instance ended", path, self._resources.get(path)["id"])
        self._set_status(path, "RUNNING", networkInterfaces=[first, *others], lastStartTimestamp=format_now())

    def remove(self, path: str) -> None:
        instance = self._resources.get(path)
        self._hosts.remove(path)
        self._resources.table.pop(path)
        for disk in instance["disks"]:
            if disk.get("autoDelete"):
                self._resources.table.pop(disk["source"].removeprefix(BASE))

    def _set_status(self, path: str, status: str, **changes: Any) -> None:
        self._resources.table.put(path, {**self._resources.get(path), "status": status, **changes})

    def _location(self, call: Call) -> tuple[str, str]:
        """Return zone and project. Raises Rejected if the zone is not reachable."""
        self.check_reachable(call.path["zone"])
        return call.path["zone"], call.path["project"]

    def check_reachable(self, zone: str) -> None:
        """Raise Rejected if the zone is not reachable."""
        try:
            self._zone_faults.check_reachable(zone)
        except Refused as error:
            is_denied = error.code == PERMISSION_DENIED
            reason = "forbidden" if is_denied else "backendError"
            raise Rejected(403 if is_denied else 503, reason, str(error)) from error

    def _path(self, call: Call) -> str:
        zone, project = self._location(call)
        return f"projects/{project}/zones/{zone}/instances/{call.path['name']}"

    def _find_same(self, path: str, instance_id: str) -> Resource | None:
        """Return the instance, or None if it is gone or another one has its name."""
        instance = self._resources.table.get(path)
        return instance if instance is not None and instance["id"] == instance_id else None


def _has_external(interfaces: Iterable[Resource]) -> bool:
    return any(interface.get("accessConfigs") for interface in interfaces)


def requested_account(instance: Resource, project: str) -> str:
    email = next((account.get("email") for account in instance.get("serviceAccounts", ())), None)
    return default_account(project) if email in (None, "default") else str(email)


def _check_fingerprint(given: str | None, current: str) -> None:
    if given != current:
        raise Rejected(412, "conditionNotMet", "Supplied fingerprint does not match current metadata fingerprint.")


def _last(path: str) -> str:
    return path.rsplit("/", 1)[-1]
