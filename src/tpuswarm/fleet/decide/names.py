"""Names of machines, such as v2-usc1f-7 (generation, zone, number), and the short forms that people type."""

import re
from collections.abc import Collection, Iterable, Iterator

from tpuswarm.config.nearest import did_you_mean
from tpuswarm.errors import InputError

ALL = "all"
"""Means every machine wherever a name is expected."""
ZONE_PATTERN = re.compile(r"([a-z]+)-([a-z]+)(\d+)-([a-z0-9]+)")
CONTINENTS = {
    "us": "us", "europe": "eu", "asia": "asia", "northamerica": "na", "southamerica": "sa", "australia": "au",
    "africa": "af", "me": "me",
}  # fmt: skip
DIRECTIONS = {
    "central": "c", "east": "e", "west": "w", "north": "n", "south": "s",
    "northeast": "ne", "northwest": "nw", "southeast": "se", "southwest": "sw",
}  # fmt: skip


def short_zone(zone: str) -> str:
    """Shorten a zone: `usc1f` for us-central1-f, `euw4a` for europe-west4-a; unknown words stay."""
    parts = ZONE_PATTERN.fullmatch(zone)
    if parts is None:
        raise InputError(f"{zone!r} is not a zone; zones look like us-central1-f")
    continent, direction, number, letter = parts.groups()
    return f"{CONTINENTS.get(continent, continent)}{DIRECTIONS.get(direction, direction)}{number}{letter}"


def free_names(generation: str, zone: str, taken: Collection[str]) -> Iterator[str]:
    stem = f"{generation}-{short_zone(zone)}"
    number = 0
    while True:
        if (name := f"{stem}-{number}") not in taken:
            yield name
        number += 1


def by_number(name: str) -> tuple[str, int]:
    """Sort key that puts v2-usc1f-10 after v2-usc1f-9."""
    stem, _, number = name.rpartition("-")
    return (stem, int(number)) if number.isdigit() else (name, -1)


def resolve_name(text: str, names: Iterable[str], also: Iterable[str] = ()) -> str:
    """Return the name that a person means: the full name, its number (`7`), or a unique beginning.

    Raise InputError if no name or several names match, and suggest names, including those in `also`.
    """
    known = sorted(set(names), key=by_number)
    if text in known:
        return text
    matching = [name for name in known if name.rpartition("-")[2] == text] if text.isdigit() else []
    matching = matching or [name for name in known if name.startswith(text)]
    if len(matching) == 1:
        return matching[0]
    if matching:
        more = f" and {len(matching) - 6} more" if len(matching) > 6 else ""
        raise InputError(f"{text!r} may be {', '.join(matching[:6])}{more}: give more of the name")
    raise InputError(f"there is no machine {text!r}; {did_you_mean(text, {*known, *also})}")
