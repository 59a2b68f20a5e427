"""Losses and regularisers of both networks, as functions of the network alone."""

from collections.abc import Callable

import jax
import jax.numpy as jnp


def real(score_B: jax.Array) -> jax.Array:
    """Logistic loss of scores that should say `real` (Goodfellow et al. 2014, the non-saturating form)."""
    return jax.nn.softplus(-score_B).mean()


def fake(score_B: jax.Array) -> jax.Array:
    """Logistic loss of scores that should say `made`."""
    return jax.nn.softplus(score_B).mean()


def r1(score: Callable[[jax.Array], jax.Array], x_BxHxWx3: jax.Array) -> jax.Array:
    """Mean squared gradient of the scores by the real pictures (Mescheder et al. 2018, 1801.04406, equation 9)."""
    slope = jax.grad(lambda x: score(x).sum())(x_BxHxWx3)
    return jnp.square(slope).sum((1, 2, 3)).mean()


def path_lengths(
    synthesize: Callable[[jax.Array], jax.Array], w_BxLxD: jax.Array, noise_BxHxWx3: jax.Array
) -> jax.Array:
    """Length_B of the step of a random picture by w: |J_w^T y| (Karras et al. 2020, section 3.2), a mean over layers.

    The random picture is divided by the root of its pixels, so that a length does not depend on the resolution.
    """
    _, H, W, _ = noise_BxHxWx3.shape
    slope_BxLxD = jax.grad(lambda w: (synthesize(w) * noise_BxHxWx3).sum() * (H * W) ** -0.5)(w_BxLxD)
    return jnp.sqrt(jnp.square(slope_BxLxD).sum(-1).mean(-1) + 1e-12)
