"""Look up machine types of Compute Engine, for a swarm's head."""

from dataclasses import dataclass, field
from functools import cache

from tpuswarm.catalog.figures import Figure, find_source, parse_figure, read_data
from tpuswarm.catalog.prices import Price, cheapest_first, region_of


@dataclass(frozen=True)
class Machine:
    """One machine type; `network_gbps` limits outgoing traffic."""

    name: str
    vcpus: int
    memory_gib: float
    network_gbps: float
    prices: tuple[Price, ...] = field(repr=False)
    """By region, cheapest first."""
    figures: dict[str, Figure] = field(hash=False, repr=False)

    def price(self, place: str | None = None) -> Price | None:
        """Return the price in a region or zone, by default in the cheapest region. None: unknown."""
        return next((price for price in self.prices if place is None or price.region == region_of(place)), None)


@cache
def machines() -> tuple[Machine, ...]:
    """Return all machine types, smallest memory first."""
    found = []
    for shape, section in read_data("machines").items():
        figures = {
            key: parse_figure(section[key], section["source"]) for key in ("gib_per_vcpu", "vcpus", "network_gbps")
        }
        sizes = zip(figures["vcpus"].value, figures["network_gbps"].value, strict=True)
        for vcpus, network_gbps in sizes:
            prices = [
                Price(region, dollars.get("on_demand"), dollars.get("spot"), find_source(section["source"])).times(
                    vcpus
                )
                for region, dollars in section["regions"].items()
            ]
            memory_gib = vcpus * figures["gib_per_vcpu"].value
            found.append(Machine(f"{shape}-{vcpus}", vcpus, memory_gib, network_gbps, cheapest_first(prices), figures))
    return tuple(sorted(found, key=lambda machine: (machine.memory_gib, machine.network_gbps, machine.name)))
