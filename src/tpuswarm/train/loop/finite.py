"""Whether a state still consists of numbers."""

from typing import Any

import jax
import jax.numpy as jnp

from tpuswarm.errors import InputError, RunFailed
from tpuswarm.train.paths import leaf_paths


def require_finite(tree: Any, where: str) -> None:
    """Raise InputError, naming the first, where parameters that `where` gives hold a NaN or an infinity."""
    if bad := not_finite(tree):
        names, more = ", ".join(bad[:3]), f" and {len(bad) - 3} more" if len(bad) > 3 else ""
        raise InputError(f"{where} gives NaN or infinity in {names}{more}: check what makes or holds them")


def not_finite(tree: Any) -> list[str]:
    """Paths of the leaves that hold a NaN or an infinity."""
    return [path for path, ok in zip(leaf_paths(tree), jax.device_get(_all_finite(tree)), strict=True) if not ok]


def diverged(params: Any, step: int, what: str, saved: int, clips: bool) -> RunFailed:
    """The end of a run in which `what` is no number at a step, with advice; saved: the step of the last checkpoint."""
    bad = not_finite(params)
    names = f"parameters not finite: {', '.join(bad[:3])}" if bad else "all parameters are finite"
    more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
    advice = "check the data for NaNs"
    if bad:
        advice = f"a lower learning rate{'' if clips else ' or --clip'} may help, unless the data has NaNs"
    return RunFailed(
        f"NaN or infinity at step {step} ({what}; {names}{more}); the checkpoint of step {saved} is safe; {advice}"
    )


@jax.jit
def _all_finite(tree: Any) -> list[jax.Array]:
    return [jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree)]
