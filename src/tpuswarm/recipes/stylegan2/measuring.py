"""How far what a generator makes is from the real pictures."""

from collections.abc import Callable
from typing import Any

import numpy as np

from tpuswarm.recipes.stylegan2.distances import distances
from tpuswarm.recipes.stylegan2.features import of_user, random_features
from tpuswarm.recipes.stylegan2.making import Make, make_many

REFERENCE, MOST_REFERENCE = 1_000, 5_000
"""Real pictures that distances are measured against, at least where there are as many, and at most."""


def measure(
    make: Make,
    state: Any,
    pictures: np.ndarray,
    latent: int,
    batch: int,
    features: str | None,
    far: Callable[[int, int], None],
) -> dict[str, Any]:
    """Distances of generated pictures, always of the same codes, from the last of the real ones.

    pictures: uint8 (count, side, side, 3), of which the last tenth is held out, and as many of the others are taken as
    are missing. Raises InputError for features of the user's that are none.
    """
    describe = of_user(features) if features else random_features
    held_out = len(pictures) // 10
    real = pictures[-min(max(held_out, REFERENCE), MOST_REFERENCE) :]
    count = max(REFERENCE, len(real))
    made: list[np.ndarray] = []
    for some in make_many(make, state, count, batch, 0, latent):
        made.append(describe(some))
        far(min(len(made) * batch, count), count)
    known = [describe(real[start : start + batch]) for start in range(0, len(real), batch)]
    facts = {"made": count, "reference": len(real), "held_out": min(held_out, len(real))}
    return facts | distances(np.concatenate(known), np.concatenate(made))
