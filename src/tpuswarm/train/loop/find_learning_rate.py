"""Find a learning rate by a short run in which the rate grows step by step.

Smith 2017, "Cyclical Learning Rates for Training Neural Networks", section 3.3. As in fastai and Lightning, the result
is the rate at which the loss falls fastest.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tpuswarm.errors import InputError
from tpuswarm.train.data.feed import read_batch
from tpuswarm.train.data.source import training_source
from tpuswarm.train.losses import HAS_COUNTED_ROWS
from tpuswarm.train.process.numerics import run_key
from tpuswarm.train.program.compiled import compile_step
from tpuswarm.train.program.contract import program_of
from tpuswarm.train.program.mesh import batch_sharding
from tpuswarm.train.program.request import Request, default_batch, default_request
from tpuswarm.train.recipe import Clock, Options, Recipe, Source
from tpuswarm.train.run.loaded import initial_parameters
from tpuswarm.train.supervised_program import SupervisedProgram

MIN_RATE, MAX_RATE = 1e-6, 1.0
DEFAULT_STEPS = 100
SMOOTHING_FACTOR = 0.9
"""Weight of earlier losses in the moving average."""
DIVERGED_FACTOR = 2.0
"""Ratio to the best smoothed loss from which the rate is too large."""
IGNORED_START_SHARE = 0.1
"""Share of steps at the start, whose average rests on too few losses."""
MIN_SLOPE_FACTOR = 1e-6
"""Least decrease per step relative to the loss; less is rounding."""


class Rates(NamedTuple):
    """The best learning rate, and all rates that were tried."""

    lr: float
    tried: list[tuple[float, float]]
    """Rate and loss of each step, until the loss grew too large."""


def find_lr(
    recipe: Recipe,
    requested: Mapping[str, Any],
    devices: Sequence[Any],
    steps: int = DEFAULT_STEPS,
    show_progress: Callable[[str], None] = lambda text: None,
) -> Rates:
    """Find the peak learning rate for a recipe with a schedule, on the first rows of its run; save nothing.

    requested: settings of a run by name. Raise InputError unless the program is from `supervised` with a schedule, and
    if the loss does not fall at any rate.
    """
    options = {name: requested[name] for name in Request.__dataclass_fields__ if name in requested}
    if options.get("batch") is None:
        options["batch"] = default_batch(recipe, len(devices), options.get("accumulate"))
    request = default_request(recipe, **options)
    seed = recipe.defaults.get("seed", 0) if requested.get("seed") is None else requested["seed"]
    compiled = compile_step(_GrowingRate(recipe), request, devices)
    parent = requested.get("init_from")
    init_key, step_key = jax.random.split(run_key(seed))
    shared = initial_parameters(parent, requested.get("init_only"), recipe, compiled, init_key) if parent else None
    state = compiled.init(init_key, shared)
    source, sharding = training_source(recipe, seed), batch_sharding(compiled.mesh)
    spec = compiled.program.batch_spec(request.batch)
    tried: list[tuple[float, float]] = []
    for step in range(steps):
        batch = read_batch(source, spec, sharding, step * request.batch)
        clock = Clock(step_key, np.int32(step), np.float32(step / steps), np.float32(1))
        state, metrics = compiled.step(state, batch, clock)
        rate, loss = float(metrics["lr"]), float(metrics["loss"])
        if not metrics.get(HAS_COUNTED_ROWS, True):
            continue
        tried.append((rate, loss))
        show_progress(f"{rate:.1e}: loss {loss:.4g}")
        if _has_diverged(_smooth([loss for _, loss in tried])):
            break
    return Rates(steepest(tried), tried)


def steepest(tried: Sequence[tuple[float, float]]) -> float:
    """Return the rate at which the smoothed loss falls fastest per logarithm of the rate."""
    smooth = _smooth([loss for _, loss in tried])
    stop = next((end for end in range(1, len(smooth) + 1) if _has_diverged(smooth[:end])), len(smooth) + 1) - 1
    first = math.ceil(IGNORED_START_SHARE * len(tried))
    slopes = np.gradient(smooth[first:stop]) if stop - first > 1 else np.zeros(0)
    if not slopes.size or slopes.min() > -MIN_SLOPE_FACTOR * abs(smooth[first]):
        raise InputError(
            f"the loss does not fall at any learning rate from {tried[0][0]:.0e} to {tried[-1][0]:.0e}; is it a mean, "
            "and do the parameters take part in it? Or give a number"
        )
    return tried[first + int(slopes.argmin())][0]


def _smooth(losses: Sequence[float]) -> list[float]:
    """Return the moving average, without a bias towards 0 at the start."""
    averages, average = [], 0.0
    for count, loss in enumerate(losses, 1):
        average = SMOOTHING_FACTOR * average + (1 - SMOOTHING_FACTOR) * loss
        averages.append(average / (1 - SMOOTHING_FACTOR**count))
    return averages


def _has_diverged(smooth: Sequence[float]) -> bool:
    """Return whether the newest loss is far above the best one."""
    best, newest = min(smooth), smooth[-1]
    limit = best + (DIVERGED_FACTOR - 1) * max(abs(best), abs(smooth[0] - best))
    return not math.isfinite(newest) or newest > limit


class _GrowingRate(Recipe):
    """A recipe whose learning rate grows from MIN_RATE to MAX_RATE."""

    def __init__(self, recipe: Recipe):
        self._recipe = recipe
        self.name, self.defaults = recipe.name, recipe.defaults
        self.forms, self.compiling = recipe.forms, recipe.compiling

    def program(self, options: Options) -> SupervisedProgram:
        program = program_of(self._recipe, options)
        if not isinstance(program, SupervisedProgram) or not program.has_schedule:
            raise InputError(
                f"{self.name} has no schedule whose learning rate could be looked for: give its optimizer as a "
                "function of (learning_rate, decay_mask), with a schedule"
            )
        return program.at(lambda progress: MIN_RATE * jnp.float32(MAX_RATE / MIN_RATE) ** progress)

    def data(self, split: str) -> Source:
        return self._recipe.data(split)
