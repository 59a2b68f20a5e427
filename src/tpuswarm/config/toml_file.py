"""Read a TOML file into a typed value; errors give the line and the nearest valid name."""

import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, ValidationError

from tpuswarm.config.nearest import did_you_mean
from tpuswarm.config.units import parse_count
from tpuswarm.config.validation_errors import describe_error
from tpuswarm.errors import InputError, UnknownFormat

FORMAT = 1
"""The `format` of a file; one without it has the first."""

BYTE_ORDER_MARK = "\ufeff"
"""Some editors on Windows put it first."""

TomlPath = tuple[str | int, ...]
"""Keys and, in arrays of tables, indices from 0."""


class StrictTable(BaseModel):
    """A table that refuses unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


Table = TypeVar("Table", bound=BaseModel)


def _parse_count(value: Any) -> int:
    try:
        return parse_count(value, "a count")
    except InputError as error:
        raise ValueError(str(error)) from error


Count = Annotated[int, BeforeValidator(_parse_count)]
"""500, "20K", "10M": a whole number above 0."""


def match_pattern(pattern: str, expected: str) -> AfterValidator:
    """Accept only texts that match; the error says `expected`."""

    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(f"{expected}, not {text!r}")
        return text

    return AfterValidator(check)


Name = Annotated[
    str, match_pattern(r"[a-z]([a-z0-9-]{0,28}[a-z0-9])?", "small letters, digits and -, at most 30, a letter first")
]


def read_toml(path: Path, kind: type[Table]) -> Table:
    """Read a file as a `kind`; raise InputError with the line for anything wrong."""
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
    """Parse a text as a `kind`; errors call it `path`."""
    text = text.removeprefix(BYTE_ORDER_MARK)
    try:
        given = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # huge numbers, deep nesting
        raise InputError(f"{path} is not valid TOML: {error}") from error
    if (found := given.pop("format", FORMAT)) != FORMAT:
        raise UnknownFormat(_format_location(path, text, ("format",)), found, FORMAT)
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        first = min(
            error.errors(), key=lambda error: error["type"] != "extra_forbidden"
        )  # an unknown key may cause the others
        raise InputError(_describe(path, text, kind, first)) from error


def locate_error(path: Path, place: TomlPath, sentence: str) -> str:
    """Put the file, the line and the key before a sentence."""
    location = _format_location(path, path.read_text(encoding="utf-8-sig"), place)
    return f"{location}: {_format_path(place) or 'the file'}: {sentence}"


def _format_location(path: Path, text: str, place: TomlPath) -> str:
    line = find_line(text, place)
    return f"{path}, line {line}" if line else str(path)


def _describe(path: Path, text: str, kind: type[BaseModel], error: Any) -> str:
    place: TomlPath = error["loc"]
    where = _format_location(path, text, place)
    name, table = str(place[-1]) if place else "", _format_path(place[:-1])
    if error["type"] == "extra_forbidden":
        return f"{where}: {table or 'the file'} has no key {name}; {did_you_mean(name, _known_keys(kind, place[:-1]))}"
    if error["type"] == "missing":
        return f"{where}: {table or 'the file'} needs {name}"
    if error["type"] in ("tuple_type", "list_type") and isinstance(error["input"], dict):
        return f"{where}: [{table}{'.' * bool(table)}{name}] is one table: write [[{name}]], since there may be several"
    if error["type"] in ("model_type", "model_attributes_type") and isinstance(error["input"], list):
        return f"{where}: [[{name}]] is a list of tables: write [{name}], since there is one"
    problem = str(error["ctx"]["error"]) if error["type"] == "value_error" else describe_error(error)
    return f"{where}: {_format_path(place) or 'the file'}: {problem}"


def _format_path(place: TomlPath) -> str:
    """Return `members 2` for the second table [[members]]."""
    return "".join(f" {part + 1}" if isinstance(part, int) else f".{part}" for part in place).removeprefix(".")


def _known_keys(kind: Any, place: Sequence[str | int]) -> list[str]:
    for part in place:
        is_table = isinstance(kind, type) and hasattr(kind, "model_fields")
        kind = kind.model_fields[part].annotation if is_table else get_args(kind)[-1 if get_origin(kind) is dict else 0]
        if type(None) in get_args(kind):  # an optional table
            kind = get_args(kind)[0]
    return list(kind.model_fields)


def find_line(text: str, place: TomlPath) -> int | None:
    """Return the line, from 1, of a key or of its table; None if there is neither."""
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
