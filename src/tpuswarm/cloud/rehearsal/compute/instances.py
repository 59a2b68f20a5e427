"""VMs: from PROVISIONING to their end."""

from typing import Any, Literal

from tpuswarm.cloud.rehearsal.common.call import Call, Rejected
from tpuswarm.cloud.rehearsal.common.hosts import Facts, Hosts, RehearsedHost
from tpuswarm.cloud.rehearsal.common.refused import Refused
from tpuswarm.cloud.rehearsal.common.timetable import Timetable
from tpuswarm.cloud.rehearsal.common.weather import Weather
from tpuswarm.cloud.rehearsal.compute.resources import (
    BASE,
    Resource,
    Resources,
    fingerprint,
    region_of_zone,
    stamp,
)

CREATE_S, DELETE_S, STOP_S, START_S, CHANGE_S = 20, 20, 20, 15, 2
NOTICE_S, REPAIR_S = 30, 60
GUESTS_KEY = "enable-guest-attributes"


class Instances:
    """compute.instances."""

    def __init__(self, resources: Resources, timetable: Timetable, weather: Weather, hosts: Hosts):
        self._resources, self._timetable, self._weather, self._hosts = resources, timetable, weather, hosts
        for what in ("created", "deleted", "stopped", "started", "taken", "repaired"):
            timetable.on(f"instance {what}", getattr(self, f"_{what}"))

    def all(self) -> list[tuple[str, Resource]]:
        """By path."""
        return [(path, each) for path, each in self._resources.table.items() if "/instances/" in path]

    def find(self, path: str) -> Resource | None:
        """None if there is none."""
        return self._resources.table.get(path)

    def facts(self, host: RehearsedHost) -> Facts | None:
        """What a VM may know of itself."""
        instance = self._resources.table.get(host.owner)
        if instance is None:
            return None
        _, project, _, zone, *_ = host.owner.split("/")
        attributes = {each["key"]: each.get("value", "") for each in instance["metadata"].get("items", [])}
        machine_type = instance["machineType"].rsplit("/", 1)[-1]
        return Facts(project, zone, machine_type, attributes, instance["tags"].get("items", []), is_spot(instance))

    # Weather.

    def preempt(self, path: str) -> None:
        """Take it away, after a notice to what runs there."""
        instance = self._must_be(path, "RUNNING")
        for host in self._hosts.of(path):
            self._hosts.announce(host)
        self._timetable.after(NOTICE_S, "instance taken", path, instance["id"])

    def maintain(self, path: str) -> None:
        """It reboots, and has another external address afterwards."""
        instance = self._must_be(path, "RUNNING")
        for host in self._hosts.of(path):
            self._hosts.turn_off(host)
        self._be(path, "REPAIRING")
        self._timetable.after(REPAIR_S, "instance repaired", path, instance["id"])

    # The API.

    def insert(self, call: Call) -> Resource:
        """compute.instances.insert."""
        zone, project = self._place(call)
        body = dict(call.body)
        path = f"projects/{project}/zones/{zone}/instances/{body.get('name', '')}"
        if not body.get("machineType"):
            raise Rejected(400, "required", "Required field 'resource.machineType' not specified")
        network = body.get("networkInterfaces") or [{}]
        for each in network:
            wanted = f"projects/{project}/global/networks/{(each.get('network') or 'default').rsplit('/', 1)[-1]}"
            self._resources.get(wanted)
            each["network"], each["name"] = f"{BASE}{wanted}", "nic0"
            subnetwork = (each.get("subnetwork") or wanted).rsplit("/", 1)[-1]
            each["subnetwork"] = f"{BASE}projects/{project}/regions/{region_of_zone(zone)}/subnetworks/{subnetwork}"
        metadata = {"kind": "compute#metadata", "items": list((body.get("metadata") or {}).get("items", []))}
        tags = {"items": list((body.get("tags") or {}).get("items", []))}
        labels = dict(body.get("labels") or {})
        scheduling = {"automaticRestart": True, "provisioningModel": "STANDARD", **(body.get("scheduling") or {})}
        if scheduling["provisioningModel"] == "SPOT":
            scheduling |= {"preemptible": True, "automaticRestart": False}
        made = {
            **body,
            "machineType": _link(body["machineType"], project, zone),
            "status": "PROVISIONING",
            "networkInterfaces": network,
            "metadata": {**metadata, "fingerprint": fingerprint(metadata)},
            "tags": {**tags, "fingerprint": fingerprint(tags)},
            "labels": labels,
            "labelFingerprint": fingerprint(labels),
            "scheduling": scheduling,
            "canIpForward": bool(body.get("canIpForward")),
        }
        made["disks"] = self._disks(made, project, zone, body.get("name", ""))
        instance = self._resources.add(path, made, "instance")
        return self._resources.begin("insert", path, CREATE_S, "instance created", path, instance["id"])

    def get(self, call: Call) -> Resource:
        """compute.instances.get."""
        return self._resources.get(self._path(call))

    def listing(self, call: Call) -> Resource:
        """compute.instances.list."""
        zone, project = self._place(call)
        return self._resources.page(
            self._resources.under(f"projects/{project}/zones/{zone}/instances/"), call, "instance"
        )

    def delete(self, call: Call) -> Resource:
        """compute.instances.delete."""
        path = self._path(call)
        instance = self._resources.get(path)
        self._be(path, "STOPPING")
        return self._resources.begin("delete", path, DELETE_S, "instance deleted", path, instance["id"])

    def stop(self, call: Call) -> Resource:
        """compute.instances.stop."""
        path = self._path(call)
        instance = self._resources.get(path)
        self._be(path, "STOPPING")
        return self._resources.begin("stop", path, STOP_S, "instance stopped", path, instance["id"])

    def start(self, call: Call) -> Resource:
        """compute.instances.start."""
        path = self._path(call)
        instance = self._resources.get(path)
        if instance["status"] not in ("TERMINATED", "RUNNING"):
            raise Rejected(400, "resourceNotReady", f"The resource '{path}' is not ready")
        if instance["status"] == "TERMINATED":
            self._be(path, "PROVISIONING")
        return self._resources.begin("start", path, START_S, "instance started", path, instance["id"])

    def set_metadata(self, call: Call) -> Resource:
        """compute.instances.setMetadata."""
        return self._replace(call, "metadata", {"kind": "compute#metadata", "items": call.body.get("items", [])})

    def set_tags(self, call: Call) -> Resource:
        """compute.instances.setTags."""
        return self._replace(call, "tags", {"items": call.body.get("items", [])})

    def set_labels(self, call: Call) -> Resource:
        """compute.instances.setLabels."""
        path = self._path(call)
        instance = self._resources.get(path)
        _check(call.body.get("labelFingerprint"), instance["labelFingerprint"])
        labels = call.body.get("labels", {})
        self._resources.table.put(path, {**instance, "labels": labels, "labelFingerprint": fingerprint(labels)})
        return self._resources.begin("setLabels", path, CHANGE_S)

    def guest_attributes(self, call: Call, read: Any) -> Resource:
        """compute.instances.getGuestAttributes; `read(host, path)` gives what hosts have written."""
        path = self._path(call)
        items = self._resources.get(path)["metadata"].get("items", [])
        if not any(each["key"] == GUESTS_KEY and each.get("value", "").upper() == "TRUE" for each in items):
            raise Rejected(412, "conditionNotMet", "Guest attributes endpoint access is disabled.")
        query = call.query.get("queryPath", "")
        found = [
            {"namespace": key.split("/", 1)[0], "key": key.split("/", 1)[1], "value": value}
            for host in self._hosts.of(path)
            for key, value in read(host.id, query).items()
        ]
        if not found:
            raise Rejected(
                404, "notFound", f"The resource 'queryPath: {query}' of type 'Guest Attribute' was not found."
            )
        return {"kind": "compute#guestAttributes", "queryPath": query, "queryValue": {"items": found}}

    # What happens when its time has come.

    def _created(self, path: str, number: str, operation: str) -> None:
        instance = self._same(path, number)
        if instance is None:
            return
        _, project, _, zone, *_ = path.split("/")
        if self._weather.has(zone, "vm-stockout"):
            self._forget(path)
            self._resources.fail(
                operation,
                "ZONE_RESOURCE_POOL_EXHAUSTED",
                f"The zone 'projects/{project}/zones/{zone}' does not have enough resources available to fulfill the "
                "request. Try a different zone, or try again later.",
            )
            return
        external = any(each.get("accessConfigs") for each in instance["networkInterfaces"])
        self._hosts.add(path, 0, external)
        self._running(path)

    def _deleted(self, path: str, number: str, operation: str) -> None:
        if self._same(path, number):
            self._forget(path)

    def _stopped(self, path: str, number: str, operation: str) -> None:
        if self._same(path, number):
            for host in self._hosts.of(path):
                self._hosts.turn_off(host)
            self._be(path, "TERMINATED", lastStopTimestamp=stamp())

    def _started(self, path: str, number: str, operation: str) -> None:
        if (instance := self._same(path, number)) and instance["status"] == "PROVISIONING":
            for host in self._hosts.of(path):
                self._hosts.boot(host, new_external=True)
            self._running(path)

    def _taken(self, path: str, number: str) -> None:
        instance = self._same(path, number)
        if instance is None:
            return
        if instance["scheduling"].get("instanceTerminationAction") == "DELETE":
            self._forget(path)
            return
        for host in self._hosts.of(path):
            self._hosts.turn_off(host)
        self._be(path, "TERMINATED", lastStopTimestamp=stamp(), statusMessage="Instance was preempted.")

    def _repaired(self, path: str, number: str) -> None:
        if (instance := self._same(path, number)) and instance["status"] == "REPAIRING":
            for host in self._hosts.of(path):
                self._hosts.boot(host, new_external=True)
            self._running(path)

    def _running(self, path: str) -> None:
        (host,) = self._hosts.of(path)
        first, *others = self._resources.get(path)["networkInterfaces"]
        first = {**first, "networkIP": host.internal}
        if host.external:
            given = (first.get("accessConfigs") or [{}])[0]
            first["accessConfigs"] = [
                {"name": "external-nat", "type": "ONE_TO_ONE_NAT", **given, "natIP": host.external}
            ]
        self._be(path, "RUNNING", networkInterfaces=[first, *others], lastStartTimestamp=stamp())

    def _forget(self, path: str) -> None:
        instance = self._resources.get(path)
        self._hosts.remove(path)
        self._resources.table.pop(path)
        for disk in instance["disks"]:
            if disk.get("autoDelete"):
                self._resources.table.pop(disk["source"].removeprefix(BASE))

    def _be(self, path: str, status: str, **changes: Any) -> None:
        self._resources.table.put(path, {**self._resources.get(path), "status": status, **changes})

    def _replace(self, call: Call, part: Literal["metadata", "tags"], value: Resource) -> Resource:
        path = self._path(call)
        instance = self._resources.get(path)
        _check(call.body.get("fingerprint"), instance[part]["fingerprint"])
        self._resources.table.put(path, {**instance, part: {**value, "fingerprint": fingerprint(value)}})
        return self._resources.begin(f"set{part.title()}", path, CHANGE_S)

    def _disks(self, made: Resource, project: str, zone: str, name: str) -> list[Resource]:
        found = []
        for number, each in enumerate(made.get("disks") or [{"boot": True, "autoDelete": True}]):
            disk = {"type": "PERSISTENT", "mode": "READ_WRITE", "deviceName": f"persistent-disk-{number}", **each}
            if not disk.get("source"):
                asked = disk.pop("initializeParams", None) or {}
                path = f"projects/{project}/zones/{zone}/disks/{asked.get('diskName') or name}"
                size = str(asked.get("diskSizeGb") or 10)
                body = {"sizeGb": size, "status": "READY", "labels": asked.get("labels") or {}}
                self._resources.add(path, {**body, "sourceImage": asked.get("sourceImage", "")}, "disk")
                disk["source"], disk["diskSizeGb"] = f"{BASE}{path}", size
            found.append(disk)
        return found

    def _place(self, call: Call) -> tuple[str, str]:
        zone, project = call.path["zone"], call.path["project"]
        try:
            self._weather.reach(zone)
        except Refused as error:
            raise Rejected(
                403 if error.code == 7 else 503, "forbidden" if error.code == 7 else "backendError", str(error)
            ) from error
        return zone, project

    def _path(self, call: Call) -> str:
        zone, project = self._place(call)
        return f"projects/{project}/zones/{zone}/instances/{call.path['name']}"

    def _same(self, path: str, number: str) -> Resource | None:
        """The instance of that name, unless it is another one by now."""
        found = self._resources.table.get(path)
        return found if found is not None and found["id"] == number else None

    def _must_be(self, path: str, status: str) -> Resource:
        instance = self._resources.get(path)
        if instance["status"] != status:
            raise Rejected(400, "resourceNotReady", f"{path} is {instance['status']}, not {status}")
        return instance


def is_spot(instance: Resource) -> bool:
    """Whether it may be taken away."""
    return instance["scheduling"].get("provisioningModel") == "SPOT" or bool(instance["scheduling"].get("preemptible"))


def _check(given: str | None, wanted: str) -> None:
    if given != wanted:
        raise Rejected(412, "conditionNotMet", "Supplied fingerprint does not match current metadata fingerprint.")


def _link(machine_type: str, project: str, zone: str) -> str:
    name = machine_type.rsplit("/", 1)[-1]
    return f"{BASE}projects/{project}/zones/{zone}/machineTypes/{name}"
