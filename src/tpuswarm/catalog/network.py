"""Look up Google Cloud's prices of traffic, storage and disks. Outgoing traffic is paid; incoming is free."""

from functools import cache
from typing import Any, Literal

from tpuswarm.catalog.figures import Figure, parse_figure, read_data
from tpuswarm.errors import InputError

Relation = Literal["same zone", "same region", "same continent", "other continent", "internet"]
"""Distance between two places; `internet` is outside Google."""


def continent_of(place: str) -> str:
    """Return the continent of a region or zone in Google's price list; raise InputError if it is neither."""
    prefix = place.split("-")[0]
    for name, prefixes in read_data("network")["continents"].items():
        if prefix in prefixes:
            return name
    raise InputError(f"{place!r} is not a Google Cloud region or zone; they look like us-central1 or us-central1-a")


def relation_of(place: str, other: str) -> Relation:
    """Return the distance between two zones."""
    if place == other:
        return "same zone"
    if place.rpartition("-")[0] == other.rpartition("-")[0]:
        return "same region"
    return "same continent" if continent_of(place) == continent_of(other) else "other continent"


def transfer_price(relation: Relation, place: str) -> Figure | None:
    """Return dollars per GiB sent from `place` over internal addresses. None: unknown.

    "other continent" excludes Oceania, which costs more, unless `place` is there. "internet" is the price of the
    first TiB of a month to North America.
    """
    continent = continent_of(place)
    if relation == "same continent":
        entry = _prices("transfer")["same_continent"].get(continent)
    elif relation == "other continent" and continent == "oceania":
        entry = _prices("transfer")["oceania"]
    else:
        entry = _prices("transfer")[relation.replace(" ", "_")]
    return None if entry is None else parse_figure(entry, _prices("transfer")["source"])


def read_price(relation: Relation) -> Figure | None:
    """Return dollars per GiB read from a bucket at this distance. None: unknown, as between continents."""
    nearest = "same region" if relation == "same zone" else relation  # a bucket lies in a region, not in a zone
    entry = _prices("storage").get(f"read_{nearest.replace(' ', '_')}")
    return None if entry is None else parse_figure(entry, _prices("storage")["source"])


@cache
def storage_prices() -> dict[str, Figure]:
    """Return the prices of a bucket in us-central1."""
    return _figures("storage", ("gib_month", "multi_region_gib_month", "thousand_writes", "thousand_reads"))


@cache
def disk_prices() -> dict[str, Figure]:
    """Return the prices of a persistent disk in us-central1."""
    return _figures("disk", ("balanced_gib_month", "ssd_gib_month"))


def _figures(section: str, keys: tuple[str, ...]) -> dict[str, Figure]:
    return {key: parse_figure(_prices(section)[key], _prices(section)["source"]) for key in keys}


def _prices(section: str) -> dict[str, Any]:
    return read_data("network")[section]
