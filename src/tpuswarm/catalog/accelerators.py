"""Find TPU types by the names of the TPU API, GKE and the compiler."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any, Literal, NamedTuple, get_args

from tpuswarm.catalog.figures import Source, find_source, read_data
from tpuswarm.catalog.generations import Generation, HostSize, generations
from tpuswarm.catalog.prices import Price, chip_prices, region_of
from tpuswarm.config.nearest import nearest_name
from tpuswarm.errors import InputError

Access = Literal["open", "single tenant", "sold"]
"""Anyone with quota; a single tenant; unknown, but on a price list."""
ACCESSES: tuple[Access, ...] = get_args(Access)
Api = Literal["tpu", "compute"]
APIS: dict[Api, str] = {"tpu": "TPU API", "compute": "Compute Engine"}
"""Google's names of the APIs that create TPUs."""


class Gke(NamedTuple):
    """Labels and machine type for requesting a slice from GKE."""

    accelerator: str
    topology: str
    machine: str
    source: Source


class Offer(NamedTuple):
    """Zones that offer a slice."""

    access: Access
    zones: tuple[str, ...]
    source: Source


class Compiler(NamedTuple):
    """Arguments of `jax.experimental.topologies.get_topology_desc`: topology_name and keywords."""

    name: str
    options: dict[str, Any]


@dataclass(frozen=True)
class Accelerator:
    """One TPU type: chips joined by their interconnect, and their hosts."""

    name: str
    """Short form: v5e-8."""
    api_name: str | None
    """Name in the TPU API: v5litepod-8; None if it is not offered there."""
    also: str | None
    """Another short form: v7x-8."""
    generation: Generation
    topology: tuple[int, ...]
    host_topology: tuple[int, ...]
    chips: int
    hosts: int
    compiler_name: str
    gke: Gke | None
    source: Source

    @property
    def chips_per_host(self) -> int:
        return prod(self.host_topology)

    @property
    def cores(self) -> int:
        return self.chips * self.generation.cores_per_chip

    @property
    def devices(self) -> int:
        """JAX devices."""
        return self.chips * self.generation.devices_per_chip

    @property
    def is_for_serving(self) -> bool:
        """Whether it takes Google's quota for serving, which v5e has besides the one for training.

        https://cloud.google.com/tpu/docs/v5e
        """
        return self.generation.name == "v5e" and self.hosts == 1

    @property
    def device_kind(self) -> str:
        return self.generation.device_kind

    @property
    def matrix_unit(self) -> int:
        return self.generation.matrix_unit

    @property
    def program_bytes(self) -> int:
        """Memory that the compiler grants a program on one device."""
        return self.generation.compiler_hbm_bytes

    @property
    def host(self) -> HostSize:
        return self.generation.hosts.get(self.chips_per_host, HostSize(None, None, {}))

    @property
    def compiler(self) -> Compiler:
        """Arguments for which libtpu describes this slice as JAX sees it."""
        options: dict[str, Any] = {"chips_per_host_bounds": (*self.host_topology, 1)[:3]}
        if self.generation.chip_config is not None:
            options["chip_config_name"] = self.generation.chip_config
        return Compiler(self.compiler_name, options)

    @property
    def names(self) -> tuple[str, ...]:
        """All names that `find` accepts, the short form first.

        GKE's are ACCELERATOR:TOPOLOGY, and the machine type of a slice with one host.
        """
        gke = self.gke
        found = [self.name, self.api_name, self.also, self.compiler_name]
        found += [f"{gke.accelerator}:{gke.topology}"] if gke else []
        found += [gke.machine] if gke and self.hosts == 1 else []
        return tuple(dict.fromkeys(name for name in found if name))

    @property
    def apis(self) -> tuple[Api, ...]:
        """The APIs that can create it, the default one first.

        The TPU API is the default where it has the type: grants and quotas of TPUs are its own, and do not count in
        Compute Engine (https://docs.cloud.google.com/tpu/docs/tpus-in-compute-engine).
        """
        known = self.generation.apis
        return tuple(api for api, name in APIS.items() if name in known and (api == "compute" or self.api_name))

    @property
    def machine_type(self) -> str | None:
        """The machine type of each host in Compute Engine; None if it is not offered there."""
        return self.gke.machine if self.gke and "compute" in self.apis else None

    def image(self, api: Api) -> str:
        """Return what the hosts boot: a runtime version of the TPU API, or PROJECT/FAMILY in Compute Engine."""
        return (self.generation.runtime if api == "tpu" else self.generation.image) or ""

    @property
    def offers(self) -> tuple[Offer, ...]:
        return tuple(
            Offer(block["access"], tuple(block["zones"]), find_source(block["source"]))
            for block in read_data("zones")["zones"]
            if block["generation"] == self.generation.name and self.name in block.get("types", [self.name])
        )

    def zones(self, access: Access = "open") -> tuple[str, ...]:
        """Return the zones that offer it with this access."""
        return tuple(zone for offer in self.offers if offer.access == access for zone in offer.zones)

    def prices(self) -> tuple[Price, ...]:
        """Return the known prices of the slice by region, cheapest first."""
        return tuple(price.times(self.chips) for price in chip_prices(self.generation.name, self.name))

    def price(self, place: str | None = None) -> Price | None:
        """Return the price of the slice in a region or zone, by default in the cheapest region with an open zone.

        None: unknown.
        """
        regions = {region_of(zone) for zone in ([place] if place else self.zones())}
        return next((price for price in self.prices() if price.region in regions), None)


def format_topology(topology: tuple[int, ...]) -> str:
    """Write (2, 4) as 2x4."""
    return "x".join(map(str, topology))


@cache
def accelerator_of_machine(machine_type: str) -> Accelerator | None:
    """Return the TPU that one machine of Compute Engine holds; None for a machine without TPU."""
    return next((tpu for tpu in accelerators() if tpu.hosts == 1 and tpu.machine_type == machine_type), None)


@cache
def accelerators() -> tuple[Accelerator, ...]:
    """Return all TPU types, by generation and size."""
    by_name = {generation.name: generation for generation in generations()}
    return tuple(
        _parse_accelerator(by_name[generation], entry, section)
        for generation, section in read_data("types").items()
        for entry in section["types"]
    )


def find(name: str) -> Accelerator:
    """Find a TPU type by any of its names, in upper or lower case; raise InputError with the nearest one."""
    wanted = name.strip().lower()
    if wanted in _by_name():
        return _by_name()[wanted]
    prefix, _, topology = wanted.partition(":")
    siblings = [known.partition(":")[2] for known in _by_name() if known.startswith(f"{prefix}:")]
    if topology and siblings:
        there = ", ".join(siblings)
        raise InputError(f"{name}: the catalogue has no {prefix} with topology {topology}; it has {there}")
    raise InputError(f"unknown TPU {name!r}: {_suggest(wanted)}")


def usual_slice(generation: str) -> Accelerator:
    """Return the slice to split a number of chips into: the largest on one host, of v5e the smallest for training."""
    offered = [tpu for tpu in accelerators() if tpu.generation.name == generation and tpu.api_name]
    one_host = [tpu for tpu in offered if tpu.hosts == 1 and not tpu.is_for_serving]
    return one_host[-1] if one_host else next(tpu for tpu in offered if not tpu.is_for_serving)


def _suggest(wanted: str) -> str:
    near = nearest_name(wanted, _by_name())
    if near is None:
        forms = "v5e-8, v5litepod-8 (TPU API), tpu-v5-lite-podslice:2x4 (GKE) or v5e:2x4 (compiler)"
        return f"TPU names look like {forms}; `tpuswarm catalog` lists them all"
    others = [name for name in _by_name()[near].names if name != near]
    return f"did you mean {near} (also called {', '.join(others)})?"


@cache
def _by_name() -> Mapping[str, Accelerator]:
    return {name: tpu for tpu in accelerators() for name in tpu.names}


def _parse_accelerator(generation: Generation, entry: Mapping[str, Any], section: Mapping[str, Any]) -> Accelerator:
    gke = None
    if "gke" in entry:
        gke = Gke(entry["gke"], entry["topology"], entry["machine"], find_source(section["gke_source"]))
    return Accelerator(
        name=entry["name"],
        api_name=entry.get("api"),
        also=entry.get("also"),
        generation=generation,
        topology=_parse_topology(entry["topology"]),
        host_topology=_parse_topology(entry["host"]),
        chips=entry["chips"],
        hosts=entry["hosts"],
        compiler_name=entry["compiler"],
        gke=gke,
        source=find_source(section["source"]),
    )


def _parse_topology(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split("x")))
