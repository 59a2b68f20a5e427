"""The mean of a program's metrics over held-out rows."""

from collections.abc import Callable
from typing import Any, Protocol

import jax
import numpy as np

from tpuswarm.train.feed import read_batch
from tpuswarm.train.fit import Placed
from tpuswarm.train.mesh import batch_sharding
from tpuswarm.train.recipe import State

EVAL_BATCHES = 200
"""An evaluation during training takes at most this many batches of the held-out rows."""


class FiniteSource(Protocol):
    """A source that says how many rows an epoch has."""

    rows_per_epoch: int

    def rows(self, start: int, count: int) -> dict[str, np.ndarray]:
        """See recipe.Source."""
        ...


def evaluate(
    placed: Placed,
    state: State,
    source: FiniteSource,
    batch: int,
    most_batches: int | None = None,
    leave: Callable[[], bool] = lambda: False,
    far: Callable[[str], None] = lambda text: None,
) -> tuple[dict[str, float], int] | None:
    """Metrics averaged over whole batches of the first epoch, and how many rows that were; None if told to leave.

    far: is told how far it is. Rows that do not fill a last batch are left out; a source smaller than one batch is
    repeated to fill one.
    """
    count = max(1, source.rows_per_epoch // batch)
    if most_batches is not None:
        count = min(count, most_batches)
    spec, sharding = placed.program.batch_spec(batch), batch_sharding(placed.mesh)
    found: list[Any] = []
    for index in range(count):
        if leave():
            return None
        found.append(placed.evaluate(state, read_batch(source, spec, sharding, index)))
        if index >= 2:
            jax.block_until_ready(found[index - 2])  # at most two batches wait on the devices
            far(f"{index - 1:,} of {count:,} batches")
    values = jax.device_get(found)
    return {name: float(np.mean([np.float64(value[name]) for value in values])) for name in values[0]}, count * batch
