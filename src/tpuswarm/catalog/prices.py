"""Look up prices of TPUs."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import date
from functools import cache

from tpuswarm.catalog.figures import Source, find_source, read_data

MAX_AGE_DAYS = 90
PRICE_PAGE = "https://cloud.google.com/tpu/pricing"


@dataclass(frozen=True)
class Price:
    """Dollars an hour in one region; None: unknown."""

    region: str
    on_demand: float | None
    spot: float | None
    source: Source

    def times(self, chips: int) -> "Price":
        """Multiply by a number of chips."""
        on_demand, spot = (None if dollars is None else dollars * chips for dollars in (self.on_demand, self.spot))
        return Price(self.region, on_demand, spot, self.source)


def region_of(place: str) -> str:
    """Return the region of a zone, or the region itself."""
    return "-".join(place.split("-")[:2])


def cheapest_first(prices: Iterable[Price]) -> tuple[Price, ...]:
    """Sort by the price on demand, then spot; unknown prices last."""
    unknown = float("inf")
    return tuple(sorted(prices, key=lambda price: (price.on_demand or unknown, price.spot or unknown, price.region)))


def describe_old_prices(today: date) -> str | None:
    """Return a warning if the prices were read more than MAX_AGE_DAYS ago."""
    read = max(find_source(block["source"]).read for block in read_data("prices")["prices"])
    age_days = (today - read).days
    if age_days <= MAX_AGE_DAYS:
        return None
    return f"the prices are old: they were read on {read}, {age_days} days ago. Compare {PRICE_PAGE}"


@cache
def chip_prices(generation: str, name: str) -> tuple[Price, ...]:
    """Return the prices of one chip of the type `name` by region, cheapest first."""
    found = [
        Price(region, dollars.get("on_demand"), dollars.get("spot"), find_source(block["source"]))
        for block in read_data("prices")["prices"]
        if block["generation"] == generation and name in block.get("types", [name])
        for region, dollars in block["regions"].items()
    ]
    return cheapest_first(found)
