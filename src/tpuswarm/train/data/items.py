"""Make batches from items of other libraries: dicts, or tuples with named parts."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from tpuswarm.config.nearest import did_you_mean
from tpuswarm.errors import InputError
from tpuswarm.train.data.source import copy_arrays

ArrayRows = dict[str, np.ndarray]
SAME_NAMES = "give all the same names, or choose some with names=[…]"


def stack_items(items: Iterable[Any], names: Sequence[str], label: Callable[[int], str], line: str) -> ArrayRows:
    """Stack items to one batch; raise InputError unless they are arrays of numbers of one shape.

    Copies each item before it reads the next one, which may fill the same arrays again. label: names the item at a
    position, for an error; line: of the user's code.
    """
    columns: dict[str, list[np.ndarray]] = {}
    for position, item in enumerate(items):
        arrays = item_arrays(item, names, partial(label, position), line)
        if position == 0:
            columns = {name: [] for name in arrays}
        if arrays.keys() != columns.keys():
            name = min(arrays.keys() ^ columns.keys(), key=str)
            has, lacks = (0, position) if name in columns else (position, 0)
            raise InputError(f"{label(has)} has {name}, and {label(lacks)} does not: {SAME_NAMES}{line}")
        for name, column in columns.items():
            array = arrays[name]
            if column and array.shape != column[0].shape:
                raise InputError(
                    f"{name} has shape {array.shape} in {label(position)}, and {column[0].shape} in {label(0)}: pad or "
                    f"cut it to one shape{line}"
                )
            column.append(array)
    return {name: np.stack(column) for name, column in columns.items()}


def item_arrays(item: Any, names: Sequence[str], label: Callable[[], str], line: str) -> ArrayRows:
    """Copy the arrays of a dict, those of `names` if they are given, or the parts of a tuple under `names`."""
    if isinstance(item, Mapping):
        if not item:
            raise InputError(f"{label()} is an empty dict: give each item its arrays{line}")
        for name in names:
            if name not in item:
                raise InputError(f"{label()} has no {name}; {did_you_mean(name, list(item))}{line}")
        return copy_arrays({name: item[name] for name in names} if names else item, label, line)
    parts = tuple(item) if isinstance(item, tuple | list) else (item,)
    if len(parts) != len(names):
        raise InputError(
            f"{label()} is a {type(item).__name__} of {len(parts)} parts, and {len(names)} names are given: name each "
            f"part, as in names=['image', 'label']{line}"
        )
    return copy_arrays(dict(zip(names, parts, strict=True)), label, line)


def concatenate(parts: Sequence[ArrayRows], line: str) -> ArrayRows:
    """Concatenate parts of a batch; raise InputError if one lacks an array or has rows of another shape."""
    first = parts[0]
    for part in parts[1:]:
        for name in first.keys() | part.keys():
            if name not in first or name not in part:
                raise InputError(f"some items of the data have {name}, others do not: {SAME_NAMES}{line}")
            shape, other = first[name].shape[1:], part[name].shape[1:]
            if shape != other:
                raise InputError(
                    f"{name} of the data has rows of shape {shape} and of {other}, and a batch has rows of one: pad or "
                    f"cut them to one shape{line}"
                )
    return {name: np.concatenate([part[name] for part in parts]) for name in first}
