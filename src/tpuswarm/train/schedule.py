"""Learning-rate schedules, functions of progress or of the number of updates; what an optimizer has instead."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpuswarm.errors import InputError
from tpuswarm.train.user_code import blame, line_of

STILL, MOVING = 0.02, 0.1
"""Shares of the largest rate: a schedule that changes by less stands still, one that changes by more moves."""
COUNTING = ("ScaleByScheduleState", "WrappedScheduleState")
"""Types of optax's states that count the steps of a schedule."""
SCHEDULE_FREE = "ScheduleFreeState"
"""The type of optax's state that holds what gives the average of the parameters."""


def in_steps(schedule: Callable[..., Any]) -> bool:
    """Whether a schedule is a function of the number of updates: its parameter is `count` or `step`, as optax's are."""
    return _parameter(schedule) in ("count", "step")


def _parameter(function: Callable[..., Any]) -> str:
    """The name of a function's first parameter; empty where it does not tell, as one of a library in C."""
    try:
        return next(iter(inspect.signature(function).parameters), "")
    except (TypeError, ValueError):
        return ""


def check_schedule(schedule: Callable[..., Any]) -> None:
    """Raise InputError for a schedule that hardly moves with progress and does with steps, as one of optax's would."""
    if _parameter(schedule) in ("progress", "count", "step"):
        return
    with blame("the schedule fails"):
        over_run, over_steps = (
            np.array([float(schedule(jnp.float32(at))) for at in places])
            for places in ((0, 0.25, 0.5, 0.75, 1), (0, 10, 100, 1_000, 10_000))
        )
    moves, steps_move = np.ptp(over_run), np.ptp(over_steps)
    if moves < STILL * np.abs(over_run).max() and steps_move > MOVING * np.abs(over_steps).max():
        raise InputError(
            f"the schedule moves from {over_run[0]:g} to {over_run[-1]:g} as progress goes from 0 to 1, and to "
            f"{over_steps[-1]:g} in 10,000 steps: it seems to be made of steps; give a function whose parameter is "
            f"called `step` or `count`, as optax's own are{line_of(schedule)}"
        )


def counts_steps(opt: Any) -> bool:
    """Whether an optimizer's state counts its steps for a schedule of its own."""
    return bool(_parts(opt, COUNTING))


def averaged_by(opt: Any) -> Any:
    """The state of optax's schedule-free wrapper in that of an optimizer; None where there is none."""
    return next(iter(_parts(opt, (SCHEDULE_FREE,))), None)


def _parts(opt: Any, names: Sequence[str]) -> list[Any]:
    """The parts of an optimizer's state whose types have one of these names."""

    def is_one(part: Any) -> bool:
        return type(part).__name__ in names

    return [part for part in jax.tree.leaves(opt, is_leaf=is_one) if is_one(part)]
