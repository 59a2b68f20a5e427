"""A recipe's compiled step without the trainer, for loops that benchmarks time."""

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
    """A compiled program and its state; the step is the trainer's."""

    def __init__(self, compiled: Compiled, recipe: Recipe):
        self.compiled = compiled
        self.state = compiled.init(jax.random.key(0))
        self.steps_done = 0
        self._total_steps = int(recipe.defaults["steps"])
        self._key = jax.random.key(1)

    def to_devices(self, rows: Batch) -> Batch:
        return jax.device_put(rows, batch_sharding(self.compiled.mesh))

    def step(self, batch: Batch) -> Metrics:
        """Dispatch one update."""
        clock = Clock(
            self._key,
            np.int32(self.steps_done),
            np.float32(min(1.0, self.steps_done / self._total_steps)),
            np.float32(1),
        )
        self.state, metrics = self.compiled.step(self.state, batch, clock)
        self.steps_done += 1
        return metrics


def compile_bare(recipe: Recipe, devices: Sequence[Any]) -> Bare:
    """Compile the step of a trainer without options."""
    return Bare(compile_step(recipe, default_request(recipe), devices), recipe)
