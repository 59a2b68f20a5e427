"""Networks, subnetworks, routers, firewall rules, disks, zones, regions and machine types of Compute Engine."""

from typing import Any

from tpuswarm import catalog
from tpuswarm.cloud.rehearsal.common.api import INVALID_ARGUMENT, Call, Refused, Rejected
from tpuswarm.cloud.rehearsal.common.policies import default_account
from tpuswarm.cloud.rehearsal.common.region_quotas import RegionQuotas
from tpuswarm.cloud.rehearsal.common.zone_faults import ZoneFaults
from tpuswarm.cloud.rehearsal.compute import tpus
from tpuswarm.cloud.rehearsal.compute.resources import BASE, Resource, Resources, zone_region
from tpuswarm.cloud.rehearsal.tpu.offers import list_offers

NETWORK_S, RULE_S, DISK_S = 15, 5, 5
OTHER_ZONES = ("us-central1-f", "us-west1-a", "us-west1-b", "europe-west1-b", "asia-northeast1-a")
"""Zones without TPUs."""
ANY_ADDRESS = ["0.0.0.0/0"]
DEFAULT_RULES: dict[str, Resource] = {
    "default-allow-internal": {
        "allowed": [{"IPProtocol": "tcp", "ports": ["0-65535"]}, {"IPProtocol": "udp", "ports": ["0-65535"]}],
        "sourceRanges": ["10.128.0.0/9"],
    },
    "default-allow-ssh": {"allowed": [{"IPProtocol": "tcp", "ports": ["22"]}], "sourceRanges": ANY_ADDRESS},
    "default-allow-rdp": {"allowed": [{"IPProtocol": "tcp", "ports": ["3389"]}], "sourceRanges": ANY_ADDRESS},
    "default-allow-icmp": {"allowed": [{"IPProtocol": "icmp"}], "sourceRanges": ANY_ADDRESS},
}
"""Rules of the network `default` in a new project. https://cloud.google.com/firewall/docs/firewalls"""


def list_zones() -> list[str]:
    return sorted({*list_offers(), *tpus.list_offers(), *OTHER_ZONES})


def list_regions() -> list[str]:
    return sorted({zone_region(zone) for zone in list_zones()})


class Networks:
    """compute.networks, subnetworks, routers, firewalls, disks, zones, regions and machineTypes."""

    def __init__(self, resources: Resources, zone_faults: ZoneFaults, region_quotas: RegionQuotas):
        self._resources, self._zone_faults, self._region_quotas = resources, zone_faults, region_quotas

    def add_default(self, project: str) -> None:
        """Give a new project its default network."""
        path = f"projects/{project}/global/networks/default"
        if path not in self._resources.table:
            self._add_network(path, {"autoCreateSubnetworks": True, "description": "Default network for the project"})
            for name, rule in DEFAULT_RULES.items():
                self._add_rule(f"projects/{project}/global/firewalls/{name}", {**rule, "network": f"{BASE}{path}"})

    # Networks and subnetworks.

    def insert_network(self, call: Call) -> Resource:
        path = f"projects/{call.path['project']}/global/networks/{call.body.get('name', '')}"
        self._add_network(path, call.body)
        return self._resources.begin("insert", path, NETWORK_S)

    def delete_network(self, call: Call) -> Resource:
        path = _global_path(call, "networks")
        network = self._resources.get(path)
        link = network["selfLink"]
        for other in self._resources.table.values():
            interfaces = (interface.get("network") for interface in other.get("networkInterfaces", ()))
            if (other.get("network") == link and other["kind"] != "compute#subnetwork") or link in interfaces:
                user = other["selfLink"].removeprefix(BASE)
                message = f"The network resource '{path}' is already being used by '{user}'"
                raise Rejected(400, "resourceInUseByAnotherResource", message)
        for subnetwork in network["subnetworks"]:
            self._resources.table.pop(subnetwork.removeprefix(BASE))
        operation = self._resources.begin("delete", path, NETWORK_S)
        self._resources.table.pop(path)
        return operation

    def insert_subnetwork(self, call: Call) -> Resource:
        path = f"projects/{call.path['project']}/regions/{call.path['region']}/subnetworks/{call.body.get('name', '')}"
        network_path = call.body.get("network", "").removeprefix(BASE)
        network = self._resources.get(network_path)
        subnetwork = self._resources.add(path, call.body, "subnetwork")
        network["subnetworks"].append(subnetwork["selfLink"])
        self._resources.table.put(network_path, network)
        return self._resources.begin("insert", path, NETWORK_S)

    def set_private_google_access(self, call: Call) -> Resource:
        path = f"projects/{call.path['project']}/regions/{call.path['region']}/subnetworks/{call.path['name']}"
        is_on = bool(call.body.get("privateIpGoogleAccess"))
        self._resources.table.put(path, {**self._resources.get(path), "privateIpGoogleAccess": is_on})
        return self._resources.begin("setPrivateIpGoogleAccess", path, NETWORK_S)

    def insert_router(self, call: Call) -> Resource:
        """Add a Cloud Router. Its `nats` let machines without external addresses reach the internet."""
        path = f"projects/{call.path['project']}/regions/{call.path['region']}/routers/{call.body.get('name', '')}"
        self._resources.get(f"projects/{call.body.get('network', '').partition('projects/')[2]}")
        self._resources.add(path, call.body, "router")
        return self._resources.begin("insert", path, NETWORK_S)

    def patch_router(self, call: Call) -> Resource:
        path = f"projects/{call.path['project']}/regions/{call.path['region']}/routers/{call.path['name']}"
        self._resources.table.put(path, {**self._resources.get(path), **call.body})
        return self._resources.begin("patch", path, NETWORK_S)

    def _add_network(self, path: str, body: Resource) -> None:
        has_subnetworks = bool(body.get("autoCreateSubnetworks", True))
        body = {"routingConfig": {"routingMode": "REGIONAL"}, **body, "autoCreateSubnetworks": has_subnetworks}
        network = self._resources.add(path, body, "network")
        project, name = path.split("/")[1], path.rsplit("/", 1)[-1]
        network["subnetworks"] = []
        for number, region in enumerate(list_regions() if has_subnetworks else []):
            subnetwork = {
                "network": network["selfLink"],
                "ipCidrRange": f"10.{128 + number // 16}.{number % 16 * 16}.0/20",
                "gatewayAddress": f"10.{128 + number // 16}.{number % 16 * 16}.1",
            }
            subnetwork_path = f"projects/{project}/regions/{region}/subnetworks/{name}"
            network["subnetworks"].append(self._resources.add(subnetwork_path, subnetwork, "subnetwork")["selfLink"])
        self._resources.table.put(path, network)

    def check(self, project: str, zone: str, network: str, subnetwork: str) -> None:
        """Raise Refused unless the network (a name or path) has the subnetwork in the zone's region."""
        network, subnetwork = network.rsplit("/", 1)[-1], subnetwork.rsplit("/", 1)[-1]
        path = f"projects/{project}/regions/{zone_region(zone)}/subnetworks/{subnetwork}"
        if subnetwork == network == "default":
            return  # in every project
        existing = self._resources.table.get(path)
        if existing is None or existing["network"].rsplit("/", 1)[-1] != network:
            raise Refused(INVALID_ARGUMENT, f"Subnetwork '{path}' is not in network '{network}', or does not exist.")

    # Firewall rules.

    def insert_rule(self, call: Call) -> Resource:
        path = f"projects/{call.path['project']}/global/firewalls/{call.body.get('name', '')}"
        name = (call.body.get("network") or "global/networks/default").rsplit("/", 1)[-1]
        network = self._resources.get(f"projects/{call.path['project']}/global/networks/{name}")
        self._add_rule(path, {**call.body, "network": network["selfLink"]})
        return self._resources.begin("insert", path, RULE_S)

    def patch_rule(self, call: Call) -> Resource:
        path = _global_path(call, "firewalls")
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
        path = f"projects/{call.path['project']}/zones/{call.path['zone']}/disks/{call.body.get('name', '')}"
        self._resources.add(path, {"sizeGb": "10", "status": "READY", **call.body}, "disk")
        return self._resources.begin("insert", path, DISK_S)

    def resize_disk(self, call: Call) -> Resource:
        path = f"projects/{call.path['project']}/zones/{call.path['zone']}/disks/{call.path['name']}"
        disk, size = self._resources.get(path), int(call.body["sizeGb"])
        if size <= int(disk["sizeGb"]):
            message = (
                f"Invalid value for field 'sizeGb': '{size}'. New disk size '{size}' GB must be larger than existing "
                f"size '{disk['sizeGb']}' GB."
            )
            raise Rejected(400, "invalid", message)
        self._resources.table.put(path, {**disk, "sizeGb": str(size)})
        for owner, instance in self._resources.table.items():
            attached = instance.get("disks", ()) if "/instances/" in owner else ()
            if any(one["source"] == disk["selfLink"] for one in attached):
                disks = [
                    one | {"diskSizeGb": str(size)} if one["source"] == disk["selfLink"] else one for one in attached
                ]
                self._resources.table.put(owner, {**instance, "disks": disks})
        return self._resources.begin("resize", path, DISK_S)

    # Methods of several kinds.

    def get(self, call: Call) -> Resource:
        return self._resources.get(_path(call))

    def list_page(self, call: Call) -> Resource:
        kind = call.path["kind"]
        return self._resources.page(self._resources.under(f"{_scope(call)}/{kind}/"), call, kind[:-1])

    def delete(self, call: Call) -> Resource:
        path = _path(call)
        self._resources.get(path)
        operation = self._resources.begin("delete", path, DISK_S)
        self._resources.table.pop(path)
        return operation

    def aggregated(self, call: Call) -> Resource:
        """List a kind of resources by zone or region; unreachable zones get a warning."""
        project, kind = call.path["project"], call.path["kind"]
        is_zonal = kind in ("instances", "instanceGroupManagers", "disks", "operations", "machineTypes")
        scopes = (
            [f"zones/{zone}" for zone in list_zones()]
            if is_zonal
            else [f"regions/{region}" for region in list_regions()]
        )
        items: dict[str, Any] = {}
        for scope in scopes:
            zone = scope.split("/")[1]
            if self._zone_faults.has_fault(zone, "hidden"):
                continue
            if self._zone_faults.has_fault(zone, "unreachable"):
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
        if is_zonal and (unreachable := self._zone_faults.unreachable_zones()):
            answer["unreachables"] = [f"zones/{zone}" for zone in unreachable]
        return answer

    # Zones, regions, projects and machine types.

    def zone(self, call: Call) -> Resource:
        return _zone(call.path["project"], _check_known(call.path["zone"], list_zones(), "zones"))

    def list_zones(self, call: Call) -> Resource:
        return self._resources.page([_zone(call.path["project"], zone) for zone in list_zones()], call, "zone")

    def region(self, call: Call) -> Resource:
        return self._region(call.path["project"], _check_known(call.path["region"], list_regions(), "regions"))

    def list_regions(self, call: Call) -> Resource:
        regions = [self._region(call.path["project"], region) for region in list_regions()]
        return self._resources.page(regions, call, "region")

    def _region(self, project: str, region: str) -> Resource:
        link = f"{BASE}projects/{project}/"
        quotas = {"CPUS": (2400, 0)}
        for quota, usage in self._region_quotas.usage(project, region).items():
            quotas[quota] = self._region_quotas.limit(region, quota), usage
        return {
            "kind": "compute#region",
            "name": region,
            "status": "UP",
            "selfLink": f"{link}regions/{region}",
            "zones": [f"{link}zones/{zone}" for zone in list_zones() if zone_region(zone) == region],
            "quotas": [
                {"metric": quota, "limit": float(limit), "usage": float(usage)}
                for quota, (limit, usage) in quotas.items()
            ],
        }

    def project(self, call: Call) -> Resource:
        project = call.path["project"]
        return {
            "kind": "compute#project",
            "name": project,
            "id": "1",
            "selfLink": f"{BASE}projects/{project}",
            "commonInstanceMetadata": {"kind": "compute#metadata", "fingerprint": "AAAAAAAAAAA="},
            "defaultServiceAccount": default_account(project),
        }

    def machine_type(self, call: Call) -> Resource:
        return _machine_type(call, _check_known(call.path["name"], _machine_types(call), "machineTypes"))

    def image_of_family(self, call: Call) -> Resource:
        """Return the newest image of a family: for TPUs one of the catalogue's, otherwise any."""
        project, family = call.path["project"], call.path["name"]
        known = [generation.image for generation in catalog.generations() if generation.image]
        if any(image.startswith(f"{project}/") for image in known) and f"{project}/{family}" not in known:
            path = f"projects/{project}/global/images/family/{family}"
            raise Rejected(404, "notFound", f"The resource '{path}' was not found")
        link = f"{BASE}projects/{project}/global/images/{family}-v20261101"
        return {"kind": "compute#image", "name": f"{family}-v20261101", "family": family, "selfLink": link}

    def list_machine_types(self, call: Call) -> Resource:
        machine_types = [_machine_type(call, name) for name in _machine_types(call)]
        return self._resources.page(machine_types, call, "machineType")


def _check_known(name: str, names: list[str], kind: str) -> str:
    if name not in names:
        raise Rejected(404, "notFound", f"The resource '{kind}/{name}' was not found")
    return name


SHARED_CORES = {"e2-micro": 1, "e2-small": 2, "e2-medium": 4}
"""Machine types below those of the catalogue, with their memory in GiB."""


def _zone(project: str, zone: str) -> Resource:
    link = f"{BASE}projects/{project}/"
    region = f"{link}regions/{zone_region(zone)}"
    return {"kind": "compute#zone", "name": zone, "status": "UP", "region": region, "selfLink": f"{link}zones/{zone}"}


def _machine_types(call: Call) -> list[str]:
    return [
        *SHARED_CORES,
        *(machine.name for machine in catalog.machines()),
        *tpus.list_offers().get(call.path["zone"], ()),
    ]


def _machine_type(call: Call, name: str) -> Resource:
    zone, tpu = call.path["zone"], catalog.accelerator_of_machine(name)
    if tpu:
        vcpus, memory_mb = tpu.host.vcpus or 1, int((tpu.host.memory_gb or 1) * 1000)
    elif name in SHARED_CORES:
        vcpus, memory_mb = 2, SHARED_CORES[name] * 1024
    else:
        machine = next(machine for machine in catalog.machines() if machine.name == name)
        vcpus, memory_mb = machine.vcpus, int(machine.memory_gib * 1024)
    return {
        "kind": "compute#machineType",
        "name": name,
        "guestCpus": vcpus,
        "memoryMb": memory_mb,
        "zone": zone,
        "selfLink": f"{BASE}projects/{call.path['project']}/zones/{zone}/machineTypes/{name}",
    }


def _global_path(call: Call, kind: str) -> str:
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
