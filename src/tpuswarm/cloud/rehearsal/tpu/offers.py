"""The accelerator types and runtime versions that each zone offers."""

import re
from functools import cache
from typing import Any, NamedTuple

from google.cloud.location import locations_pb2
from google.cloud.tpu_v2.types import cloud_tpu

from tpuswarm.catalog import Accelerator, accelerators
from tpuswarm.catalog.accelerators import format_topology
from tpuswarm.cloud.rehearsal.common.api import INVALID_ARGUMENT, NOT_FOUND, PERMISSION_DENIED, Refused, not_found
from tpuswarm.cloud.rehearsal.common.zone_faults import ZoneFaults

RUNTIMES = (
    "tpu-ubuntu2204-base", "v2-alpha-tpuv5-lite", "v2-alpha-tpuv5", "v2-alpha-tpuv6e", "tpu-vm-tf-2.14.1",
    "tpu-vm-tf-2.14.1-pod", "tpu-vm-tf-2.18.0-pjrt", "tpu-vm-tf-2.18.0-pod-pjrt",
)  # fmt: skip
CONFIG_TYPES = {"v2": "V2", "v3": "V3", "v4": "V4", "v5e": "V5LITE_POD", "v5p": "V5P", "v6e": "V6E"}
"""AcceleratorConfig.Type by generation."""
LOCATION = re.compile(r"projects/([^/]+)/locations/([^/]+)")


class Location(NamedTuple):
    """A project's zone; `-`: all zones."""

    project: str
    zone: str

    @property
    def name(self) -> str:
        return f"projects/{self.project}/locations/{self.zone}"


def parse_location(name: str) -> Location:
    """Return the location in a resource's name. Raises Refused."""
    match = LOCATION.match(name)
    if not match:
        raise Refused(INVALID_ARGUMENT, f"Malformed name: '{name}'")
    return Location(match[1], match[2])


@cache
def list_offers() -> dict[str, list[Accelerator]]:
    """Return the accelerators of each zone that the catalogue calls open or sold."""
    offers: dict[str, list[Accelerator]] = {}
    for accelerator in accelerators():
        if accelerator.api_name:
            for zone in dict.fromkeys([*accelerator.zones("open"), *accelerator.zones("sold")]):
                offers.setdefault(zone, []).append(accelerator)
    return dict(sorted(offers.items()))


def requested_accelerator(node: Any) -> Accelerator:
    """Return the accelerator that a node requests. Raises Refused if it requests none, two, or an unknown one."""
    config, type_name = node.accelerator_config, node.accelerator_type
    if type_name and config.topology:
        raise Refused(INVALID_ARGUMENT, "Only one of accelerator_type and accelerator_config may be specified.")
    if config.topology:
        config_type = cloud_tpu.AcceleratorConfig.Type(config.type_).name
        for accelerator in accelerators():
            if accelerator.api_name and accelerator_config(accelerator) == config:
                return accelerator
        message = f"There is no accelerator of type {config_type} and topology {config.topology}."
        raise Refused(INVALID_ARGUMENT, message)
    if not type_name:
        raise Refused(INVALID_ARGUMENT, "One of accelerator_type and accelerator_config must be specified.")
    for accelerator in accelerators():
        if accelerator.api_name == type_name:
            return accelerator
    raise Refused(NOT_FOUND, f'Accelerator type "{type_name}" was not found')


def accelerator_config(accelerator: Accelerator) -> Any:
    config_type = CONFIG_TYPES[accelerator.generation.name]
    return cloud_tpu.AcceleratorConfig(type_=config_type, topology=format_topology(accelerator.topology))


class Offers:
    """google.cloud.location.Locations, and the lists of the TPU API."""

    def __init__(self, zone_faults: ZoneFaults):
        self._zone_faults = zone_faults

    def check(self, location: Location, accelerator: Accelerator) -> None:
        """Raise Refused if the zone is not reachable or does not offer the accelerator."""
        if accelerator not in self._offers_in(location):
            raise Refused(
                INVALID_ARGUMENT,
                "Cloud TPU received a bad request. The requested accelerator configuration for accelerator type, "
                f'"{accelerator.api_name}", could not be found in the zonal accelerator configurations for '
                f'"{location.zone}".; the accelerator {accelerator.api_name} was not found in zone {location.zone}',
            )

    def _offers_in(self, location: Location) -> list[Accelerator]:
        """Return the accelerators of a zone. Raises Refused if it is not reachable."""
        if location.zone not in list_offers():
            raise Refused(PERMISSION_DENIED, f"Permission denied on 'locations/{location.zone}' (or it may not exist).")
        self._zone_faults.check_reachable(location.zone)
        return list_offers()[location.zone]

    def ListLocations(self, request: Any) -> Any:
        project = request.name.split("/")[1]
        zones = [zone for zone in list_offers() if not self._zone_faults.has_fault(zone, "hidden")]
        return locations_pb2.ListLocationsResponse(locations=[_location(Location(project, zone)) for zone in zones])

    def GetLocation(self, request: Any) -> Any:
        location = parse_location(request.name)
        self._offers_in(location)
        return _location(location)

    def ListAcceleratorTypes(self, request: Any) -> Any:
        location = parse_location(request.parent)
        types = [_accelerator_type(location, accelerator) for accelerator in self._offers_in(location)]
        answer = cloud_tpu.ListAcceleratorTypesResponse(accelerator_types=types)
        return cloud_tpu.ListAcceleratorTypesResponse.pb(answer)

    def GetAcceleratorType(self, request: Any) -> Any:
        location = parse_location(request.name)
        for accelerator in self._offers_in(location):
            if request.name.endswith(f"/{accelerator.api_name}"):
                return cloud_tpu.AcceleratorType.pb(_accelerator_type(location, accelerator))
        raise not_found(request.name)

    def ListRuntimeVersions(self, request: Any) -> Any:
        location = parse_location(request.parent)
        self._offers_in(location)
        versions = [_runtime_version(location, version) for version in RUNTIMES]
        answer = cloud_tpu.ListRuntimeVersionsResponse(runtime_versions=versions)
        return cloud_tpu.ListRuntimeVersionsResponse.pb(answer)

    def GetRuntimeVersion(self, request: Any) -> Any:
        location = parse_location(request.name)
        self._offers_in(location)
        version = request.name.rsplit("/", 1)[-1]
        if version not in RUNTIMES:
            raise not_found(request.name)
        return cloud_tpu.RuntimeVersion.pb(_runtime_version(location, version))


def _location(location: Location) -> Any:
    labels = {"cloud.googleapis.com/region": location.zone.rsplit("-", 1)[0]}
    return locations_pb2.Location(name=location.name, location_id=location.zone, labels=labels)


def _accelerator_type(location: Location, accelerator: Accelerator) -> Any:
    name = accelerator.api_name
    configs = [accelerator_config(accelerator)]
    return cloud_tpu.AcceleratorType(
        name=f"{location.name}/acceleratorTypes/{name}", type_=name, accelerator_configs=configs
    )


def _runtime_version(location: Location, version: str) -> Any:
    return cloud_tpu.RuntimeVersion(name=f"{location.name}/runtimeVersions/{version}", version=version)
