"""Read figures with their sources from the data files."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from functools import cache
from importlib.resources import files
from typing import Any


@dataclass(frozen=True)
class Source:
    """Title, address and reading date of a source."""

    title: str
    url: str
    read: date


@dataclass(frozen=True)
class Figure:
    """A value as its source states it, and the values of sources that disagree."""

    value: Any
    source: Source
    other: tuple["Figure", ...] = ()

    @property
    def date(self) -> date:
        return self.source.read


@cache
def read_data(name: str) -> Mapping[str, Any]:
    """Read data/`name`.toml."""
    return tomllib.loads((files("tpuswarm.catalog") / "data" / f"{name}.toml").read_text(encoding="utf-8"))


@cache
def find_source(key: str) -> Source:
    """Return the source that data files call `key`."""
    return Source(**read_data("sources")[key])


def parse_figure(entry: Any, default: str) -> Figure:
    """Parse an entry of a data file: a plain value from the source `default`, or {value, source, other}."""
    if not isinstance(entry, Mapping):
        return Figure(tuple(entry) if isinstance(entry, list) else entry, find_source(default))
    value = entry["value"]
    return Figure(
        tuple(value) if isinstance(value, list) else value,
        find_source(entry.get("source", default)),
        tuple(parse_figure(other, default) for other in entry.get("other", ())),
    )
