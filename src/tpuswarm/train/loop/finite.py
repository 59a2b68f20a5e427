"""Find NaN and infinity in the state of a run."""

from typing import Any

import jax
import jax.numpy as jnp

from tpuswarm.errors import InputError, RunFailed
from tpuswarm.train.paths import leaf_paths


def require_finite(tree: Any, source: str) -> None:
    """Raise InputError, naming the first leaves, if parameters hold NaN or infinity; source: where they come from."""
    if bad := not_finite(tree):
        names, more = ", ".join(bad[:3]), f" and {len(bad) - 3} more" if len(bad) > 3 else ""
        raise InputError(f"{source} gives NaN or infinity in {names}{more}: check what makes or holds them")


def not_finite(tree: Any) -> list[str]:
    """Return the paths of the leaves that hold NaN or infinity."""
    return [path for path, ok in zip(leaf_paths(tree), jax.device_get(_all_finite(tree)), strict=True) if not ok]


def diverged(params: Any, step: int, quantity: str, saved: int, clips: bool) -> RunFailed:
    """Return the error of a run in which `quantity` is NaN or infinite at a step, with advice.

    saved: the step of the last checkpoint; clips: whether gradients are clipped.
    """
    bad = not_finite(params)
    names = f"parameters not finite: {', '.join(bad[:3])}" if bad else "all parameters are finite"
    more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
    if step == 1 and quantity.startswith("loss"):
        advice = "no update came before, so look for NaNs in the data, and for a division by 0 in the loss"
    elif bad:
        advice = f"a lower learning rate{'' if clips else ' or --clip'} may help, unless the data has NaNs"
    else:
        advice = "check the data for NaNs"
    return RunFailed(
        f"NaN or infinity at step {step} ({quantity}; {names}{more}); the checkpoint of step {saved} is safe; {advice}"
    )


@jax.jit
def _all_finite(tree: Any) -> list[jax.Array]:
    return [jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree)]
