"""Answer `tpuswarm rehearsal`: status, speed and faults on demand, under /rehearsal/."""

from typing import Any

from starlette.routing import Route

from tpuswarm.catalog import generations
from tpuswarm.cloud.protocol import REGION_QUOTAS
from tpuswarm.cloud.rehearsal.cloud import Cloud
from tpuswarm.cloud.rehearsal.common.api import Call, Rejected
from tpuswarm.cloud.rehearsal.common.hosts import RehearsedHost
from tpuswarm.cloud.rehearsal.common.zone_faults import ZONE_FAULTS
from tpuswarm.cloud.rehearsal.compute.networks import list_regions, list_zones
from tpuswarm.cloud.rehearsal.connect import CloudFolder
from tpuswarm.cloud.rehearsal.machines.faults import MACHINE_FAULTS, NODE_FAULTS, FaultyMachine
from tpuswarm.cloud.rehearsal.machines.root import Root
from tpuswarm.cloud.rehearsal.projects import PROJECT_FAULTS
from tpuswarm.cloud.rehearsal.storage import bucket_faults
from tpuswarm.cloud.rehearsal.storage.bucket_faults import BUCKET_FAULTS, BucketFaults
from tpuswarm.cloud.rehearsal.storage.objects import Objects
from tpuswarm.cloud.rehearsal.tpu.nodes import State
from tpuswarm.cloud.rehearsal.tpu.offers import parse_location
from tpuswarm.cloud.rehearsal.tpu.queue import State as RequestState
from tpuswarm.cloud.rehearsal.wire.rest import routes
from tpuswarm.config.nearest import did_you_mean, nearest_name


class Control:
    """Answers in JSON; impossible commands get status 400 and a sentence."""

    def __init__(self, cloud: Cloud, folder: CloudFolder, storage: str, objects: Objects, buckets: BucketFaults):
        """`storage`: the URL of the cloud's buckets."""
        self._cloud, self._folder, self._storage = cloud, folder, storage
        self._objects, self._buckets = objects, buckets

    def routes(self) -> list[Route]:
        return routes(
            self._cloud.answer,
            [
                ("GET", "/rehearsal/status", self._status),
                ("POST", "/rehearsal/speed", self._set_speed),
                ("POST", "/rehearsal/preempt", self._preempt),
                ("POST", "/rehearsal/maintenance", self._maintain),
                ("POST", "/rehearsal/stockout", self._set_stockout),
                ("POST", "/rehearsal/quota", self._set_quota),
                ("POST", "/rehearsal/break", self._break),
            ],
        )

    def _status(self, call: Call) -> dict[str, Any]:
        nodes = [
            {
                **_name_and_location(node.name),
                "type": node.accelerator_type,
                "state": State(node.state).name,
                "workers": self._workers(node.name),
            }
            for node in self._cloud.nodes.all()
        ]
        instances = [
            {
                "name": instance["name"],
                "project": path.split("/")[1],
                "zone": path.split("/")[3],
                "type": instance["machineType"].rsplit("/", 1)[-1],
                "state": instance["status"],
                "workers": self._workers(path),
            }
            for path, instance in self._cloud.instances.all()
        ]
        requests = [
            {**_name_and_location(request.name), "state": RequestState(request.state.state).name}
            for request in self._cloud.queue.all()
        ]
        return {
            "speed": self._cloud.timetable.speed,
            "machines": nodes + instances,
            "requests": requests,
            "zones": self._cloud.zone_faults.faults(),
            "buckets": self._buckets.all(),
            "quotas": self._cloud.zone_faults.quotas() | self._cloud.region_quotas.limits(),
            "failures": self._cloud.timetable.failures,
        }

    def _set_speed(self, call: Call) -> dict[str, Any]:
        self._cloud.timetable.speed = float(call.body["speed"])
        return {}

    def _preempt(self, call: Call) -> dict[str, Any]:
        owner = self._find(call.body["name"])
        if "/nodes/" in owner:
            self._cloud.nodes.preempt(owner, call.body.get("ending") or "preempted")
        for instance in self._instances(owner):
            self._cloud.instances.preempt(instance)
        return {"name": owner}

    def _maintain(self, call: Call) -> dict[str, Any]:
        owner = self._find(call.body["name"])
        if "/nodes/" in owner:
            self._cloud.nodes.maintain(owner)
        for instance in self._instances(owner):
            self._cloud.instances.maintain(instance)
        return {"name": owner}

    def _instances(self, owner: str) -> list[str]:
        """Return an instance, or those of a group; none of a node."""
        if "/instanceGroupManagers/" in owner:
            return self._cloud.groups.members(owner)
        return [owner] if "/instances/" in owner else []

    def _hosts(self, owner: str) -> list[RehearsedHost]:
        if "/instanceGroupManagers/" in owner:
            return self._cloud.groups.list_hosts(owner)
        return self._cloud.hosts.list_workers(owner)

    def _set_stockout(self, call: Call) -> dict[str, Any]:
        self._cloud.zone_faults.set_fault(_check_zone(call.body["zone"]), "stockout", not call.body.get("over"))
        return {}

    def _set_quota(self, call: Call) -> dict[str, Any]:
        generation = call.body.get("generation")
        if generation in REGION_QUOTAS:
            region = _check_place(call.body["zone"], list_regions(), "region")
            self._cloud.region_quotas.set_limit(region, generation, call.body["limit"])
            return {}
        known = [*(generation.name for generation in generations()), "v5e-serving"]
        if generation is not None and generation not in known:
            raise _invalid(f"there is no generation {generation!r} of TPUs; {did_you_mean(generation, known)}")
        self._cloud.zone_faults.set_quota(_check_zone(call.body["zone"]), generation, call.body["limit"])
        return {}

    def _break(self, call: Call) -> dict[str, Any]:
        """Plant a fault, or mend it; "what" describes it."""
        name, fault, is_planted = call.body["name"], call.body["fault"], not call.body.get("mend")
        if fault in ZONE_FAULTS:
            self._cloud.zone_faults.set_fault(_check_zone(name), fault, is_planted)
            return {"what": ZONE_FAULTS[fault]}
        if fault in PROJECT_FAULTS:
            self._cloud.projects.set_fault(name, fault, is_planted)
            return {"what": PROJECT_FAULTS[fault]}
        if fault in BUCKET_FAULTS:
            for key in self._bucket_keys(name, fault):
                self._buckets.set_fault(key, fault, is_planted)
            return {"what": BUCKET_FAULTS[fault]}
        if fault in NODE_FAULTS:
            self._cloud.nodes.set_fault(self._find(name), fault, is_planted)
            return {"what": NODE_FAULTS[fault]}
        if fault not in MACHINE_FAULTS:
            known = [*MACHINE_FAULTS, *NODE_FAULTS, *ZONE_FAULTS, *PROJECT_FAULTS, *BUCKET_FAULTS]
            raise _invalid(f"there is no fault {fault!r}; {did_you_mean(fault, known)}")
        name, _, worker = name.partition("/worker/") if "/worker/" in name else name.partition("/")
        owner = self._find(name)
        hosts = self._hosts(owner)
        number = int(worker) if worker.isdigit() else 0
        short_name = owner.rsplit("/", 1)[-1]
        if number >= len(hosts) or not hosts[number].on:
            raise _invalid(f"{short_name} has no running worker {number}")
        host = hosts[number]
        if not host.chips:
            raise _invalid(f"{short_name} has no TPU")
        root = Root(self._folder, host)
        machine = FaultyMachine(host.id, root, root.environment("root", self._storage))
        MACHINE_FAULTS[fault].set(machine, is_planted)
        return {"what": MACHINE_FAULTS[fault].effect}

    def _bucket_keys(self, name: str, fault: str) -> list[str]:
        """Return the keys of a bucket fault: the bucket of that name, or the hosts of the machine."""
        buckets = self._objects.bucket_names()
        if name in buckets:
            return [name]
        try:
            hosts = self._hosts(self._find(name))
        except Rejected:
            suggestion = did_you_mean(name, buckets) if buckets else "there are no buckets"
            raise _invalid(f"the local cloud has no bucket {name!r}; {suggestion}") from None
        if fault not in bucket_faults.MACHINE_FAULTS:
            raise _invalid(f"{fault} is a fault of a bucket, not of the machine {name}")
        return [bucket_faults.machine_key(host.id) for host in hosts]

    def _find(self, name: str) -> str:
        """Return the path of the machine with this name or path. Raises Rejected for none, and for several."""
        owners = [node.name for node in self._cloud.nodes.all()] + [path for path, _ in self._cloud.instances.all()]
        owners += self._cloud.groups.paths()
        matches = [owner for owner in owners if name in (owner, owner.rsplit("/", 1)[-1])]
        if not matches:
            names = [owner.rsplit("/", 1)[-1] for owner in owners]
            suggestion = did_you_mean(name, names) if names else "there are no machines"
            raise _invalid(f"the local cloud has no machine {name!r}; {suggestion}")
        if len(matches) > 1:
            raise _invalid(f"{name} is ambiguous; give one of {', '.join(matches)}")
        return matches[0]

    def _workers(self, owner: str) -> list[dict[str, Any]]:
        return [
            {
                "id": host.id,
                "internal": host.internal,
                "external": host.external,
                "on": host.on,
                "leaving": host.leaving,
                "folder": str(Root(self._folder, host).path),
            }
            for host in self._cloud.hosts.list_workers(owner)
        ]


def _name_and_location(path: str) -> dict[str, Any]:
    location = parse_location(path)
    return {"name": path.rsplit("/", 1)[-1], "project": location.project, "zone": location.zone}


def _check_zone(name: str) -> str:
    return _check_place(name, list_zones(), "zone")


def _check_place(name: str, places: list[str], kind: str) -> str:
    if name not in places:
        near = nearest_name(name, places)
        suggestion = f"did you mean {near}?" if near else f"{kind}s look like us-central1{'-f' * (kind == 'zone')}"
        raise _invalid(f"there is no {kind} {name!r}; {suggestion}")
    return name


def _invalid(message: str) -> Rejected:
    return Rejected(400, "invalid", message)
