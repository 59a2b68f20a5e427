"""General machine types of Compute Engine, for a swarm's head."""

from dataclasses import dataclass, field
from functools import cache

from tpuswarm.catalog.figures import Figure, data, figure, source
from tpuswarm.catalog.prices import Price, cheapest_first, region_of


@dataclass(frozen=True)
class Machine:
    """One machine type: vCPUs, GiB of memory, Gbit/s it can send, dollars an hour by region."""

    name: str
    vcpus: int
    memory_gib: int
    network_gbps: float
    prices: tuple[Price, ...] = field(repr=False)
    """In every region with a known price, cheapest first."""
    figures: dict[str, Figure] = field(hash=False, repr=False)

    def price(self, place: str | None = None) -> Price | None:
        """Dollars an hour at `place`, a region or zone; without one, where it is cheapest. None: unknown."""
        return next((each for each in self.prices if place is None or each.region == region_of(place)), None)


@cache
def machines() -> tuple[Machine, ...]:
    """All of them, smallest memory first."""
    found = []
    for shape, section in data("machines").items():
        figures = {key: figure(section[key], section["source"]) for key in ("gib_per_vcpu", "vcpus", "network_gbps")}
        sizes = zip(figures["vcpus"].value, figures["network_gbps"].value, strict=True)
        for vcpus, network_gbps in sizes:
            prices = [
                Price(region, dollars.get("on_demand"), dollars.get("spot"), source(section["source"])).times(vcpus)
                for region, dollars in section["regions"].items()
            ]
            memory_gib = vcpus * figures["gib_per_vcpu"].value
            found.append(Machine(f"{shape}-{vcpus}", vcpus, memory_gib, network_gbps, cheapest_first(prices), figures))
    return tuple(sorted(found, key=lambda each: (each.memory_gib, each.network_gbps, each.name)))
