"""Mix several data sets into one order of rows."""

import hashlib
import json
import math
import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tpuswarm.errors import InputError

BLOCK_ROWS = 1024
"""Of so many rows each set has its share exactly."""
MAX_BLOCK_ROWS = 2**20


class DataSet(NamedTuple):
    """A path or URL, and its weight; None if no set has one."""

    place: str
    weight: float | None

    @property
    def text(self) -> str:
        return self.place if self.weight is None else f"{self.place}:{self.weight!r}"


def parse_data(data: str | Sequence[str]) -> list[DataSet]:
    """Return the data sets of `--data`, each PLACE or PLACE:WEIGHT; in one text, each on a line.

    Raises InputError for a weight that is not above 0, and if only some sets have one.
    """
    sets = [_parse(line) for line in (data.split("\n") if isinstance(data, str) else data)]
    if len(sets) == 1:
        return [DataSet(sets[0].place, None)]
    if any(one.place == "fake" for one in sets):
        raise InputError("fake data is not mixed with other data: give one --data fake")
    if len(sets) > BLOCK_ROWS:
        raise InputError(f"--data names {len(sets):,} data sets, at most {BLOCK_ROWS:,} can be mixed")
    without = [one.place for one in sets if one.weight is None]
    if 0 < len(without) < len(sets):
        raise InputError(f"{without[0]} has no weight, and other data has one: write --data {without[0]}:WEIGHT")
    return sets


def _parse(text: str) -> DataSet:
    place, _, number = text.rpartition(":")
    try:
        weight = float(number)
    except ValueError:
        return DataSet(text, None)
    is_port = "://" in text and "/" not in place.partition("://")[2]
    if not place or is_port or ("://" not in text and Path(text).expanduser().exists()):
        return DataSet(text, None)
    if not 0 < weight < math.inf:
        raise InputError(f"--data {text} has the weight {number}: it must be a number above 0")
    return DataSet(place, weight)


def set_names(places: Sequence[str]) -> list[str]:
    """Return a short name of each data set, all different."""
    names = list[str]()
    for place in places:
        name = re.sub(r"\W+", "_", Path(place).name.partition(".")[0]) or "data"
        count = sum(re.fullmatch(rf"{name}(_\d+)?", other) is not None for other in names)
        names.append(f"{name}_{count + 1}" if count else name)
    return names


def divide(rows: int, weights: Sequence[float]) -> tuple[int, ...]:
    """Divide rows in proportion to weights; each set with a weight above 0 gets one at least."""
    shares = np.array(weights) / sum(weights) * rows
    found = np.maximum(np.floor(shares), shares > 0).astype(int)
    while missing := rows - int(found.sum()):
        gaps = shares - found if missing > 0 else np.where(found > 1, found - shares, -np.inf)
        found[np.argmax(gaps)] += 1 if missing > 0 else -1
    return tuple(found.tolist())


class MixedSource:
    """Rows of several sources, which take turns in a random order; each row has the number of its set.

    Blocks of so many rows as all quotas together have `quotas[k]` rows of source k, in its own order. So the row at any
    position is found without those before it.
    """

    def __init__(self, sources: Sequence[Any], quotas: Sequence[int], seed: int, is_chat: bool):
        """is_chat: some sources hold conversations; a quota of 0 leaves a source out."""
        self._sources, self._quotas, self._seed, self._is_chat = sources, tuple(quotas), seed, is_chat
        used = [source for source, quota in zip(sources, quotas, strict=True) if quota]
        self.rows_per_epoch = sum(source.rows_per_epoch for source in used)
        identity = json.dumps([[source.digest for source in used], self._quotas])
        self.digest = hashlib.sha256(identity.encode()).hexdigest()

    def rows(self, start: int, count: int) -> dict[str, np.ndarray]:
        """Return rows start to start + count of the order."""
        size = sum(self._quotas)
        first_block, place = divmod(start, size)
        blocks = range(first_block, (start + count - 1) // size + 1)
        order = np.concatenate([_block_order(self._quotas, self._seed, block) for block in blocks])
        before, chosen = order[:place], order[place : place + count]
        rows: dict[str, np.ndarray] = {}
        for number, (source, quota) in enumerate(zip(self._sources, self._quotas, strict=True)):
            places = np.flatnonzero(chosen == number)
            if len(places):
                first = first_block * quota + int(np.count_nonzero(before == number))
                found = source.rows(first, len(places))
                for name, array in (_as_chat(found) if self._is_chat else found).items():
                    rows.setdefault(name, np.empty((count, *array.shape[1:]), array.dtype))[places] = array
        return rows | {"set": chosen.astype(np.int32)}


def _as_chat(rows: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return rows in the form of ChatSource: of plain text, all is one segment and counts."""
    shape = rows["tokens"][:, 1:].shape
    return {"segments": np.ones(shape, np.int32), "counted": np.ones(shape, np.bool_)} | rows


@lru_cache(maxsize=4)
def _block_order(quotas: tuple[int, ...], seed: int, block: int) -> np.ndarray:
    """Return the number of the set of each row of a block."""
    numbers = np.repeat(np.arange(len(quotas), dtype=np.uint16), quotas)
    return np.random.default_rng([seed, block, 2]).permutation(numbers)
