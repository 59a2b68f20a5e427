"""A finder of the learning rate: a short run in which the rate grows step by step.

Smith 2017, "Cyclical Learning Rates for Training Neural Networks", section 3.3; the rate is taken where the loss falls
fastest, as fastai's and Lightning's finders do.
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
from tpuswarm.train.losses import COUNTS
from tpuswarm.train.optional import SavesMemory, SetsCompiler
from tpuswarm.train.process.numerics import run_key
from tpuswarm.train.program.compiled import compile_step
from tpuswarm.train.program.contract import program_of
from tpuswarm.train.program.mesh import batch_sharding
from tpuswarm.train.program.request import Request, default_batch, usual_request
from tpuswarm.train.recipe import Clock, Options, Recipe, Source
from tpuswarm.train.run.loaded import initial_parameters
from tpuswarm.train.supervised_program import SupervisedProgram

LOWEST, HIGHEST = 1e-6, 1.0
STEPS = 100
KEPT = 0.9
"""Of the smoothed loss at each step; the rest is the step's own."""
WORSE = 2.0
"""Times the best smoothed loss: from there on the rate is too large, and the steps after it say nothing."""
FIRST = 0.1
"""Share of the steps, at the beginning, whose smoothed loss rests on too few to have a slope."""
ROUNDING = 1e-6
"""Of the loss: it falls by more than this in a step, or not at all."""


class Rates(NamedTuple):
    """What was found, and from what."""

    lr: float
    tried: list[tuple[float, float]]
    """Rate and loss of each step, up to the one at which the loss had grown too large."""


def find_lr(
    recipe: Recipe,
    asked: Mapping[str, Any],
    devices: Sequence[Any],
    steps: int = STEPS,
    far: Callable[[str], None] = lambda text: None,
) -> Rates:
    """The peak learning rate for a recipe with a schedule, on the rows that its run begins with; nothing is kept.

    asked: settings of a run by their names. Raises InputError for a program that is not one of `supervised` with a
    schedule, and where the loss does not fall at any rate.
    """
    given = {name: asked[name] for name in Request.__dataclass_fields__ if name in asked}
    if given.get("batch") is None:
        given["batch"] = default_batch(recipe, len(devices), given.get("accumulate"))
    request = usual_request(recipe, **given)
    seed = recipe.defaults.get("seed", 0) if asked.get("seed") is None else asked["seed"]
    compiled = compile_step(_Growing(recipe), request, devices)
    parent = asked.get("init_from")
    init_key, step_key = jax.random.split(run_key(seed))
    shared = initial_parameters(parent, asked.get("init_only"), recipe, compiled, init_key) if parent else None
    state = compiled.init(init_key, shared)
    source, sharding = training_source(recipe, seed), batch_sharding(compiled.mesh)
    spec = compiled.program.batch_spec(request.batch)
    tried: list[tuple[float, float]] = []
    for step in range(steps):
        batch = read_batch(source, spec, sharding, step * request.batch)
        clock = Clock(step_key, np.int32(step), np.float32(step / steps), np.float32(1))
        state, metrics = compiled.step(state, batch, clock)
        rate, loss = float(metrics["lr"]), float(metrics["loss"])
        if not metrics.get(COUNTS, True):
            continue
        tried.append((rate, loss))
        far(f"{rate:.1e}: loss {loss:.4g}")
        if _too_large(_smooth([loss for _, loss in tried])):
            break
    return Rates(steepest(tried), tried)


def steepest(tried: Sequence[tuple[float, float]]) -> float:
    """The rate at which the smoothed loss falls fastest over the rate's logarithm; InputError where it never falls."""
    smooth = _smooth([loss for _, loss in tried])
    useful = next((end for end in range(1, len(smooth) + 1) if _too_large(smooth[:end])), len(smooth) + 1) - 1
    first = math.ceil(FIRST * len(tried))
    slopes = np.gradient(smooth[first:useful]) if useful - first > 1 else np.zeros(0)
    if not slopes.size or slopes.min() > -ROUNDING * abs(smooth[first]):
        raise InputError(
            f"the loss does not fall at any learning rate from {tried[0][0]:.0e} to {tried[-1][0]:.0e}; is it a mean, "
            "and do the parameters take part in it? Or give a number"
        )
    return tried[first + int(slopes.argmin())][0]


def _smooth(losses: Sequence[float]) -> list[float]:
    """Their moving average, whose beginning is not pulled to 0."""
    found, average = [], 0.0
    for count, loss in enumerate(losses, 1):
        average = KEPT * average + (1 - KEPT) * loss
        found.append(average / (1 - KEPT**count))
    return found


def _too_large(smooth: Sequence[float]) -> bool:
    """Whether the newest loss is far above the best; a first loss is the best so far."""
    best, newest = min(smooth), smooth[-1]
    return not math.isfinite(newest) or newest > best + (WORSE - 1) * max(abs(best), abs(smooth[0] - best))


class _Growing(Recipe):
    """A recipe whose learning rate grows from LOWEST to HIGHEST."""

    def __init__(self, recipe: Recipe):
        self._recipe = recipe
        self.name, self.defaults = recipe.name, recipe.defaults
        if isinstance(recipe, SavesMemory):
            self.forms = recipe.forms
        if isinstance(recipe, SetsCompiler):
            self.compiling = recipe.compiling

    def program(self, options: Options) -> SupervisedProgram:
        """The same but for the schedule."""
        program = program_of(self._recipe, options)
        if not isinstance(program, SupervisedProgram) or not program.has_schedule:
            raise InputError(
                f"{self.name} has no schedule whose learning rate could be looked for: give its optimizer as a "
                "function of (learning_rate, decay_mask), with a schedule"
            )
        return program.at(lambda progress: LOWEST * jnp.float32(HIGHEST / LOWEST) ** progress)

    def data(self, split: str) -> Source:
        """The recipe's."""
        return self._recipe.data(split)
