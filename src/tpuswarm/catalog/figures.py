"""A figure with its source, and the data files they come from."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from functools import cache
from importlib.resources import files
from typing import Any


@dataclass(frozen=True)
class Source:
    """Where a figure was read: title, address, and the day."""

    title: str
    url: str
    read: date


@dataclass(frozen=True)
class Figure:
    """A value as its source states it, and what other sources state where they disagree."""

    value: Any
    source: Source
    other: tuple["Figure", ...] = ()

    @property
    def date(self) -> date:
        """The day the source was read."""
        return self.source.read


@cache
def data(name: str) -> Mapping[str, Any]:
    """The data file `name`.toml of this package."""
    return tomllib.loads((files("tpuswarm.catalog") / "data" / f"{name}.toml").read_text(encoding="utf-8"))


@cache
def source(key: str) -> Source:
    """The source that data files call `key`."""
    return Source(**data("sources")[key])


def figure(entry: Any, default: str) -> Figure:
    """An entry of a data file: a plain value, of the source `default`, or a table {value, source, other}."""
    if not isinstance(entry, Mapping):
        return Figure(tuple(entry) if isinstance(entry, list) else entry, source(default))
    value = entry["value"]
    return Figure(
        tuple(value) if isinstance(value, list) else value,
        source(entry.get("source", default)),
        tuple(figure(each, default) for each in entry.get("other", ())),
    )
