"""A TOML file as a typed value, with errors that give the line and the nearest right name."""

import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from tpuswarm.config.nearest import did_you_mean
from tpuswarm.config.refused import refused
from tpuswarm.config.units import parse_count
from tpuswarm.errors import InputError

TomlPath = tuple[str | int, ...]
"""Keys and, in lists of tables, numbers from 0."""


class Strict(BaseModel):
    """A table that takes its own keys only."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


Table = TypeVar("Table", bound=BaseModel)


def _count(value: Any) -> int:
    try:
        return parse_count(value, "a count")
    except InputError as error:
        raise ValueError(str(error)) from error


Count = Annotated[int, BeforeValidator(_count)]
"""500, "20K", "10M": a whole number above 0."""


def read_toml(path: Path, kind: type[Table]) -> Table:
    """The file as a `kind`; InputError, a sentence that names the line, for anything that is not right in it."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(f"there is no file {path}") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from error
    return parse_toml(text, path, kind)


def parse_toml(text: str, path: Path, kind: type[Table]) -> Table:
    """The text as a `kind`; in what is not right with it, it is called `path`."""
    try:
        given = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets in thousands of brackets
        raise InputError(f"{path} is not valid TOML: {error}") from error
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        first = min(error.errors(), key=lambda each: each["type"] != "extra_forbidden")  # others may follow from it
        raise InputError(_sentence(path, text, kind, first)) from error


def at_line(path: Path, place: TomlPath, sentence: str) -> str:
    """The sentence behind the file, the line and the name of what it is about."""
    return f"{_where(path, path.read_text(encoding='utf-8'), place)}: {_named(place) or 'the file'}: {sentence}"


def _where(path: Path, text: str, place: TomlPath) -> str:
    line = line_of(text, place)
    return f"{path}, line {line}" if line else str(path)


def _sentence(path: Path, text: str, kind: type[BaseModel], error: Any) -> str:
    place: TomlPath = error["loc"]
    where = _where(path, text, place)
    name, table = str(place[-1]) if place else "", _named(place[:-1])
    if error["type"] == "extra_forbidden":
        return f"{where}: {table or 'the file'} has no key {name}; {did_you_mean(name, _keys(kind, place[:-1]))}"
    if error["type"] == "missing":
        return f"{where}: {table or 'the file'} needs {name}"
    said = str(error["ctx"]["error"]) if error["type"] == "value_error" else refused(error)
    return f"{where}: {_named(place) or 'the file'}: {said}"


def _named(place: TomlPath) -> str:
    """`members 2` for the second of the tables [[members]]."""
    return "".join(f" {part + 1}" if isinstance(part, int) else f".{part}" for part in place).removeprefix(".")


def _keys(kind: Any, place: Sequence[str | int]) -> list[str]:
    for part in place:
        kind = kind.model_fields[part].annotation if isinstance(part, str) else get_args(kind)[0]
        if type(None) in get_args(kind):  # a table that may be left out
            kind = get_args(kind)[0]
    return list(kind.model_fields)


def line_of(text: str, place: TomlPath) -> int | None:
    """The number, from 1, of the line of a key or of the table that it should be in; None where neither is found."""
    at: list[str | int] = []
    numbers: dict[str, int] = {}
    best: tuple[int, int | None] = (0, None)
    for number, line in enumerate(text.splitlines(), 1):
        if match := re.match(r"\s*\[(\[?)\s*([^\[\]]+?)\s*\]", line):
            at = list(match[2].split("."))
            if match[1]:
                numbers[match[2]] = numbers.get(match[2], -1) + 1
                at.append(numbers[match[2]])
            here = at
        elif match := re.match(r"\s*[\"']?([\w-]+)[\"']?\s*[=.]", line):
            here = [*at, match[1]]
        else:
            continue
        shared = min(len(here), len(place))
        if shared > best[0] and tuple(here[:shared]) == place[:shared]:
            best = (shared, number)
    return best[1]
