"""Slices of TPU one can ask for, under the names of the TPU API, GKE and the compiler, from one table."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any, Literal, NamedTuple, get_args

from tpuswarm.catalog.figures import Source, data, source
from tpuswarm.catalog.generations import Generation, HostSize, generations
from tpuswarm.catalog.prices import Price, chip_prices, region_of
from tpuswarm.config.nearest import nearest
from tpuswarm.errors import InputError

Access = Literal["open", "single tenant", "sold"]
"""Who gets it in a zone: anyone with quota; one tenant; nobody knows, but a price list has it."""
ACCESSES: tuple[Access, ...] = get_args(Access)


class Gke(NamedTuple):
    """How GKE asks for a slice: two labels, the machine type of its nodes; and who says so."""

    accelerator: str
    topology: str
    machine: str
    source: Source


class Offer(NamedTuple):
    """Zones that offer a slice, and who says so."""

    access: Access
    zones: tuple[str, ...]
    source: Source


class Compiler(NamedTuple):
    """Arguments of `jax.experimental.topologies.get_topology_desc("tpu")`: topology_name and further keywords."""

    name: str
    options: dict[str, Any]


@dataclass(frozen=True)
class Accelerator:
    """One slice: chips joined by their own interconnect, with the hosts that hold them."""

    name: str
    """The short form: v5e-8."""
    api_name: str | None
    """The TPU API's: v5litepod-8; None where that API does not have it."""
    also: str | None
    """Another short form in use: v7x-8."""
    generation: Generation
    topology: tuple[int, ...]
    """Chips in each direction."""
    host_topology: tuple[int, ...]
    """Chips of one host in each direction."""
    chips: int
    hosts: int
    compiler_name: str
    gke: Gke | None
    """None where GKE does not have it."""
    source: Source

    @property
    def chips_per_host(self) -> int:
        """Chips that one host holds."""
        return prod(self.host_topology)

    @property
    def cores(self) -> int:
        """TensorCores."""
        return self.chips * self.generation.cores_per_chip

    @property
    def devices(self) -> int:
        """What `jax.device_count()` says."""
        return self.chips * self.generation.devices_per_chip

    @property
    def host(self) -> HostSize:
        """Each of its hosts."""
        return self.generation.hosts.get(self.chips_per_host, HostSize(None, None, {}))

    @property
    def compiler(self) -> Compiler:
        """What makes libtpu describe this slice as JAX sees it."""
        options: dict[str, Any] = {"chips_per_host_bounds": (*self.host_topology, 1)[:3]}
        if self.generation.chip_config is not None:
            options["chip_config_name"] = self.generation.chip_config
        return Compiler(self.compiler_name, options)

    @property
    def names(self) -> tuple[str, ...]:
        """All names that `find` knows it by, the short form first.

        GKE's are ACCELERATOR:TOPOLOGY, and for a slice of one host its machine type.
        """
        gke = self.gke
        found = [self.name, self.api_name, self.also, self.compiler_name]
        found += [f"{gke.accelerator}:{gke.topology}"] if gke else []
        found += [gke.machine] if gke and self.hosts == 1 else []
        return tuple(dict.fromkeys(each for each in found if each))

    @property
    def offers(self) -> tuple[Offer, ...]:
        """Where it is offered."""
        return tuple(
            Offer(block["access"], tuple(block["zones"]), source(block["source"]))
            for block in data("zones")["zones"]
            if block["generation"] == self.generation.name and self.name in block.get("types", [self.name])
        )

    def zones(self, access: Access = "open") -> tuple[str, ...]:
        """Zones that offer it to anyone with quota, or in another way."""
        return tuple(zone for offer in self.offers if offer.access == access for zone in offer.zones)

    def prices(self) -> tuple[Price, ...]:
        """Dollars an hour for all of it in every region with a known price, cheapest first."""
        return tuple(each.times(self.chips) for each in chip_prices(self.generation.name, self.name))

    def price(self, place: str | None = None) -> Price | None:
        """Dollars an hour for all of it at `place`, a region or zone; without one, the cheapest region with an open
        zone. None: unknown.
        """
        regions = {region_of(each) for each in ([place] if place else self.zones())}
        return next((each for each in self.prices() if each.region in regions), None)


def shape(topology: tuple[int, ...]) -> str:
    """(2, 4) as all dialects write it: 2x4."""
    return "x".join(map(str, topology))


@cache
def accelerators() -> tuple[Accelerator, ...]:
    """All of them, by generation and size."""
    by_name = {each.name: each for each in generations()}
    return tuple(
        _accelerator(by_name[generation], entry, section)
        for generation, section in data("types").items()
        for entry in section["types"]
    )


def find(name: str) -> Accelerator:
    """The slice called `name` in any dialect, in any case of letters.

    Raises InputError with the nearest name and its other names, or the topologies that exist.
    """
    wanted = name.strip().lower()
    if wanted in _by_name():
        return _by_name()[wanted]
    prefix, _, topology = wanted.partition(":")
    siblings = [known.partition(":")[2] for known in _by_name() if known.startswith(f"{prefix}:")]
    if topology and siblings:
        there = ", ".join(siblings)
        raise InputError(f"{name}: the catalogue has no {prefix} with topology {topology}; it has {there}")
    raise InputError(f"unknown TPU {name!r}: {_nearest(wanted)}")


def _nearest(wanted: str) -> str:
    near = nearest(wanted, _by_name())
    if near is None:
        forms = "v5e-8, v5litepod-8 (TPU API), tpu-v5-lite-podslice:2x4 (GKE) or v5e:2x4 (compiler)"
        return f"TPU names look like {forms}; `tpuswarm catalog` lists them all"
    others = [each for each in _by_name()[near].names if each != near]
    return f"did you mean {near} (also called {', '.join(others)})?"


@cache
def _by_name() -> Mapping[str, Accelerator]:
    return {name: each for each in accelerators() for name in each.names}


def _accelerator(generation: Generation, entry: Mapping[str, Any], section: Mapping[str, Any]) -> Accelerator:
    gke = None
    if "gke" in entry:
        gke = Gke(entry["gke"], entry["topology"], entry["machine"], source(section["gke_source"]))
    return Accelerator(
        name=entry["name"],
        api_name=entry.get("api"),
        also=entry.get("also"),
        generation=generation,
        topology=_sizes(entry["topology"]),
        host_topology=_sizes(entry["host"]),
        chips=entry["chips"],
        hosts=entry["hosts"],
        compiler_name=entry["compiler"],
        gke=gke,
        source=source(section["source"]),
    )


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(int(each) for each in text.split("x"))
