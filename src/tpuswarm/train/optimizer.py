"""Call any optax optimizer and schedule, and say which parameters are trained and decayed."""

import functools
import inspect
import logging
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import CellType
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tpuswarm.errors import InputError, TpuswarmError
from tpuswarm.train import paths
from tpuswarm.train.user_code import blame, describe_failure, line_of, user_line

SCHEDULE_FREE = "ScheduleFreeState"
SCHEDULE_STATES = (
    "ScaleByScheduleState", "WrappedScheduleState", "WeightDecaySchedule", "AddNoiseState",
    "ConditionallyTransformState", "ConditionallyMaskState",
)  # fmt: skip
"""States of optax that count updates for a schedule."""
SCHEDULED = ("learning_rate", "b3", "alpha")
"""Arguments of optax.contrib that may be schedules."""
SCALES = ("step_size", "step_size_fn")
"""Variables of `optax.scale` and `optax.scale_by_schedule`."""
RATE_SAMPLES = 100
"""Parts of a run at whose ends a schedule is read to describe it."""
UNDECAYED = ("b", "bias", "biases", "beta", "scale", "gain", "gamma", "offset")
"""Names of parameters without weight decay, of any shape: in stacked layers they have two axes."""
LOOKAHEAD_WARNING = "has no attribute `fast`"
"""`optax.lookahead` logs it for plain parameters, which are right here."""
UNEXPECTED_ARGUMENT = re.compile(r"got an unexpected keyword argument '(\w+)'")

logging.getLogger("absl").addFilter(lambda record: LOOKAHEAD_WARNING not in str(record.msg))


class WithSlow(NamedTuple):
    """The state of `optax.lookahead`, and its slow parameters, which optax leaves to the caller."""

    optimizer: Any
    slow: Any


def as_transformation(optimizer: Any) -> optax.GradientTransformation | None:
    """Return an optimizer with `init` and `update`, such as `optax.MultiSteps`, in optax's form; None for others."""
    if isinstance(optimizer, optax.GradientTransformation):
        return optimizer
    init, update = getattr(optimizer, "init", None), getattr(optimizer, "update", None)
    if isinstance(optimizer, type) or not (callable(init) and callable(update)):
        return None
    return optax.GradientTransformationExtraArgs(init, update)


def init_state(optimizer: optax.GradientTransformation, params: Any) -> Any:
    """Return the optimizer's first state; InputError for an optimizer that needs the gradient of each row."""
    if isinstance(params, optax.LookaheadParams):
        raise InputError(
            "init returned optax.LookaheadParams: return the parameters alone, as the loss takes them; evaluation "
            "uses the slow ones, which are made from them"
        )
    with _errors_named(optimizer.init):
        state = optimizer.init(params)
    if _find(state, "DifferentiallyPrivateAggregateState"):
        raise InputError(
            "dpsgd needs the gradient of each row, but a step computes the batch's: use another optimizer, or write "
            "a Program of your own (docs/your-own-model.md, The contract)"
        )
    for average in _find(state, SCHEDULE_FREE):
        if paths.leaf_paths(average.z) != paths.leaf_paths(params):
            raise InputError(
                "a schedule-free optimizer must average all trained parameters, but here it is part of another "
                "optimizer: use it alone, and keep other parameters with --freeze"
            )
    return WithSlow(state, params) if _find(state, "LookaheadState") else state


def update(
    optimizer: optax.GradientTransformation,
    grads: Any,
    state: Any,
    params: Any,
    extra_args: dict[str, Any],
    scale: Any = None,
) -> tuple[Any, Any]:
    """Return the next parameters and state; the optimizer gets the `extra_args` that it accepts.

    scale: factor of the updates; not of an optimizer that keeps parameters, whose updates go to those.
    """
    function = optax.with_extra_args_support(optimizer).update
    with _errors_named(optimizer.update), jax.numpy_dtype_promotion("standard"):  # optax breaks the strict rules
        if isinstance(state, WithSlow):
            pair = optax.LookaheadParams(fast=params, slow=state.slow)
            updates, inner = _call(function, grads, state.optimizer, pair, **extra_args)
            fast, slow = optax.apply_updates(pair, updates)
            return fast, WithSlow(inner, slow)
        is_scaled = scale is not None and not _keeps_params(state)
        updates, state = _call(function, grads, state, params, **extra_args)
        if is_scaled:
            updates = jax.tree.map(lambda update: update * jnp.asarray(scale, update.dtype), updates)
        return optax.apply_updates(params, updates), state


def params_to_use(state: Any, params: Any) -> Any:
    """Return the parameters to evaluate.

    They are not lookahead's fast ones, SAM's detour, or the point where a schedule-free optimizer takes gradients.
    """
    if isinstance(state, WithSlow):
        return paths.overlay(params, state.slow)
    for sam in _sam_states(state):
        is_synced, before = sam.steps_since_sync == 0, paths.overlay(params, sam.cache)
        return jax.tree.map(functools.partial(jnp.where, is_synced), params, before)
    for average in _find(state, SCHEDULE_FREE):
        trained = paths.select_like(params, average.z)
        return paths.overlay(params, optax.contrib.schedule_free_eval_params(average, trained))
    return params


def swarm_obstacle(optimizer: optax.GradientTransformation, state: Any) -> str:
    """Return why an optimizer with this state cannot run in a swarm, and the way out; empty if it can."""
    if _find(state, *SCHEDULE_STATES) or _calls_schedule(optimizer.update):
        return (
            "has a schedule of its own, so each member would follow it by its own steps: give schedule= to supervised, "
            "and the optimizer as a function of (learning_rate, decay_mask)"
        )
    if _keeps_params(state):
        return "keeps parameters of its own that members do not share: train with --members 1 or another optimizer"
    return ""


def _calls_schedule(update: Callable[..., Any]) -> bool:
    """Return whether an update, or a function in its closure, has a schedule in its closure.

    Some optimizers of optax.contrib have the same state with a learning rate and with a schedule of it.
    """
    return any(callable(variables.get(name)) for variables in _closures(update) for name in SCHEDULED)


def _closures(function: Callable[..., Any]) -> Iterator[dict[str, Any]]:
    """Yield the variables that a function has in its closure, and those of the functions in it."""
    seen, remaining = set[int](), [function]
    while remaining:
        part = remaining.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, tuple | list):
            remaining += part
        elif inspect.isfunction(part) and part.__closure__:
            cells = dict(zip(part.__code__.co_freevars, part.__closure__, strict=True))
            variables = {name: cell.cell_contents for name, cell in cells.items() if cell != CellType()}
            yield variables
            remaining += variables.values()


def describe_rate(
    optimizer: Any, schedule: Callable[..., Any] | None, steps: int, steps_per_epoch: float | None
) -> str:
    """Describe the learning rate over a run; empty if it is unknown."""
    unit = schedule_unit(schedule) if schedule else "step"
    scales = [schedule] if schedule else _scales(as_transformation(optimizer))
    if not scales or not all(callable(scale) or isinstance(scale, int | float | np.floating) for scale in scales):
        return ""
    if scales == [-1.0]:  # an optimizer that finds its rate itself ends with -1
        return ""
    steps_per_unit = {"step": 1.0, "epoch": steps_per_epoch or steps, "progress": steps}[unit]
    positions = np.linspace(0, steps / steps_per_unit, RATE_SAMPLES + 1)
    positions = positions.astype(np.int32 if unit == "step" else np.float32)

    def rate(position: jax.Array) -> jax.Array:
        found = math.prod(scale(position) if callable(scale) else scale for scale in scales)
        return jnp.abs(jnp.asarray(found, jnp.float32))

    found: list[float] = []
    with blame("the schedule fails") if schedule else suppress(Exception):
        found = [float(x) for x in jax.jit(functools.partial(jax.lax.map, rate))(positions)]
    if not found:
        return ""
    first, last, highest = found[0], found[-1], max(found)
    if highest == min(found):
        return f"{first:g}"
    if highest in (first, last):
        return f"{first:g} to {last:g} over the run"
    return f"{first:g} to {highest:g} after {found.index(highest) / RATE_SAMPLES:.0%} of the run, then to {last:g}"


def _scales(transformation: Any) -> list[Any] | None:
    """Return the factors, and functions of the step, by which a chain of optax scales updates.

    None if a part scales only some parameters, or in another way.
    """
    update = getattr(transformation, "update", transformation)
    variables = next(_closures(update), {})
    if set(variables) == {"tx"}:  # optax.with_extra_args_support
        return _scales(variables["tx"])
    if "update_fns" in variables:  # optax.chain
        parts = [_scales(part) for part in variables["update_fns"]]
        return None if any(part is None for part in parts) else [scale for part in parts for scale in part or ()]
    own = [variables[name] for name in SCALES if name in variables]
    if own:
        return own
    return None if any(name in inner for inner in _closures(update) for name in SCALES) else []


def schedule_unit(schedule: Callable[..., Any]) -> Literal["progress", "step", "epoch"]:
    """Return what a schedule is a function of, by the name of its first parameter; optax says `count` for `step`."""
    name = _first_parameter(schedule)
    return "epoch" if name == "epoch" else "step" if name in ("count", "step") else "progress"


def _first_parameter(function: Callable[..., Any]) -> str:
    try:
        return next(iter(inspect.signature(function).parameters), "")
    except (TypeError, ValueError):  # a C function has no signature
        return ""


def check_schedule(schedule: Callable[..., Any]) -> None:
    """Raise InputError for a schedule of progress that changes by less than 2% with it, and by over 10% with steps."""
    if _first_parameter(schedule) in ("progress", "count", "step", "epoch"):
        return
    with blame("the schedule fails"):
        over_run, over_steps = (
            np.array([float(schedule(jnp.float32(position))) for position in positions])
            for positions in ((0, 0.25, 0.5, 0.75, 1), (0, 10, 100, 1_000, 10_000))
        )
    if np.ptp(over_run) < 0.02 * np.abs(over_run).max() and np.ptp(over_steps) > 0.1 * np.abs(over_steps).max():
        raise InputError(
            f"the schedule goes from {over_run[0]:g} to {over_run[-1]:g} while progress goes from 0 to 1, and to "
            f"{over_steps[-1]:g} in 10,000 steps: it seems to count steps; call its parameter `step` or `count`, as "
            f"optax does{line_of(schedule)}"
        )


def refuse_statistics(params: Any, place: str) -> None:
    """Raise InputError for running statistics (Flax's collection, NNX's variables) among the trained parameters."""
    for path in paths.leaf_paths(params):
        if "batch_stats" in path.split("/"):
            raise InputError(
                f"parameter {path} is a running statistic, which no gradient trains: make it in extra=, or keep it "
                f"with --freeze batch_stats{place}"
            )
    if _find(params, "BatchStat"):
        raise InputError(
            "there is an nnx.BatchStat among the parameters, a running statistic that no gradient trains: split it "
            f"off, nnx.split(model, nnx.Param, ...), and give it in extra={place}"
        )


def default_decay_mask(params: Any) -> Any:
    """Return a tree of bools: arrays of two or more axes decay; vectors, biases and the scales of norms do not."""
    # NNX ends the path of each parameter in `value`; PyTorch has dots in its names.
    names = [re.split(r"[/.]", path.removesuffix("/value"))[-1].lower() for path in paths.leaf_paths(params)]
    leaves, structure = jax.tree.flatten(params)
    decayed = [jnp.ndim(leaf) > 1 and name not in UNDECAYED for name, leaf in zip(names, leaves, strict=True)]
    return jax.tree.unflatten(structure, decayed)


def _keeps_params(state: Any) -> bool:
    return isinstance(state, WithSlow) or bool(_sam_states(state) or _find(state, SCHEDULE_FREE))


def _call(function: Callable[..., Any], *args: Any, **extra_args: Any) -> Any:
    """Call an `update` without the extra arguments that it refuses; one inside an `optax.chain` may refuse them."""
    while True:
        try:
            return function(*args, **extra_args)
        except TypeError as error:
            unexpected = UNEXPECTED_ARGUMENT.search(str(error))
            if unexpected is None or unexpected[1] not in extra_args:
                raise
            del extra_args[unexpected[1]]


def _sam_states(state: Any) -> list[Any]:
    return [sam for sam in _find(state, "SAMState") if sam.cache is not None]  # None in opaque mode


def _find(state: Any, *names: str) -> list[Any]:
    """Return the parts of a tree whose type has one of these names."""
    parts = jax.tree.leaves(state, is_leaf=lambda part: type(part).__name__ in names)
    return [part for part in parts if type(part).__name__ in names]


@contextmanager
def _errors_named(function: Callable[..., Any]) -> Iterator[None]:
    """Turn an optimizer's error into InputError, with the user's line if there is one."""
    try:
        yield
    except (TpuswarmError, KeyboardInterrupt):
        raise
    except BaseException as error:
        place = "" if user_line(error) else line_of(function)
        raise InputError(f"{describe_failure('the optimizer fails', error)}{place}") from error
