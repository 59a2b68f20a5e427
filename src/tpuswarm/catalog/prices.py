"""What TPUs cost, where a price list says so."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from tpuswarm.catalog.figures import Source, data, source


@dataclass(frozen=True)
class Price:
    """Dollars an hour in one region, on demand and spot; None where no source says: never a guess."""

    region: str
    on_demand: float | None
    spot: float | None
    source: Source

    def times(self, chips: int) -> "Price":
        """The price of so many."""
        on_demand, spot = (None if each is None else each * chips for each in (self.on_demand, self.spot))
        return Price(self.region, on_demand, spot, self.source)


def region_of(place: str) -> str:
    """The region of a zone (`us-central1-a`), or the region itself."""
    return "-".join(place.split("-")[:2])


def cheapest_first(prices: Iterable[Price]) -> tuple[Price, ...]:
    """By the price on demand, then spot; unknown ones last."""
    unknown = float("inf")
    return tuple(sorted(prices, key=lambda each: (each.on_demand or unknown, each.spot or unknown, each.region)))


@cache
def chip_prices(generation: str, name: str) -> tuple[Price, ...]:
    """Of one chip of the type `name`, by region, cheapest first: on demand, then spot."""
    found = [
        Price(region, dollars.get("on_demand"), dollars.get("spot"), source(block["source"]))
        for block in data("prices")["prices"]
        if block["generation"] == generation and name in block.get("types", [name])
        for region, dollars in block["regions"].items()
    ]
    return cheapest_first(found)
