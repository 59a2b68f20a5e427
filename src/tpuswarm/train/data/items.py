"""Make batches from items of other libraries: dicts, or tuples with named parts."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from tpuswarm.config.nearest import did_you_mean
from tpuswarm.errors import InputError
from tpuswarm.train.data.source import copy_array

ArrayRows = dict[str, np.ndarray]
NON_NUMERIC_KINDS = "OSUmM"
"""NumPy's kinds of objects, texts and times."""


def stack_items(items: Iterable[Any], names: Sequence[str]) -> ArrayRows:
    """Stack items to one batch; raise InputError unless they are arrays of numbers of one shape.

    Copies each item before it reads the next one, which may fill the same arrays again.
    """
    columns: dict[str, list[np.ndarray]] = {}
    types: dict[str, str] = {}
    for number, item in enumerate(items):
        row = name_parts(item, names)
        if number == 0:
            types = {name: type(value).__name__ for name, value in row.items()}
            columns = {name: [] for name in row}
        for name, column in columns.items():
            with _require_one_shape(name):
                column.append(copy_array(row[name]))
    rows = {}
    for name, column in columns.items():
        with _require_one_shape(name):
            rows[name] = np.stack(column)
        if rows[name].dtype.kind in NON_NUMERIC_KINDS:
            raise InputError(
                f"{name} of the data is a {types[name]}: items are dicts of arrays and numbers; name the others with "
                "names=[…]"
            )
    return rows


def concatenate(parts: Sequence[ArrayRows]) -> ArrayRows:
    """Concatenate parts of a batch; raise InputError if one lacks an array or has rows of another shape."""
    first = parts[0]
    for part in parts[1:]:
        for name in first.keys() | part.keys():
            if name not in first or name not in part:
                raise InputError(f"some items of the data have {name}, others do not: give each of them the same names")
            shape, other = first[name].shape[1:], part[name].shape[1:]
            if shape != other:
                raise InputError(
                    f"{name} of the data has rows of shape {shape} and of {other}, and a batch has rows of one: pad or "
                    "cut them to one shape"
                )
    return {name: np.concatenate([part[name] for part in parts]) for name in first}


@contextmanager
def _require_one_shape(name: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, KeyError) as error:
        raise InputError(f"{name} of the data cannot be one array: {error}; pad or cut it to one shape") from error


def name_parts(item: Any, names: Sequence[str]) -> Mapping[str, Any]:
    """Return an item as a dict, or the named parts of a dict."""
    if isinstance(item, Mapping):
        for name in names:
            if name not in item:
                raise InputError(f"an item of the data has no {name}; {did_you_mean(name, list(item))}")
        return {name: item[name] for name in names} if names else item
    parts = tuple(item) if isinstance(item, tuple | list) else (item,)
    if len(parts) != len(names):
        raise InputError(
            f"an item of the data is a {type(item).__name__} of {len(parts)} parts, and {len(names)} names are given: "
            "name each part, as in names=['image', 'label']"
        )
    return dict(zip(names, parts, strict=True))
