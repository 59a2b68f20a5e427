"""What there is to be had: locations, accelerator types, runtime versions."""

import re
from collections.abc import Iterable
from functools import cache
from typing import Any, NamedTuple

from google.cloud.location import locations_pb2
from google.cloud.tpu_v2.types import cloud_tpu

from tpuswarm.catalog import Accelerator, accelerators
from tpuswarm.catalog.accelerators import format_topology
from tpuswarm.cloud.rehearsal.common.refused import INVALID_ARGUMENT, NOT_FOUND, PERMISSION_DENIED, Refused, not_found
from tpuswarm.cloud.rehearsal.common.weather import Weather

RUNTIMES = (
    "tpu-ubuntu2204-base", "v2-alpha-tpuv5-lite", "v2-alpha-tpuv5", "v2-alpha-tpuv6e", "tpu-vm-tf-2.18.0-pjrt",
    "tpu-vm-tf-2.18.0-pod",
)  # fmt: skip
KINDS = {"v2": "V2", "v3": "V3", "v4": "V4", "v5e": "V5LITE_POD", "v5p": "V5P", "v6e": "V6E"}
"""AcceleratorConfig.Type by generation."""
PLACE = re.compile(r"projects/([^/]+)/locations/([^/]+)")


class Location(NamedTuple):
    """Where a resource is."""

    project: str
    zone: str

    @property
    def name(self) -> str:
        """As the API writes it."""
        return f"projects/{self.project}/locations/{self.zone}"


def place_of(name: str) -> Location:
    """Of a location, or of something in it. Raises Refused."""
    found = PLACE.match(name)
    if not found:
        raise Refused(INVALID_ARGUMENT, f"Malformed name: '{name}'")
    return Location(found[1], found[2])


@cache
def offered() -> dict[str, list[Accelerator]]:
    """By zone: what the catalogue says one gets without being a tenant of one's own."""
    found: dict[str, list[Accelerator]] = {}
    for each in accelerators():
        if each.api_name:
            for zone in dict.fromkeys([*each.zones("open"), *each.zones("sold")]):
                found.setdefault(zone, []).append(each)
    return dict(sorted(found.items()))


def accelerator_of(node: Any) -> Accelerator:
    """What a node asks for. Raises Refused for nothing, both ways at once, or what does not exist."""
    has_config = bool(node.accelerator_config.topology)
    if node.accelerator_type and has_config:
        raise Refused(INVALID_ARGUMENT, "Only one of accelerator_type and accelerator_config may be specified.")
    if has_config:
        kind = cloud_tpu.AcceleratorConfig.Type(node.accelerator_config.type_).name
        topology = node.accelerator_config.topology
        for each in accelerators():
            if each.api_name and KINDS[each.generation.name] == kind and format_topology(each.topology) == topology:
                return each
        raise Refused(INVALID_ARGUMENT, f"There is no accelerator of type {kind} and topology {topology}.")
    if not node.accelerator_type:
        raise Refused(INVALID_ARGUMENT, "One of accelerator_type and accelerator_config must be specified.")
    for each in accelerators():
        if each.api_name == node.accelerator_type:
            return each
    raise Refused(NOT_FOUND, f'Accelerator type "{node.accelerator_type}" was not found')


def kind_of(accelerator: Accelerator) -> Any:
    """Its AcceleratorConfig."""
    return cloud_tpu.AcceleratorConfig(
        type_=KINDS[accelerator.generation.name], topology=format_topology(accelerator.topology)
    )


class Offers:
    """google.cloud.location.Locations, and what the TPU API lists of a zone."""

    def __init__(self, weather: Weather):
        self._weather = weather

    def check(self, place: Location, wanted: Accelerator) -> None:
        """Raises Refused where the zone is not to be seen, or does not offer what is wanted."""
        self._seen(place)
        if wanted not in offered()[place.zone]:
            raise Refused(NOT_FOUND, f"Resource '{place.name}/acceleratorTypes/{wanted.api_name}' was not found")

    def _seen(self, place: Location) -> None:
        if place.zone not in offered():
            raise Refused(PERMISSION_DENIED, f"Permission denied on 'locations/{place.zone}' (or it may not exist).")
        self._weather.reach(place.zone)

    def _zones(self) -> Iterable[str]:
        return (zone for zone in offered() if not self._weather.has(zone, "hidden"))

    def ListLocations(self, request: Any) -> Any:
        found = [_location(Location(request.name.split("/")[1], zone)) for zone in self._zones()]
        return locations_pb2.ListLocationsResponse(locations=found)

    def GetLocation(self, request: Any) -> Any:
        place = place_of(request.name)
        self._seen(place)
        return _location(place)

    def ListAcceleratorTypes(self, request: Any) -> Any:
        place = place_of(request.parent)
        self._seen(place)
        types = [self._type(place, each) for each in offered()[place.zone]]
        found = cloud_tpu.ListAcceleratorTypesResponse(accelerator_types=types)
        return cloud_tpu.ListAcceleratorTypesResponse.pb(found)

    def GetAcceleratorType(self, request: Any) -> Any:
        place = place_of(request.name)
        self._seen(place)
        for each in offered()[place.zone]:
            if request.name.endswith(f"/{each.api_name}"):
                return cloud_tpu.AcceleratorType.pb(self._type(place, each))
        raise not_found(request.name)

    def _type(self, place: Location, each: Accelerator) -> Any:
        return cloud_tpu.AcceleratorType(
            name=f"{place.name}/acceleratorTypes/{each.api_name}",
            type_=each.api_name,
            accelerator_configs=[kind_of(each)],
        )

    def ListRuntimeVersions(self, request: Any) -> Any:
        place = place_of(request.parent)
        self._seen(place)
        found = cloud_tpu.ListRuntimeVersionsResponse(runtime_versions=[_runtime(place, each) for each in RUNTIMES])
        return cloud_tpu.ListRuntimeVersionsResponse.pb(found)

    def GetRuntimeVersion(self, request: Any) -> Any:
        place = place_of(request.name)
        self._seen(place)
        version = request.name.rsplit("/", 1)[-1]
        if version not in RUNTIMES:
            raise not_found(request.name)
        return cloud_tpu.RuntimeVersion.pb(_runtime(place, version))


def _location(place: Location) -> Any:
    return locations_pb2.Location(
        name=place.name, location_id=place.zone, labels={"cloud.googleapis.com/region": place.zone.rsplit("-", 1)[0]}
    )


def _runtime(place: Location, version: str) -> Any:
    return cloud_tpu.RuntimeVersion(name=f"{place.name}/runtimeVersions/{version}", version=version)
