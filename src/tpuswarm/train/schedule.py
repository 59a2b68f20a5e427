"""Learning-rate schedules: functions of progress, or of the number of updates, as optax's are."""

import inspect
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from tpuswarm.errors import InputError
from tpuswarm.train.user_code import blame, line_of

STILL, MOVING = 0.02, 0.1
"""Shares of the largest rate: a schedule that changes by less stands still, one that changes by more moves."""


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
