"""The tensors of a published model in safetensors files, in one file or several."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from tpuswarm.errors import InputError
from tpuswarm.recipes.language.hub import Published
from tpuswarm.train.data.contents import contents_digest

WEIGHTS_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")
WEIGHTS_WORDS = "weights (pickles are not read: save them as safetensors)"
COMPARED_ROWS = 4096
"""Rows of two tensors that are compared at a time."""
SHARD_BYTES = 2 * 2**30
"""Size of a file that is written; the host holds one at a time."""


class Tensors:
    """The tensors of a model by name."""

    def __init__(self, name: str, slices: dict[str, Any]):
        self._name, self._slices = name, slices

    def __getitem__(self, name: str) -> Any:
        return self._slices[name]

    def drop(self, *endings: str) -> None:
        """Forget tensors whose names end so."""
        self._slices = {name: part for name, part in self._slices.items() if not name.endswith(endings)}

    def keep_part(self, prefix: str, others: tuple[str, ...]) -> None:
        """If any names have the prefix, forget it, and the tensors whose names start with one of `others`."""
        if any(name.startswith(prefix) for name in self._slices):
            kept = {name: part for name, part in self._slices.items() if not name.startswith(others)}
            self._slices = {name.removeprefix(prefix): part for name, part in kept.items()}

    def drop_copy(self, name: str, original: str) -> None:
        """Forget the tensor `name`, if there is one. Raise InputError unless it equals `original`."""
        if name not in self._slices or original not in self._slices:
            return
        copy, tensor = self._slices.pop(name), self._slices[original]
        shape = tuple(copy.get_shape())
        starts = range(0, shape[0], COMPARED_ROWS)
        parts = (slice(start, min(start + COMPARED_ROWS, shape[0])) for start in starts)
        if shape != tuple(tensor.get_shape()) or not all(np.array_equal(copy[part], tensor[part]) for part in parts):
            raise InputError(
                f"{name} of {self._name} differs from its {original}, although its config.json says that they are one: "
                "one of them would be lost"
            )

    def check(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        """Raise InputError unless exactly the expected tensors are there, of these shapes and of floats."""
        for problem, wrong in (
            ("is missing", sorted(expected.keys() - self._slices.keys())),
            ("has an unknown tensor,", sorted(self._slices.keys() - expected.keys())),
        ):
            if wrong:
                more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
                raise InputError(f"{self._name} {problem} {wrong[0]}{more}; its shape has {len(expected)}")
        for name, shape in expected.items():
            if (found := tuple(self._slices[name].get_shape())) != shape:
                raise InputError(f"{name} of {self._name} is {found}, its config.json says {shape}")
            if (dtype := self._slices[name].get_dtype()) not in FLOAT_DTYPES:
                raise InputError(f"{name} of {self._name} is {dtype}, not one of {', '.join(FLOAT_DTYPES)}")


def open_tensors(place: Published, files: ExitStack, prefix: str = "", parts: Sequence[str] | None = None) -> Tensors:
    """Open the weight files of a model until `files` is closed; names are without the prefix.

    parts: names of the files; by default those that hold a whole model.
    Raises InputError for a file that is missing or damaged.
    """
    slices: dict[str, Any] = {}
    for part in parts or _file_names(place):
        path = place.get(part, WEIGHTS_WORDS)
        try:
            file = files.enter_context(safe_open(str(path), framework="numpy"))
        except (SafetensorError, OSError) as error:
            raise InputError(f"{path} is damaged or not a safetensors file: {error}") from error
        for name in file.keys():  # noqa: SIM118  # not a mapping
            slices[name.removeprefix(prefix)] = file.get_slice(name)
    return Tensors(place.name, slices)


def digest(place: Published, parts: Sequence[str] | None = None) -> str:
    """Return the SHA-256 of a model's weight files, or of the files `parts`, and their names."""
    total = hashlib.sha256()
    for part in parts or _file_names(place):
        path = place.get(part, WEIGHTS_WORDS)
        try:
            total.update(f"{part} {contents_digest(path)}\n".encode())
        except OSError as error:
            raise InputError(f"{path} cannot be read: {error}") from error
    return total.hexdigest()


def save_tensors(folder: Path, sizes: Mapping[str, int], read: Callable[[str], np.ndarray]) -> None:
    """Write tensors to model.safetensors, or to several files and their index. Raise OSError if the disk is full.

    sizes: bytes by name; read: returns a tensor.
    """
    shards: list[list[str]] = [[]]
    left = SHARD_BYTES
    for name, size in sizes.items():
        if size > left and shards[-1]:
            shards.append([])
            left = SHARD_BYTES
        shards[-1].append(name)
        left -= size
    names = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    if len(shards) == 1:
        names = [WEIGHTS_FILE]
    for file, shard in zip(names, shards, strict=True):
        save_one(folder / file, {name: read(name) for name in shard})
    if len(shards) > 1:
        where = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": where}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def save_one(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """Write tensors to one file. Raise OSError if the disk is full."""
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:  # raised for a full disk
        raise OSError(str(error)) from error


def _file_names(place: Published) -> list[str]:
    index = None if place.find(WEIGHTS_FILE) else place.find(INDEX_FILE)
    if index is None:
        return [WEIGHTS_FILE]
    try:
        return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{index} does not say which files hold the weights: {error!r}") from error
