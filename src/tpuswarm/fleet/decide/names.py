"""Names of machines, v2-usc1f-7 (generation, zone, number), and the short forms in which people give them."""

import re
from collections.abc import Collection, Iterable, Iterator

from tpuswarm.config.nearest import did_you_mean
from tpuswarm.errors import InputError

ALL = "all"
"""What means every machine where a name is given."""
ZONE_PATTERN = re.compile(r"([a-z]+)-([a-z]+)(\d+)-([a-z0-9]+)")
"""Continent, direction, number, and the zone in the region: us-central1-f, us-south1-ai1b."""
CONTINENTS = {
    "us": "us", "europe": "eu", "asia": "asia", "northamerica": "na", "southamerica": "sa", "australia": "au",
    "africa": "af", "me": "me",
}  # fmt: skip
DIRECTIONS = {
    "central": "c", "east": "e", "west": "w", "north": "n", "south": "s",
    "northeast": "ne", "northwest": "nw", "southeast": "se", "southwest": "sw",
}  # fmt: skip


def short_zone(zone: str) -> str:
    """`usc1f` for us-central1-f, `euw4a` for europe-west4-a; words that are not known stay as they are."""
    parts = ZONE_PATTERN.fullmatch(zone)
    if parts is None:
        raise InputError(f"{zone!r} is no zone: they are called like us-central1-f")
    continent, direction, number, letter = parts.groups()
    return f"{CONTINENTS.get(continent, continent)}{DIRECTIONS.get(direction, direction)}{number}{letter}"


def free_names(generation: str, zone: str, taken: Collection[str]) -> Iterator[str]:
    """Names for new machines there, lowest number first, without those that are taken."""
    stem = f"{generation}-{short_zone(zone)}"
    number = 0
    while True:
        if (name := f"{stem}-{number}") not in taken:
            yield name
        number += 1


def by_number(name: str) -> tuple[str, int]:
    """To sort by: v2-usc1f-10 comes after v2-usc1f-9."""
    stem, _, number = name.rpartition("-")
    return (stem, int(number)) if number.isdigit() else (name, -1)


def resolve_name(text: str, names: Iterable[str], also: Iterable[str] = ()) -> str:
    """The name that a person means: the name itself, its number (`7`), or a beginning that only one has.

    Raises InputError for what none or several have, naming them or the nearest, one of `also` too.
    """
    known = sorted(set(names), key=by_number)
    if text in known:
        return text
    found = [each for each in known if each.rpartition("-")[2] == text] if text.isdigit() else []
    found = found or [each for each in known if each.startswith(text)]
    if len(found) == 1:
        return found[0]
    if found:
        more = f" and {len(found) - 6} more" if len(found) > 6 else ""
        raise InputError(f"{text!r} may be {', '.join(found[:6])}{more}: give more of the name")
    raise InputError(f"there is no machine {text!r}; {did_you_mean(text, {*known, *also})}")
