"""Pictures of a trained generator, side by side."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpuswarm.recipes.stylegan2.program import StyleGAN2Program


def make_grids(
    program: StyleGAN2Program,
    state: Any,
    rows: int,
    columns: int,
    truncation: float,
    seed: int,
    latent: int,
    count: int,
) -> Iterator[np.ndarray]:
    """Pictures of rows x columns: uint8 (height, width, 3); the same seed gives the same codes at every step of a run.

    Each picture is one of `count` on a closed walk, of which the first is where `seed` begins: the codes of all places
    stay normal, and the last one leads to the first again. The generator's moving average makes them, row by row, so
    that memory holds one row of the largest pictures.
    """
    z_RxCxD = np.asarray(jax.random.normal(jax.random.key(seed), (rows, columns, latent)))
    aside_RxCxD = np.asarray(jax.random.normal(jax.random.fold_in(jax.random.key(seed), 1), z_RxCxD.shape))
    run = jax.jit(lambda state, z: program.make(state.average, z, state.w_mean, truncation))
    for number in range(count):
        angle = 2 * np.pi * number / count
        codes = np.float32(np.cos(angle)) * z_RxCxD + np.float32(np.sin(angle)) * aside_RxCxD
        made = np.stack([np.asarray(run(state, jnp.asarray(z_CxD))) for z_CxD in codes])
        grid = np.concatenate([np.concatenate(list(row), 1) for row in made], 0)
        yield np.clip(np.round((grid + 1) * 127.5), 0, 255).astype(np.uint8)
