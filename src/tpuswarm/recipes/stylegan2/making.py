"""Pictures of a trained generator: of random codes, side by side, on a walk."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from tpuswarm.recipes.stylegan2.program import StyleGAN2Program

Make = Callable[[Any, np.ndarray, float], np.ndarray]
"""A state, codes z_BxD and a truncation → pictures uint8 (B, height, width, 3)."""


def maker(program: StyleGAN2Program) -> Make:
    """What the generator's moving average makes; compiled once for each size of a batch."""
    run = jax.jit(lambda state, z_BxD, truncation: program.make(state.average, z_BxD, state.w_mean, truncation))

    def make(state: Any, z_BxD: np.ndarray, truncation: float) -> np.ndarray:
        return to_bytes(np.asarray(run(state, z_BxD, np.float32(truncation))))

    return make


def to_bytes(x_BxHxWx3: np.ndarray) -> np.ndarray:
    """Pictures from -1 to 1 as uint8."""
    return np.clip(np.round((x_BxHxWx3 + 1) * 127.5), 0, 255).astype(np.uint8)


def make_grids(
    make: Make, state: Any, rows: int, columns: int, truncation: float, seed: int, latent: int, count: int
) -> Iterator[np.ndarray]:
    """Pictures of rows x columns: uint8 (height, width, 3); the same seed gives the same codes at every step of a run.

    Each picture is one of `count` on a closed walk, of which the first is where `seed` begins: the codes of all places
    stay normal, and the last one leads to the first again. They are made row by row, so that memory holds one row of
    the largest pictures.
    """
    z_RxCxD = np.asarray(jax.random.normal(jax.random.key(seed), (rows, columns, latent)))
    aside_RxCxD = np.asarray(jax.random.normal(jax.random.fold_in(jax.random.key(seed), 1), z_RxCxD.shape))
    for number in range(count):
        angle = 2 * np.pi * number / count
        codes = np.float32(np.cos(angle)) * z_RxCxD + np.float32(np.sin(angle)) * aside_RxCxD
        yield np.concatenate([np.concatenate(list(make(state, z_CxD, truncation)), 1) for z_CxD in codes], 0)


def make_many(make: Make, state: Any, count: int, batch: int, seed: int, latent: int) -> Iterator[np.ndarray]:
    """Pictures of random codes, `count` of them in batches."""
    for start in range(0, count, batch):
        key = jax.random.fold_in(jax.random.key(seed), start)
        yield make(state, np.asarray(jax.random.normal(key, (batch, latent))), 1.0)[: count - start]
