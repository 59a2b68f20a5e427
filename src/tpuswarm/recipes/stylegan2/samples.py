"""Pictures of a trained generator: grids of random codes, walks between codes, and the code of a given picture."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tpuswarm.recipes.stylegan2 import distances, generator
from tpuswarm.recipes.stylegan2.program import StyleGAN2Program, pixels

SPREAD_CODE_COUNT = 1_000
"""Random codes that measure the spread of w."""
MAX_RATE = 0.1
RISE_SHARE, FALL_SHARE = 0.05, 0.25
"""Adam's rate rises over the first share of a projection's steps and falls over the last."""
NOISE_FACTOR, NOISY_SHARE = 0.05, 0.75
"""Noise on each number of w: times the root of E|w - mean|^2 at the start, none after this share of the steps."""
REPORT_INTERVAL_STEPS = 10

Make = Callable[[Any, np.ndarray, float], np.ndarray]
"""A state, codes z_BxD and a truncation → pictures uint8 (B, height, width, 3)."""


class Projection(NamedTuple):
    """The code of a picture: w float32 (latent,), its picture uint8 (side, side, 3), and the error.

    error: root of the mean squared difference of the pixels, 0 to 255.
    """

    w: np.ndarray
    picture: np.ndarray
    error: float

    def beside(self, given: np.ndarray) -> np.ndarray:
        """Put the given picture beside the found one: uint8 (side, 2 side, 3)."""
        return np.concatenate([given, self.picture], 1)


def maker(program: StyleGAN2Program) -> Make:
    """Return a function that samples the generator's moving average; it compiles once for each batch size."""
    run = jax.jit(lambda state, z_BxD, truncation: program.make(state.average, z_BxD, state.w_mean, truncation))

    def make(state: Any, z_BxD: np.ndarray, truncation: float) -> np.ndarray:
        return to_bytes(np.asarray(run(state, z_BxD, np.float32(truncation))))

    return make


def to_bytes(x_BxHxWx3: np.ndarray) -> np.ndarray:
    """Convert pictures from -1 to 1 to uint8."""
    return np.clip(np.round((x_BxHxWx3 + 1) * 127.5), 0, 255).astype(np.uint8)


def make_grids(
    make: Make, state: Any, rows: int, columns: int, truncation: float, seed: int, latent: int, count: int
) -> Iterator[np.ndarray]:
    """Yield `count` grids of rows x columns pictures, uint8 (height, width, 3), on a closed walk from `seed`'s codes.

    The codes stay normal on the walk, and its last grid leads back to the first. One row is made at a time, to save
    memory.
    """
    z_RxCxD = np.asarray(jax.random.normal(jax.random.key(seed), (rows, columns, latent)))
    other_RxCxD = np.asarray(jax.random.normal(jax.random.fold_in(jax.random.key(seed), 1), z_RxCxD.shape))
    for number in range(count):
        angle = 2 * np.pi * number / count
        codes = np.float32(np.cos(angle)) * z_RxCxD + np.float32(np.sin(angle)) * other_RxCxD
        yield np.concatenate([np.concatenate(list(make(state, z_CxD, truncation)), 1) for z_CxD in codes], 0)


def project(
    program: StyleGAN2Program,
    state: Any,
    picture: np.ndarray,
    steps: int,
    seed: int,
    report: Callable[[int, int], None],
) -> Projection:
    """Search w for a picture uint8 (side, side, 3) (Karras et al. 2020, 1912.04958, appendix D).

    The search starts at the mean of w and compares pixels and the features of `distances`, in place of LPIPS's. Noise
    in the layers is that of every sample. report: called with the steps done and to do.
    """
    target = pixels(jnp.asarray(picture[None]))
    kernels, last = distances.weights()
    target_features = distances.network(kernels, last, target)
    params, mean_D = state.average, state.w_mean
    keys = jax.random.split(jax.random.key(seed), 2)
    codes = generator.to_w(params, jax.random.normal(keys[0], (SPREAD_CODE_COUNT, len(mean_D))))
    spread = jnp.sqrt(jnp.square(codes - codes.mean(0, keepdims=True)).sum(-1).mean())
    rise = optax.linear_schedule(0.0, MAX_RATE, max(1, round(RISE_SHARE * steps)))
    fall = optax.cosine_decay_schedule(MAX_RATE, max(1, round(FALL_SHARE * steps)))
    adam = optax.adam(optax.join_schedules([rise, optax.constant_schedule(MAX_RATE), fall],
                                           [round(RISE_SHARE * steps), steps - round(FALL_SHARE * steps)]))  # fmt: skip

    def loss(w_D: jax.Array, noise_D: jax.Array) -> jax.Array:
        made = program.synthesize(params, (w_D + noise_D)[None])
        features = distances.network(kernels, last, made)
        return jnp.square(made - target).mean() + jnp.square(features - target_features).mean()

    @jax.jit
    def move(w_D: jax.Array, opt: Any, step: jax.Array) -> tuple[jax.Array, Any]:
        strength = NOISE_FACTOR * spread * jnp.square(jnp.maximum(0.0, 1 - step / (NOISY_SHARE * steps)))
        noise_D = strength * jax.random.normal(jax.random.fold_in(keys[1], step), w_D.shape)
        with jax.numpy_dtype_promotion("standard"):  # optax's updates break the strict rules
            updates, opt = adam.update(jax.grad(loss)(w_D, noise_D), opt, w_D)
        return w_D + updates, opt

    w_D = codes.mean(0)
    opt = adam.init(w_D)
    if w_D.sharding.is_fully_replicated:
        opt = jax.device_put(opt, w_D.sharding)  # a step leaves it there, so that `move` compiles only once
    for step in range(steps):
        w_D, opt = move(w_D, opt, jnp.float32(step))
        if step % REPORT_INTERVAL_STEPS == 0:
            jax.block_until_ready(w_D)
            report(step, steps)
    made = to_bytes(np.asarray(jax.jit(program.synthesize)(params, w_D[None])))[0]
    error = float(np.sqrt(np.square(made.astype(np.float64) - picture).mean()))
    return Projection(np.asarray(w_D), made, error)
