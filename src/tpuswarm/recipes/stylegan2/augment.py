"""Adaptive augmentation: what both networks' pictures go through on their way into the discriminator.

Karras et al. 2020 (2006.06676), appendix B: of its pipeline pixel blitting (flips, quarter turns, translations by whole
pixels) and colour, which it finds to help most; each with the probability `strength`, which follows how sure the
discriminator is of the data.
"""

import jax
import jax.numpy as jnp

TARGET = 0.6
"""Mean sign of the scores of real pictures that is aimed at: with more, the discriminator knows them by heart."""
EVERY = 4
"""Steps between two adjustments of the strength."""
WHOLE = 500_000
"""Pictures in which the strength can go from 0 to 1."""
SHIFT = 8
"""The largest translation is one part in this of a side."""


def adjusted(strength: jax.Array, sign: jax.Array, pictures: int) -> jax.Array:
    """The strength after `pictures` more, of whose scores `sign` is the mean sign."""
    return jnp.clip(strength + jnp.sign(sign - TARGET) * (pictures / WHOLE), 0.0, 1.0)


def augment(x_BxHxWx3: jax.Array, key: jax.Array, strength: jax.Array) -> jax.Array:
    """Pictures of the same shape, each changed in ways of its own; differentiable by the pictures."""
    B = len(x_BxHxWx3)
    keys = jax.random.split(key, 2)
    # Drawn at once: every draw of its own is hundreds of operations to compile, at four places of a step.
    chance_14xB = jax.random.uniform(keys[0], (14, B))
    normal_3xB = jax.random.normal(keys[1], (3, B))
    chosen_8xB = chance_14xB[:8] < strength
    x_BxHxWx3 = _moved(x_BxHxWx3, chosen_8xB[:3], chance_14xB[8:12])
    return _coloured(x_BxHxWx3, chosen_8xB[3:], chance_14xB[12:], normal_3xB)


def _moved(x: jax.Array, chosen_3xB: jax.Array, chance_4xB: jax.Array) -> jax.Array:
    """A flip, quarter turns, a translation into reflected edges."""
    _, H, W, _ = x.shape
    most = H // SHIFT
    flip_B = chosen_3xB[0] & (chance_4xB[0] < 0.5)
    turns_B = jnp.where(chosen_3xB[1], (chance_4xB[1] * 4).astype(jnp.int32), 0)
    shift_2xB = (chance_4xB[2:] * (2 * most + 1)).astype(jnp.int32)
    start_2xB = jnp.where(chosen_3xB[2][None], shift_2xB, most)

    def where(mask_B: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
        return jnp.where(mask_B[:, None, None, None], new, old)

    x = where(flip_B, x[:, :, ::-1], x)
    x = where(turns_B % 2 == 1, jnp.rot90(x, 1, (1, 2)), x)
    x = where(turns_B >= 2, x[:, ::-1, ::-1], x)
    wide = jnp.pad(x, ((0, 0), (most, most), (most, most), (0, 0)), mode="reflect")

    def cut(picture: jax.Array, row: jax.Array, column: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice(picture, (row, column, jnp.int32(0)), (H, W, 3))

    return jax.vmap(cut)(wide, *start_2xB)


def _coloured(x: jax.Array, chosen_5xB: jax.Array, chance_2xB: jax.Array, normal_3xB: jax.Array) -> jax.Array:
    """Brightness, contrast, luma flip, hue and saturation as one affine map of the colours of each picture."""
    brightness_B = jnp.where(chosen_5xB[0], 0.2 * normal_3xB[0], 0.0)
    contrast_B = jnp.where(chosen_5xB[1], 2 ** (0.5 * normal_3xB[1]), 1.0)
    luma_B = jnp.where(chosen_5xB[2] & (chance_2xB[0] < 0.5), -1.0, 1.0)
    hue_B = jnp.where(chosen_5xB[3], (2 * chance_2xB[1] - 1) * jnp.pi, 0.0)
    saturation_B = jnp.where(chosen_5xB[4], 2 ** normal_3xB[2], 1.0)
    grey_3x3 = jnp.full((3, 3), 1 / 3)  # onto the axis of luma, (1, 1, 1)
    across_3x3 = jnp.eye(3) - grey_3x3
    turn_3x3 = jnp.array([[0.0, -1.0, 1.0], [1.0, 0.0, -1.0], [-1.0, 1.0, 0.0]]) * 3**-0.5  # a quarter around it
    in_plane = jnp.cos(hue_B)[:, None, None] * across_3x3[None] + jnp.sin(hue_B)[:, None, None] * turn_3x3[None]
    map_Bx3x3 = luma_B[:, None, None] * grey_3x3[None] + saturation_B[:, None, None] * in_plane
    shifted = x * contrast_B[:, None, None, None] + brightness_B[:, None, None, None]
    return jnp.einsum("bhwc,bdc->bhwd", shifted, map_Bx3x3)
