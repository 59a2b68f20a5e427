"""What traffic, storage and disks cost at Google Cloud. A GiB is paid where it leaves; what arrives is free."""

from functools import cache
from typing import Any, Literal

from tpuswarm.catalog.figures import Figure, data, figure
from tpuswarm.catalog.prices import region_of
from tpuswarm.errors import InputError

Relation = Literal["same zone", "same region", "same continent", "other continent", "internet"]
INTERNET = "internet"
"""The place that is not at Google."""


def continent_of(place: str) -> str:
    """The continent of a region or zone, as Google prices them. Raises InputError for what is neither."""
    prefix = place.split("-")[0]
    for name, prefixes in data("network")["continents"].items():
        if prefix in prefixes:
            return name
    raise InputError(
        f"{place!r} is no region or zone of Google Cloud: they are called like us-central1 or us-central1-a"
    )


def relation(origin: str, destination: str) -> Relation:
    """How far `destination` (a zone, a region, or `internet`) is from the zone or region `origin`.

    Two places of one region are in the same zone only if both are that zone.
    """
    if destination == INTERNET:
        return "internet"
    if region_of(origin) == region_of(destination):
        return "same zone" if origin == destination != region_of(origin) else "same region"
    return "same continent" if continent_of(origin) == continent_of(destination) else "other continent"


def transfer_price(origin: str, destination: str) -> Figure | None:
    """Dollars for a GiB sent from a machine at `origin` to one at `destination`, over internal addresses.

    To `internet` it is the price of the first TiB of a month to North America. None: unknown.
    """
    how = relation(origin, destination)
    return transfer_price_over(how, *(continent_of(each) for each in (origin, destination) if each != INTERNET))


def transfer_price_over(how: Relation, *continents: str) -> Figure | None:
    """As `transfer_price`, by distance, between any two places so far apart on these continents.

    With one of two continents alone, the other is any but Oceania, which costs more.
    """
    if how == "same continent":
        entry = _prices("transfer")["same_continent"].get(continents[0])
    elif how == "other continent" and "oceania" in continents:
        entry = _prices("transfer")["oceania"]
    else:
        entry = _prices("transfer")[how.replace(" ", "_")]
    return None if entry is None else figure(entry, _prices("transfer")["source"])


def read_price(bucket: str, reader: str) -> Figure | None:
    """Dollars for a GiB read from a bucket in the region `bucket` by a machine at `reader` (or `internet`).

    None: unknown, as between continents.
    """
    return read_price_over(relation(region_of(bucket), reader))


def read_price_over(how: Relation) -> Figure | None:
    """As `read_price`, by distance. A bucket lies in a region: no reader is nearer than the same region."""
    wide = "same region" if how == "same zone" else how
    entry = _prices("storage").get(f"read_{wide.replace(' ', '_')}")
    return None if entry is None else figure(entry, _prices("storage")["source"])


@cache
def storage_prices() -> dict[str, Figure]:
    """Dollars of a bucket in us-central1: gib_month, multi_region_gib_month, thousand_writes, thousand_reads."""
    return _figures("storage", ("gib_month", "multi_region_gib_month", "thousand_writes", "thousand_reads"))


@cache
def disk_prices() -> dict[str, Figure]:
    """Dollars of a persistent disk in us-central1: balanced_gib_month, ssd_gib_month."""
    return _figures("disk", ("balanced_gib_month", "ssd_gib_month"))


def _figures(section: str, keys: tuple[str, ...]) -> dict[str, Figure]:
    return {key: figure(_prices(section)[key], _prices(section)["source"]) for key in keys}


def _prices(section: str) -> dict[str, Any]:
    return data("network")[section]
