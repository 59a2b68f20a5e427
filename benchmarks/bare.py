"""The plain way to train: a recipe's compiled step, and nothing around it but the caller's loop."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from tpuswarm import Clock, Recipe
from tpuswarm.train.program.compiled import Compiled, compile_step
from tpuswarm.train.program.mesh import batch_sharding
from tpuswarm.train.program.request import default_request
from tpuswarm.train.recipe import Batch, Metrics


class Bare:
    """A compiled program and its state; the step is the one that the trainer compiles for the same request."""

    def __init__(self, compiled: Compiled, recipe: Recipe):
        self.compiled = compiled
        self.state = compiled.init(jax.random.key(0))
        self.done = 0
        self._steps = int(recipe.defaults["steps"])
        self._key = jax.random.key(1)

    def put(self, rows: Batch) -> Batch:
        """Rows on the devices."""
        return jax.device_put(rows, batch_sharding(self.compiled.mesh))

    def step(self, batch: Batch) -> Metrics:
        """One update; returns when it is dispatched."""
        clock = Clock(self._key, np.int32(self.done), np.float32(min(1.0, self.done / self._steps)), np.float32(1))
        self.state, metrics = self.compiled.step(self.state, batch, clock)
        self.done += 1
        return metrics


def usual(recipe: Recipe, devices: Sequence[Any]) -> Bare:
    """The bare loop of what the trainer runs when the user names nothing."""
    return Bare(compile_step(recipe, default_request(recipe), devices), recipe)
