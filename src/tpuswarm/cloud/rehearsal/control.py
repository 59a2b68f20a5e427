"""Bad weather on demand: what `tpuswarm rehearsal` asks of the server, under /rehearsal/."""

from collections.abc import Callable
from typing import Any

from starlette.routing import Route

from tpuswarm.catalog import generations
from tpuswarm.cloud.rehearsal.cloud import Cloud
from tpuswarm.cloud.rehearsal.common.call import Call, Rejected
from tpuswarm.cloud.rehearsal.common.weather import ZONE_FAULTS
from tpuswarm.cloud.rehearsal.compute.networks import zones
from tpuswarm.cloud.rehearsal.machines.faults import MACHINE_FAULTS, NODE_FAULTS, Broken
from tpuswarm.cloud.rehearsal.machines.machines import Machines
from tpuswarm.cloud.rehearsal.tpu.nodes import State
from tpuswarm.cloud.rehearsal.tpu.offers import place_of
from tpuswarm.cloud.rehearsal.tpu.queue import State as RequestState
from tpuswarm.cloud.rehearsal.web import bucket_faults
from tpuswarm.cloud.rehearsal.web.bucket_faults import BUCKET_FAULTS, BucketFaults
from tpuswarm.cloud.rehearsal.web.objects import Objects
from tpuswarm.cloud.rehearsal.web.projects import PROJECT_FAULTS
from tpuswarm.cloud.rehearsal.wire.rest import routes
from tpuswarm.config.nearest import did_you_mean, nearest_name


class Control:
    """Answers with plain JSON; what cannot be done is a sentence with status 400."""

    def __init__(self, cloud: Cloud, machines: Callable[[], Machines], objects: Objects, buckets: BucketFaults):
        self._cloud, self._machines, self._objects, self._buckets = cloud, machines, objects, buckets

    def routes(self) -> list[Route]:
        """For an application."""
        return routes(
            self._cloud,
            [
                ("GET", "/rehearsal/status", self.status),
                ("POST", "/rehearsal/speed", self.speed),
                ("POST", "/rehearsal/preempt", self.preempt),
                ("POST", "/rehearsal/maintenance", self.maintenance),
                ("POST", "/rehearsal/stockout", self.stockout),
                ("POST", "/rehearsal/quota", self.quota),
                ("POST", "/rehearsal/break", self.break_),
            ],
        )

    def status(self, call: Call) -> dict[str, Any]:
        """Everything that there is."""
        machines = [
            {
                "name": node.name.rsplit("/", 1)[-1],
                "project": place_of(node.name).project,
                "zone": place_of(node.name).zone,
                "type": node.accelerator_type,
                "state": State(node.state).name,
                "workers": self._workers(node.name),
            }
            for node in self._cloud.nodes.all()
        ] + [
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
            {
                "name": each.name.rsplit("/", 1)[-1],
                "project": place_of(each.name).project,
                "zone": place_of(each.name).zone,
                "state": RequestState(each.state.state).name,
            }
            for each in self._cloud.queue.all()
        ]
        return {
            "speed": self._cloud.timetable.speed,
            "machines": machines,
            "requests": requests,
            "zones": self._cloud.weather.faults(),
            "buckets": self._buckets.all(),
            "quotas": self._cloud.weather.quotas(),
            "failures": self._cloud.timetable.failures,
        }

    def speed(self, call: Call) -> dict[str, Any]:
        """How fast its clock goes from now on."""
        self._cloud.timetable.speed = float(call.body["speed"])
        return {}

    def preempt(self, call: Call) -> dict[str, Any]:
        """Take a machine away."""
        owner = self._find(call.body["name"])
        if "/nodes/" in owner:
            self._cloud.nodes.preempt(owner, call.body.get("ending") or "preempted")
        else:
            self._cloud.instances.preempt(owner)
        return {"name": owner}

    def maintenance(self, call: Call) -> dict[str, Any]:
        """Reboot a machine."""
        owner = self._find(call.body["name"])
        (self._cloud.nodes if "/nodes/" in owner else self._cloud.instances).maintain(owner)
        return {"name": owner}

    def stockout(self, call: Call) -> dict[str, Any]:
        """A zone has no TPUs left, or has some again."""
        self._cloud.weather.set(_zone(call.body["zone"]), "stockout", not call.body.get("over"))
        return {}

    def quota(self, call: Call) -> dict[str, Any]:
        """So many cores (chips for v5e and v6e) of each generation, or of one, at a time in a zone."""
        generation = call.body.get("generation")
        known = [each.name for each in generations()]
        if generation is not None and generation not in known:
            raise _wrong(f"there is no generation {generation!r} of TPUs; {did_you_mean(generation, known)}")
        self._cloud.weather.set_quota(_zone(call.body["zone"]), generation, call.body["limit"])
        return {}

    def break_(self, call: Call) -> dict[str, Any]:
        """Plant a fault in a zone, a project, a bucket or a machine; or mend it."""
        name, fault, mend = call.body["name"], call.body["fault"], bool(call.body.get("mend"))
        if fault in ZONE_FAULTS:
            self._cloud.weather.set(_zone(name), fault, not mend)
            return {"what": ZONE_FAULTS[fault]}
        if fault in PROJECT_FAULTS:
            self._cloud.projects.set(name, fault, not mend)
            return {"what": PROJECT_FAULTS[fault]}
        if fault in BUCKET_FAULTS:
            for key in self._bucket_keys(name, fault):
                self._buckets.set(key, fault, not mend)
            return {"what": BUCKET_FAULTS[fault]}
        if fault in NODE_FAULTS:
            self._cloud.nodes.report(self._find(name), fault, not mend)
            return {"what": NODE_FAULTS[fault]}
        if fault not in MACHINE_FAULTS:
            known = [*MACHINE_FAULTS, *NODE_FAULTS, *ZONE_FAULTS, *PROJECT_FAULTS, *BUCKET_FAULTS]
            raise _wrong(f"there is no fault {fault!r}; {did_you_mean(fault, known)}")
        name, _, worker = name.partition("/worker/") if "/worker/" in name else name.partition("/")
        hosts = self._cloud.hosts.of(owner := self._find(name))
        number = int(worker) if worker.isdigit() else 0
        if number >= len(hosts) or not hosts[number].on:
            raise _wrong(f"{owner.rsplit('/', 1)[-1]} has no running worker {number}")
        host = hosts[number]
        if not host.chips:
            raise _wrong(f"{owner.rsplit('/', 1)[-1]} has no TPU")
        machines = self._machines()
        broken = Broken(host.id, machines.root(host), machines.environment(host, "root"))
        (MACHINE_FAULTS[fault].mend if mend else MACHINE_FAULTS[fault].plant)(broken)
        return {"what": MACHINE_FAULTS[fault].what}

    def _bucket_keys(self, name: str, fault: str) -> list[str]:
        """Return what a bucket's fault is planted in: the bucket of that name, or the hosts of the machine."""
        known = self._objects.names()
        if name in known:
            return [name]
        try:
            hosts = self._cloud.hosts.of(self._find(name))
        except Rejected:
            there = did_you_mean(name, known) if known else "there are no buckets"
            raise _wrong(f"the local cloud has no bucket {name!r}; {there}") from None
        if fault not in bucket_faults.MACHINE_FAULTS:
            raise _wrong(f"{fault} is a fault of a bucket, not of the machine {name}")
        return [bucket_faults.key_of_machine(host.id) for host in hosts]

    def _find(self, name: str) -> str:
        """The machine of that name, or resource path. Raises Rejected for none, and for several."""
        owners = [node.name for node in self._cloud.nodes.all()] + [path for path, _ in self._cloud.instances.all()]
        found = [each for each in owners if each == name or each.rsplit("/", 1)[-1] == name]
        if not found:
            known = [each.rsplit("/", 1)[-1] for each in owners]
            there = did_you_mean(name, known) if known else "there are no machines"
            raise _wrong(f"the local cloud has no machine {name!r}; {there}")
        if len(found) > 1:
            raise _wrong(f"{name} is ambiguous; give one of {', '.join(found)}")
        return found[0]

    def _workers(self, owner: str) -> list[dict[str, Any]]:
        return [
            {
                "id": host.id,
                "internal": host.internal,
                "external": host.external,
                "on": host.on,
                "leaving": host.leaving,
                "folder": str(self._machines().root(host).path),
            }
            for host in self._cloud.hosts.of(owner)
        ]


def _zone(name: str) -> str:
    if name not in zones():
        near = nearest_name(name, zones())
        said = f"did you mean {near}?" if near else "they are called like us-central1-f"
        raise _wrong(f"there is no zone {name!r}; {said}")
    return name


def _wrong(sentence: str) -> Rejected:
    return Rejected(400, "invalid", sentence)
