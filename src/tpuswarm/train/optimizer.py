"""Call any optax optimizer: some take more than a gradient, and some keep parameters of their own."""

import functools
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from tpuswarm.errors import InputError, TpuswarmError
from tpuswarm.train import paths
from tpuswarm.train.user_code import line_of, user_line

COUNTING = ("ScaleByScheduleState", "WrappedScheduleState")
"""Types of optax's states that count the steps of a schedule."""
SCHEDULE_FREE = "ScheduleFreeState"
UNEXPECTED_ARGUMENT = re.compile(r"got an unexpected keyword argument '(\w+)'")


class WithSlow(NamedTuple):
    """The state of `optax.lookahead`, and the slow parameters, which optax leaves to the caller."""

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
            "init returned optax.LookaheadParams: return the parameters alone, as the loss takes them; the slow ones "
            "are made from them and used in evaluation"
        )
    with _errors_named(optimizer.init), _without_lookahead_warning():
        state = optimizer.init(params)
    if _find(state, "DifferentiallyPrivateAggregateState"):
        raise InputError(
            "dpsgd needs the gradient of each row, and a step computes that of the batch: use another optimizer, or "
            "write a Program of your own (docs/your-own-model.md, The contract)"
        )
    for average in _find(state, SCHEDULE_FREE):
        if paths.leaf_paths(average.z) != paths.leaf_paths(params):
            raise InputError(
                "a schedule-free optimizer averages all parameters that are trained, and here it is a part of another "
                "optimizer: make it the whole one, and keep the other parameters with --freeze"
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

    scale: multiplies the updates, but those of an optimizer that goes to parameters which it keeps.
    """
    function = optax.with_extra_args_support(optimizer).update
    with (
        _errors_named(optimizer.update),
        _without_lookahead_warning(),
        jax.numpy_dtype_promotion("standard"),  # optax's updates do not pass the strict rules
    ):
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
    """Return the parameters that an optimizer means for evaluation.

    Not lookahead's fast ones, nor SAM's detour, nor those at which a schedule-free optimizer takes gradients.
    """
    if isinstance(state, WithSlow):
        return paths.overlay(params, state.slow)
    for sam in _sam_states(state):
        is_synced, before = sam.steps_since_sync == 0, paths.overlay(params, sam.cache)
        return jax.tree.map(functools.partial(jnp.where, is_synced), params, before)
    for average in _find(state, SCHEDULE_FREE):
        trained = paths.like(params, average.z)
        return paths.overlay(params, optax.contrib.schedule_free_eval_params(average, trained))
    return params


def alone_because(state: Any) -> str:
    """Return why an optimizer cannot run in a swarm, and the way out; empty if it can."""
    if _find(state, *COUNTING):
        return (
            "has a schedule of its own, which each member would run through by its own steps: give it as schedule=, "
            "and the optimizer as a function of (learning_rate, decay_mask)"
        )
    if _keeps_params(state):
        return (
            "keeps parameters of its own, which the members do not share: train with --members 1, or with another "
            "optimizer"
        )
    return ""


def _keeps_params(state: Any) -> bool:
    return isinstance(state, WithSlow) or bool(_sam_states(state) or _find(state, SCHEDULE_FREE))


def _call(function: Callable[..., Any], *args: Any, **extra_args: Any) -> Any:
    """Call an `update`, without the extra arguments that it, or one inside an `optax.chain`, does not take."""
    while True:
        try:
            return function(*args, **extra_args)
        except TypeError as error:
            unexpected = UNEXPECTED_ARGUMENT.search(str(error))
            if unexpected is None or unexpected[1] not in extra_args:
                raise
            del extra_args[unexpected[1]]


def _sam_states(state: Any) -> list[Any]:
    """Return the states of `optax.contrib.sam` that take a detour between two updates: not those in opaque mode."""
    return [sam for sam in _find(state, "SAMState") if sam.cache is not None]


def _find(state: Any, *names: str) -> list[Any]:
    """Return the parts of an optimizer's state whose types have one of these names."""
    parts = jax.tree.leaves(state, is_leaf=lambda part: type(part).__name__ in names)
    return [part for part in parts if type(part).__name__ in names]


@contextmanager
def _errors_named(function: Callable[..., Any]) -> Iterator[None]:
    """Turn an optimizer's error into InputError, with the user's line if there is one."""
    try:
        yield
    except TpuswarmError:
        raise
    except Exception as error:
        message = " ".join(str(error).split())[:500]
        line = user_line(error)
        place = f" ({line})" if line else line_of(function)
        raise InputError(f"the optimizer fails: {type(error).__name__}: {message}{place}") from error


@contextmanager
def _without_lookahead_warning() -> Iterator[None]:
    """Silence a warning that `optax.lookahead` logs whenever its state is made from plain parameters."""
    logger = logging.getLogger("absl")

    def is_other(record: logging.LogRecord) -> bool:
        return "has no attribute `fast`" not in str(record.msg)

    logger.addFilter(is_other)
    try:
        yield
    finally:
        logger.removeFilter(is_other)
