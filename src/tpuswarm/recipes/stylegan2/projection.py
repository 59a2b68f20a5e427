"""The latent code of a given picture (Karras et al. 2020, 1912.04958, appendix D)."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tpuswarm.recipes.stylegan2 import features, generator
from tpuswarm.recipes.stylegan2.making import to_bytes
from tpuswarm.recipes.stylegan2.program import StyleGAN2Program, pixels

CODES = 1_000
"""Of which the spread of w is taken."""
RATE, RISE, FALL = 0.1, 0.05, 0.25
"""Of Adam; the first share of the steps over which it rises, the last over which it falls."""
NOISE, QUIET = 0.05, 0.75
"""On each number of w: times the root of E|w - mean|^2 at the start, none after this share of the steps."""
TOLD = 10
"""Steps between two looks at how far it is."""


class Projection(NamedTuple):
    """A code, and what is made of it."""

    w: np.ndarray
    """float32 (latent,)."""
    picture: np.ndarray
    """uint8 (side, side, 3)."""
    error: float
    """Root of the mean squared difference of the pixels, 0 to 255."""

    def beside(self, given: np.ndarray) -> np.ndarray:
        """What was given, and what is made of it: uint8 (side, 2 side, 3)."""
        return np.concatenate([given, self.picture], 1)


def project(
    program: StyleGAN2Program,
    state: Any,
    picture: np.ndarray,
    steps: int,
    seed: int,
    far: Callable[[int, int], None],
) -> Projection:
    """Search w from its mean on, by pixels and by the features of the fixed network in the place of LPIPS's.

    picture: uint8 (side, side, 3). The layers' noise stays that of every sample.
    """
    target = pixels(jnp.asarray(picture[None]))
    kernels, last = features.weights()
    wanted = features.project(kernels, last, target)
    params, mean_D = state.average, state.w_mean
    keys = jax.random.split(jax.random.key(seed), 2)
    codes = generator.to_w(params, jax.random.normal(keys[0], (CODES, len(mean_D))))
    spread = jnp.sqrt(jnp.square(codes - codes.mean(0, keepdims=True)).sum(-1).mean())
    rise = optax.linear_schedule(0.0, RATE, max(1, round(RISE * steps)))
    fall = optax.cosine_decay_schedule(RATE, max(1, round(FALL * steps)))
    adam = optax.adam(optax.join_schedules([rise, optax.constant_schedule(RATE), fall],
                                           [round(RISE * steps), steps - round(FALL * steps)]))  # fmt: skip

    def loss(w_D: jax.Array, noise_D: jax.Array) -> jax.Array:
        made = program.synthesize(params, (w_D + noise_D)[None])
        seen = features.project(kernels, last, made)
        return jnp.square(made - target).mean() + jnp.square(seen - wanted).mean()

    @jax.jit
    def move(w_D: jax.Array, opt: Any, step: jax.Array) -> tuple[jax.Array, Any]:
        strength = NOISE * spread * jnp.square(jnp.maximum(0.0, 1 - step / (QUIET * steps)))
        noise_D = strength * jax.random.normal(jax.random.fold_in(keys[1], step), w_D.shape)
        with jax.numpy_dtype_promotion("standard"):  # optax's updates do not pass the strict rules
            updates, opt = adam.update(jax.grad(loss)(w_D, noise_D), opt, w_D)
        return w_D + updates, opt

    w_D = codes.mean(0)
    opt = adam.init(w_D)
    if w_D.sharding.is_fully_replicated:
        opt = jax.device_put(opt, w_D.sharding)  # where a step leaves it, so that `move` compiles only once
    for step in range(steps):
        w_D, opt = move(w_D, opt, jnp.float32(step))
        if step % TOLD == 0:
            jax.block_until_ready(w_D)
            far(step, steps)
    made = to_bytes(np.asarray(jax.jit(program.synthesize)(params, w_D[None])))[0]
    error = float(np.sqrt(np.square(made.astype(np.float64) - picture).mean()))
    return Projection(np.asarray(w_D), made, error)
