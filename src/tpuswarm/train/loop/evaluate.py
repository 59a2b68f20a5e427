"""The mean of a program's metrics over held-out rows."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from tpuswarm.train.data.feed import read_batch
from tpuswarm.train.program.compiled import Placed
from tpuswarm.train.program.mesh import batch_sharding, replicated
from tpuswarm.train.recipe import State, Weighted

EVAL_BATCHES = 200
"""An evaluation during training takes at most this many batches of the held-out rows, from the first on."""


class FiniteSource(Protocol):
    """A source that says how many rows an epoch has."""

    rows_per_epoch: int

    def rows(self, start: int, count: int) -> dict[str, np.ndarray]:
        """See recipe.Source."""
        ...


class HeldOut(NamedTuple):
    """Held-out rows, and how many of them are evaluated at once, over all devices."""

    source: FiniteSource
    batch: int


class Part(NamedTuple):
    """Rows that are evaluated at once."""

    first: int
    rows: int
    split: bool
    """Over the devices; else each of them has all."""


def parts(rows: int, batch: int, devices: int) -> Iterator[Part]:
    """All rows: whole batches, then the rest, of which no device gets more rows at a time than of a batch.

    At most four sizes, and so four compilations, the last three of them for fewer rows than a batch has.
    """
    end = rows - rows % batch
    for first in range(0, end, batch):
        yield Part(first, batch, True)
    even = (rows - end) // devices * devices
    if even:
        yield Part(end, even, True)
    most = batch // devices
    for first in range(end + even, rows, most):
        yield Part(first, min(most, rows - first), False)


def evaluate(
    placed: Placed,
    state: State,
    source: FiniteSource,
    batch: int,
    most_batches: int | None = None,
    leave: Callable[[], bool] = lambda: False,
    far: Callable[[str], None] = lambda text: None,
) -> tuple[dict[str, float], int] | None:
    """Means of the metrics over the rows of the first epoch, and how many rows that were; None if told to leave.

    Every row counts the same, but where a metric is Weighted. batch: rows at once, over all devices, which divide it;
    far: is told how far it is.
    """
    every = list(parts(source.rows_per_epoch, batch, placed.mesh.size))[:most_batches]
    split, whole = batch_sharding(placed.mesh), replicated(placed.mesh)
    found: list[Any] = []
    for index, part in enumerate(every):
        if leave():
            return None
        spec = placed.program.batch_spec(part.rows)
        rows = read_batch(source, spec, split if part.split else whole, part.first)
        found.append(placed.evaluate(state, rows))
        if index >= 2:
            jax.block_until_ready(found[index - 2])  # at most two batches wait on the devices
            far(f"{index - 1:,} of {len(every):,} batches")
    values, counts = jax.device_get(found), [part.rows for part in every]
    return {name: _mean([value[name] for value in values], counts) for name in values[0]}, sum(counts)


def _mean(values: Sequence[Any], counts: Sequence[int]) -> float:
    """Of a metric, given that of each part."""
    if isinstance(values[0], Weighted):
        return float(Weighted(*np.sum(np.asarray(values, np.float64), axis=0)).mean)
    return float(np.average(np.asarray(values, np.float64), weights=counts))
