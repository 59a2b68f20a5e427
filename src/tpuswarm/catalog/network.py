"""What traffic, storage and disks cost at Google Cloud. A GiB is paid where it leaves; what arrives is free."""

from functools import cache
from typing import Any, Literal

from tpuswarm.catalog.figures import Figure, data, figure
from tpuswarm.errors import InputError

Relation = Literal["same zone", "same region", "same continent", "other continent", "internet"]
"""How far one place is from another; the last one is not at Google."""


def continent_of(place: str) -> str:
    """The continent of a region or zone, as Google prices them. Raises InputError for what is neither."""
    prefix = place.split("-")[0]
    for name, prefixes in data("network")["continents"].items():
        if prefix in prefixes:
            return name
    raise InputError(f"{place!r} is not a Google Cloud region or zone; they look like us-central1 or us-central1-a")


def relation_of(place: str, other: str) -> Relation:
    """How far a zone is from another. Raises InputError for what is no zone."""
    if place == other:
        return "same zone"
    if place.rpartition("-")[0] == other.rpartition("-")[0]:
        return "same region"
    return "same continent" if continent_of(place) == continent_of(other) else "other continent"


def transfer_price(how: Relation, place: str) -> Figure | None:
    """Dollars for a GiB sent from a machine in `place` to another so far away, over internal addresses. None: unknown.

    Another continent is any but Oceania, which costs more, unless `place` is there. To the internet it is the price of
    the first TiB of a month to North America.
    """
    continent = continent_of(place)
    if how == "same continent":
        entry = _prices("transfer")["same_continent"].get(continent)
    elif how == "other continent" and continent == "oceania":
        entry = _prices("transfer")["oceania"]
    else:
        entry = _prices("transfer")[how.replace(" ", "_")]
    return None if entry is None else figure(entry, _prices("transfer")["source"])


def read_price(how: Relation) -> Figure | None:
    """Dollars for a GiB read from a bucket by a machine so far away. None: unknown, as between continents.

    A bucket lies in a region: no reader is nearer than the same region.
    """
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
