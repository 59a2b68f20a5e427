"""Adaptive augmentation: what both networks' pictures go through on their way into the discriminator.

Karras et al. 2020 (2006.06676), appendix B: of its pipeline pixel blitting, geometry and colour, which it trains with;
each change with the probability `strength`, which follows how sure the discriminator is of the data.
"""

import jax
import jax.numpy as jnp

from tpuswarm.recipes.stylegan2.warp import product, rotation, turned, warped

TARGET = 0.6
"""Mean sign of the scores of real pictures that is aimed at: with more, the discriminator knows them by heart."""
EVERY = 4
"""Steps between two adjustments of the strength."""
WHOLE = 500_000
"""Pictures in which the strength can go from 0 to 1."""
SHIFT = 0.125
"""Of a side: the largest translation by whole pixels, and the deviation of the one by parts of them."""
SCALE = 0.2
"""Deviation of the logarithm, to base 2, of both scalings."""


def adjusted(strength: jax.Array, sign: jax.Array, pictures: int) -> jax.Array:
    """The strength after `pictures` more, of whose scores `sign` is the mean sign."""
    return jnp.clip(strength + jnp.sign(sign - TARGET) * (pictures / WHOLE), 0.0, 1.0)


def augment(x_BxHxWx3: jax.Array, key: jax.Array, strength: jax.Array, half: bool = False) -> jax.Array:
    """Pictures of the same shape, each changed in ways of its own; differentiable by the pictures.

    half: products of bfloat16.
    """
    B = len(x_BxHxWx3)
    keys = jax.random.split(key, 2)
    # Drawn at once: every draw of its own is hundreds of operations to compile, at four places of a step.
    chance_21xB = jax.random.uniform(keys[0], (21, B))
    normal_7xB = jax.random.normal(keys[1], (7, B))
    rotated = 1 - jnp.sqrt(1 - strength)  # each of two, so that one of them happens with the strength
    bound_13 = jnp.array([1.0, 1, 1, 1, 0, 1, 0, 1, 1, 1, 1, 1, 1])
    bound_13 = bound_13 * strength + (1 - bound_13) * rotated
    chosen_13xB = chance_21xB[:13] < bound_13[:, None]
    x_BxHxWx3 = _moved(x_BxHxWx3, chosen_13xB[:8], chance_21xB[13:19], normal_7xB[:4], half)
    return _coloured(x_BxHxWx3, chosen_13xB[8:], chance_21xB[19:], normal_7xB[4:])


def _moved(x: jax.Array, chosen_8xB: jax.Array, chance_6xB: jax.Array, normal_4xB: jax.Array, half: bool) -> jax.Array:
    """A flip, quarter turns and a translation by whole pixels; two scalings between two rotations, a translation."""
    side = x.shape[1]
    flip, turn, whole, scale, before, stretch, after, part = chosen_8xB
    flip_B = flip & (chance_6xB[0] < 0.5)
    x = jnp.where(flip_B[:, None, None, None], x[:, :, ::-1], x)
    x = turned(x, jnp.where(turn, (chance_6xB[1] * 4).astype(jnp.int32), 0))
    whole_Bx2 = jnp.where(whole, jnp.round((2 * chance_6xB[2:4] - 1) * (SHIFT * side)), 0.0).T
    scale_B = jnp.where(scale, 2 ** (SCALE * normal_4xB[0]), 1.0)
    stretch_B = jnp.where(stretch, 2 ** (SCALE * normal_4xB[1]), 1.0)
    before_B, after_B = (
        jnp.where(each, (2 * chance - 1) * jnp.pi, 0.0)
        for each, chance in zip((before, after), chance_6xB[4:], strict=True)
    )
    part_Bx2 = jnp.where(part, SHIFT * side * normal_4xB[2:], 0.0).T
    # where each pixel q comes from: the changes undone, the last one first
    sizes_Bx2x1 = jnp.stack([1 / (scale_B * stretch_B), stretch_B / scale_B], -1)[..., None]
    back_Bx2x2 = product(rotation(-before_B), sizes_Bx2x1 * rotation(-after_B))
    return warped(x, back_Bx2x2, -product(back_Bx2x2, part_Bx2[..., None])[..., 0] - whole_Bx2, half)


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
    shifted = (x + brightness_B[:, None, None, None]) * contrast_B[:, None, None, None]
    parts = (shifted[..., c : c + 1] * map_Bx3x3[:, None, None, :, c] for c in range(3))
    return sum(parts, start=jnp.zeros((), x.dtype))  # no product: three channels would leave a matrix unit empty
