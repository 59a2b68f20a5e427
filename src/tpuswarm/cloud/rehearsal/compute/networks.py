"""Networks with their subnetworks, firewall rules, disks, and what there is in zones and regions."""

from typing import Any

from tpuswarm import catalog
from tpuswarm.cloud.rehearsal.common.call import Call, Rejected
from tpuswarm.cloud.rehearsal.common.refused import INVALID_ARGUMENT, Refused
from tpuswarm.cloud.rehearsal.common.weather import Weather
from tpuswarm.cloud.rehearsal.compute.resources import BASE, Resource, Resources, region_of_zone
from tpuswarm.cloud.rehearsal.tpu.offers import offered

NETWORK_S, RULE_S, DISK_S = 15, 5, 5
OTHER_ZONES = ("us-central1-f", "us-west1-a", "us-west1-b", "europe-west1-b", "asia-northeast1-a")
"""Besides those with TPUs."""
OPEN = ["0.0.0.0/0"]
DEFAULT_RULES: dict[str, Resource] = {
    "default-allow-internal": {
        "allowed": [{"IPProtocol": "tcp", "ports": ["0-65535"]}, {"IPProtocol": "udp", "ports": ["0-65535"]}],
        "sourceRanges": ["10.128.0.0/9"],
    },
    "default-allow-ssh": {"allowed": [{"IPProtocol": "tcp", "ports": ["22"]}], "sourceRanges": OPEN},
    "default-allow-rdp": {"allowed": [{"IPProtocol": "tcp", "ports": ["3389"]}], "sourceRanges": OPEN},
    "default-allow-icmp": {"allowed": [{"IPProtocol": "icmp"}], "sourceRanges": OPEN},
}
"""What the network `default` of every new project lets in. https://cloud.google.com/firewall/docs/firewalls"""


def zones() -> list[str]:
    """All of Compute Engine that the local cloud knows."""
    return sorted({*offered(), *OTHER_ZONES})


def regions() -> list[str]:
    """Those of the zones."""
    return sorted({region_of_zone(zone) for zone in zones()})


class Networks:
    """compute.networks, subnetworks, firewalls, disks, zones, regions and machineTypes."""

    def __init__(self, resources: Resources, weather: Weather):
        self._resources, self._weather = resources, weather

    def welcome(self, project: str) -> None:
        """A new project has a network."""
        path = f"projects/{project}/global/networks/default"
        if path not in self._resources.table:
            self._add_network(path, {"autoCreateSubnetworks": True, "description": "Default network for the project"})
            for name, rule in DEFAULT_RULES.items():
                self._add_rule(f"projects/{project}/global/firewalls/{name}", {**rule, "network": f"{BASE}{path}"})

    # Networks and subnetworks.

    def insert_network(self, call: Call) -> Resource:
        """compute.networks.insert."""
        path = f"projects/{call.path['project']}/global/networks/{call.body.get('name', '')}"
        self._add_network(path, call.body)
        return self._resources.begin("insert", path, NETWORK_S)

    def delete_network(self, call: Call) -> Resource:
        """compute.networks.delete."""
        project, path = call.path["project"], _global(call, "networks")
        network = self._resources.get(path)
        users = [
            other["selfLink"].removeprefix(BASE)
            for other in self._resources.table.values()
            if other.get("network") == network["selfLink"] and other["kind"] != "compute#subnetwork"
        ]
        users += [
            other["selfLink"].removeprefix(BASE)
            for other in self._resources.table.values()
            if any(each.get("network") == network["selfLink"] for each in other.get("networkInterfaces", ()))
        ]
        if users:
            raise Rejected(
                400,
                "resourceInUseByAnotherResource",
                f"The network resource '{path}' is already being used by '{users[0]}'",
            )
        for link in network["subnetworks"]:
            self._resources.table.pop(link.removeprefix(BASE))
        assert project
        operation = self._resources.begin("delete", path, NETWORK_S)
        self._resources.table.pop(path)
        return operation

    def insert_subnetwork(self, call: Call) -> Resource:
        """compute.subnetworks.insert."""
        path = f"projects/{call.path['project']}/regions/{call.path['region']}/subnetworks/{call.body.get('name', '')}"
        network_path = call.body.get("network", "").removeprefix(BASE)
        network = self._resources.get(network_path)
        made = self._resources.add(path, call.body, "subnetwork")
        network["subnetworks"].append(made["selfLink"])
        self._resources.table.put(network_path, network)
        return self._resources.begin("insert", path, NETWORK_S)

    def _add_network(self, path: str, body: Resource) -> None:
        automatic = bool(body.get("autoCreateSubnetworks", True))
        network = self._resources.add(
            path, {"routingConfig": {"routingMode": "REGIONAL"}, **body, "autoCreateSubnetworks": automatic}, "network"
        )
        project, name = path.split("/")[1], path.rsplit("/", 1)[-1]
        network["subnetworks"] = []
        for number, region in enumerate(regions() if automatic else []):
            subnetwork = {
                "network": network["selfLink"],
                "ipCidrRange": f"10.{128 + number // 16}.{number % 16 * 16}.0/20",
                "gatewayAddress": f"10.{128 + number // 16}.{number % 16 * 16}.1",
            }
            below = f"projects/{project}/regions/{region}/subnetworks/{name}"
            network["subnetworks"].append(self._resources.add(below, subnetwork, "subnetwork")["selfLink"])
        self._resources.table.put(path, network)

    def check(self, project: str, zone: str, network: str, subnetwork: str) -> None:
        """Raises Refused where the network, by name or path, has no such subnetwork in the zone's region."""
        network, subnetwork = network.rsplit("/", 1)[-1], subnetwork.rsplit("/", 1)[-1]
        path = f"projects/{project}/regions/{region_of_zone(zone)}/subnetworks/{subnetwork}"
        found = self._resources.table.get(path)
        if subnetwork == network == "default":
            return  # every project has it
        if found is None or found["network"].rsplit("/", 1)[-1] != network:
            raise Refused(INVALID_ARGUMENT, f"Subnetwork '{path}' is not in network '{network}', or does not exist.")

    # Firewall rules.

    def insert_rule(self, call: Call) -> Resource:
        """compute.firewalls.insert."""
        path = f"projects/{call.path['project']}/global/firewalls/{call.body.get('name', '')}"
        wanted = (call.body.get("network") or "global/networks/default").rsplit("/", 1)[-1]
        network = self._resources.get(f"projects/{call.path['project']}/global/networks/{wanted}")
        self._add_rule(path, {**call.body, "network": network["selfLink"]})
        return self._resources.begin("insert", path, RULE_S)

    def patch_rule(self, call: Call) -> Resource:
        """compute.firewalls.patch and update."""
        path = _global(call, "firewalls")
        self._resources.table.put(path, {**self._resources.get(path), **call.body})
        return self._resources.begin("patch", path, RULE_S)

    def _add_rule(self, path: str, body: Resource) -> None:
        if not body.get("allowed") and not body.get("denied"):
            raise Rejected(400, "invalid", "At least one of 'allowed' and 'denied' must be specified.")
        self._resources.add(
            path, {"priority": 1000, "direction": "INGRESS", "disabled": False, "description": "", **body}, "firewall"
        )

    # Disks.

    def insert_disk(self, call: Call) -> Resource:
        """compute.disks.insert."""
        path = f"projects/{call.path['project']}/zones/{call.path['zone']}/disks/{call.body.get('name', '')}"
        self._resources.add(path, {"sizeGb": "10", "status": "READY", **call.body}, "disk")
        return self._resources.begin("insert", path, DISK_S)

    def resize_disk(self, call: Call) -> Resource:
        """compute.disks.resize."""
        path = f"projects/{call.path['project']}/zones/{call.path['zone']}/disks/{call.path['name']}"
        self._resources.table.put(path, {**self._resources.get(path), "sizeGb": str(call.body["sizeGb"])})
        return self._resources.begin("resize", path, DISK_S)

    # What is the same for several.

    def get(self, call: Call) -> Resource:
        """Of any kind."""
        return self._resources.get(_path(call))

    def listing(self, call: Call) -> Resource:
        """Of any kind in a zone, a region or globally."""
        kind = call.path["kind"]
        return self._resources.page(self._resources.under(f"{_scope(call)}/{kind}/"), call, kind[:-1])

    def delete(self, call: Call) -> Resource:
        """Of any kind."""
        path = _path(call)
        self._resources.get(path)
        operation = self._resources.begin("delete", path, DISK_S)
        self._resources.table.pop(path)
        return operation

    def aggregated(self, call: Call) -> Resource:
        """Of any kind, by zone or region; those of zones that do not answer are a warning."""
        project, kind = call.path["project"], call.path["kind"]
        of_zones = kind in ("instances", "disks", "operations", "machineTypes")
        scopes = [f"zones/{zone}" for zone in zones()] if of_zones else [f"regions/{region}" for region in regions()]
        items: dict[str, Any] = {}
        for scope in scopes:
            zone = scope.split("/")[1]
            if self._weather.has(zone, "hidden"):
                continue
            if self._weather.has(zone, "unreachable"):
                items[scope] = {"warning": {"code": "UNREACHABLE", "message": f"The scope '{scope}' is unreachable."}}
                continue
            page = self._resources.page(self._resources.under(f"projects/{project}/{scope}/{kind}/"), call, kind[:-1])
            none = {"warning": {"code": "NO_RESULTS_ON_PAGE", "message": f"There are no results for scope '{scope}'."}}
            items[scope] = {kind: page["items"]} if "items" in page else none
        answer: Resource = {
            "kind": f"compute#{kind[:-1]}AggregatedList",
            "id": f"projects/{project}/aggregated/{kind}",
            "items": items,
        }
        if lost := [f"zones/{zone}" for zone in self._weather.unreachable() if of_zones]:
            answer["unreachables"] = lost
        return answer

    # Places.

    def zone(self, call: Call) -> Resource:
        """compute.zones.get."""
        return _zone(call.path["project"], _known(call.path["zone"], zones(), "zones"))

    def list_zones(self, call: Call) -> Resource:
        """compute.zones.list."""
        return self._resources.page([_zone(call.path["project"], zone) for zone in zones()], call, "zone")

    def region(self, call: Call) -> Resource:
        """compute.regions.get."""
        return _region(call.path["project"], _known(call.path["region"], regions(), "regions"))

    def list_regions(self, call: Call) -> Resource:
        """compute.regions.list."""
        return self._resources.page([_region(call.path["project"], each) for each in regions()], call, "region")

    def project(self, call: Call) -> Resource:
        """compute.projects.get."""
        project = call.path["project"]
        return {
            "kind": "compute#project",
            "name": project,
            "id": "1",
            "selfLink": f"{BASE}projects/{project}",
            "commonInstanceMetadata": {"kind": "compute#metadata", "fingerprint": "AAAAAAAAAAA="},
            "defaultServiceAccount": "000000000000-compute@developer.gserviceaccount.com",
        }

    def machine_type(self, call: Call) -> Resource:
        """compute.machineTypes.get."""
        return _machine_type(
            call, _known(call.path["name"], [each.name for each in catalog.machines()], "machineTypes")
        )

    def machine_types(self, call: Call) -> Resource:
        """compute.machineTypes.list."""
        return self._resources.page(
            [_machine_type(call, each.name) for each in catalog.machines()], call, "machineType"
        )


def _known(name: str, names: list[str], kind: str) -> str:
    if name not in names:
        raise Rejected(404, "notFound", f"The resource '{kind}/{name}' was not found")
    return name


def _zone(project: str, zone: str) -> Resource:
    link = f"{BASE}projects/{project}/"
    region = f"{link}regions/{region_of_zone(zone)}"
    return {"kind": "compute#zone", "name": zone, "status": "UP", "region": region, "selfLink": f"{link}zones/{zone}"}


def _region(project: str, region: str) -> Resource:
    link = f"{BASE}projects/{project}/"
    return {
        "kind": "compute#region",
        "name": region,
        "status": "UP",
        "selfLink": f"{link}regions/{region}",
        "zones": [f"{link}zones/{zone}" for zone in zones() if region_of_zone(zone) == region],
        "quotas": [{"metric": "CPUS", "limit": 2400.0, "usage": 0.0}],
    }


def _machine_type(call: Call, name: str) -> Resource:
    found = next(each for each in catalog.machines() if each.name == name)
    zone = call.path["zone"]
    return {
        "kind": "compute#machineType",
        "name": name,
        "guestCpus": found.vcpus,
        "memoryMb": found.memory_gib * 1024,
        "zone": zone,
        "selfLink": f"{BASE}projects/{call.path['project']}/zones/{zone}/machineTypes/{name}",
    }


def _global(call: Call, kind: str) -> str:
    return f"projects/{call.path['project']}/global/{kind}/{call.path['name']}"


def _scope(call: Call) -> str:
    project = f"projects/{call.path['project']}"
    if "zone" in call.path:
        return f"{project}/zones/{call.path['zone']}"
    if "region" in call.path:
        return f"{project}/regions/{call.path['region']}"
    return f"{project}/global"


def _path(call: Call) -> str:
    return f"{_scope(call)}/{call.path['kind']}/{call.path['name']}"
