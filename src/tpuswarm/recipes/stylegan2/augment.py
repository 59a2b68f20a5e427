"""Adaptive augmentation of the pictures that the discriminator sees, real and generated.

Karras et al. 2020 (2006.06676), appendix B: pixel blitting, geometry and colour, the parts that it trains with. Each
change happens with probability `strength`, which follows how sure the discriminator is of the data.

Geometry is exact quarter turns, two shears and a scaling of both axes. A gather for each pixel, and its scatter in the
backward pass, would run one element at a time on a TPU. Here a shear rolls the whole array by powers of two, which each
row applies or not, and a scaling is a matrix per picture. Outside its edges a picture is mirrored. Coordinates are
(x, y) in pixels from the middle.
"""

import jax
import jax.numpy as jnp

TARGET_SIGN = 0.6
"""Target mean sign of the scores of real pictures; above it the discriminator has memorised them."""
ADJUST_INTERVAL_STEPS = 4
RAMP_PICTURES = 500_000
"""Pictures in which the strength can rise from 0 to 1."""
TRANSLATION_SHARE = 0.125
"""Share of a side: the largest whole-pixel translation, and the deviation of the fractional one."""
LOG2_SCALE_DEVIATION = 0.2


def adjusted(strength: jax.Array, sign: jax.Array, pictures: int) -> jax.Array:
    """Return the strength after `pictures` more, whose scores have this mean sign."""
    return jnp.clip(strength + jnp.sign(sign - TARGET_SIGN) * (pictures / RAMP_PICTURES), 0.0, 1.0)


def augment(x_BxHxWx3: jax.Array, key: jax.Array, strength: jax.Array, half: bool = False) -> jax.Array:
    """Change each picture at random; differentiable by the pictures. half: multiply in bfloat16."""
    B = len(x_BxHxWx3)
    keys = jax.random.split(key, 2)
    # One draw for all changes: each draw compiles to hundreds of operations, at four places of a step.
    uniform_21xB = jax.random.uniform(keys[0], (21, B))
    normal_7xB = jax.random.normal(keys[1], (7, B))
    rotated = 1 - jnp.sqrt(1 - strength)  # of one rotation, so that one of the two happens with probability `strength`
    bound_13 = jnp.array([1.0, 1, 1, 1, 0, 1, 0, 1, 1, 1, 1, 1, 1])
    bound_13 = bound_13 * strength + (1 - bound_13) * rotated
    chosen_13xB = uniform_21xB[:13] < bound_13[:, None]
    x_BxHxWx3 = _change_geometry(x_BxHxWx3, chosen_13xB[:8], uniform_21xB[13:19], normal_7xB[:4], half)
    return _change_colours(x_BxHxWx3, chosen_13xB[8:], uniform_21xB[19:], normal_7xB[4:])


def _change_geometry(
    x: jax.Array, chosen_8xB: jax.Array, uniform_6xB: jax.Array, normal_4xB: jax.Array, half: bool
) -> jax.Array:
    # a flip, quarter turns and a whole-pixel translation; two scalings between two rotations; a translation
    side = x.shape[1]
    flip, turn, whole, scale, before, stretch, after, part = chosen_8xB
    flip_B = flip & (uniform_6xB[0] < 0.5)
    x = jnp.where(flip_B[:, None, None, None], x[:, :, ::-1], x)
    x = turned(x, jnp.where(turn, (uniform_6xB[1] * 4).astype(jnp.int32), 0))
    whole_Bx2 = jnp.where(whole, jnp.round((2 * uniform_6xB[2:4] - 1) * (TRANSLATION_SHARE * side)), 0.0).T
    scale_B = jnp.where(scale, 2 ** (LOG2_SCALE_DEVIATION * normal_4xB[0]), 1.0)
    stretch_B = jnp.where(stretch, 2 ** (LOG2_SCALE_DEVIATION * normal_4xB[1]), 1.0)
    before_B, after_B = (
        jnp.where(chosen, (2 * uniform - 1) * jnp.pi, 0.0)
        for chosen, uniform in zip((before, after), uniform_6xB[4:], strict=True)
    )
    part_Bx2 = jnp.where(part, TRANSLATION_SHARE * side * normal_4xB[2:], 0.0).T
    # the source of each pixel q: the changes undone, the last one first
    sizes_Bx2x1 = jnp.stack([1 / (scale_B * stretch_B), stretch_B / scale_B], -1)[..., None]
    inverse_Bx2x2 = product(rotation(-before_B), sizes_Bx2x1 * rotation(-after_B))
    return warped(x, inverse_Bx2x2, -product(inverse_Bx2x2, part_Bx2[..., None])[..., 0] - whole_Bx2, half)


def _change_colours(x: jax.Array, chosen_5xB: jax.Array, uniform_2xB: jax.Array, normal_3xB: jax.Array) -> jax.Array:
    # brightness, contrast, luma flip, hue and saturation: one affine map of each picture's colours
    brightness_B = jnp.where(chosen_5xB[0], 0.2 * normal_3xB[0], 0.0)
    contrast_B = jnp.where(chosen_5xB[1], 2 ** (0.5 * normal_3xB[1]), 1.0)
    luma_B = jnp.where(chosen_5xB[2] & (uniform_2xB[0] < 0.5), -1.0, 1.0)
    hue_B = jnp.where(chosen_5xB[3], (2 * uniform_2xB[1] - 1) * jnp.pi, 0.0)
    saturation_B = jnp.where(chosen_5xB[4], 2 ** normal_3xB[2], 1.0)
    grey_3x3 = jnp.full((3, 3), 1 / 3)  # onto the axis of luma, (1, 1, 1)
    colour_3x3 = jnp.eye(3) - grey_3x3
    turn_3x3 = jnp.array([[0.0, -1.0, 1.0], [1.0, 0.0, -1.0], [-1.0, 1.0, 0.0]]) * 3**-0.5  # a quarter around it
    in_plane = jnp.cos(hue_B)[:, None, None] * colour_3x3[None] + jnp.sin(hue_B)[:, None, None] * turn_3x3[None]
    map_Bx3x3 = luma_B[:, None, None] * grey_3x3[None] + saturation_B[:, None, None] * in_plane
    shifted = (x + brightness_B[:, None, None, None]) * contrast_B[:, None, None, None]
    parts = (shifted[..., c : c + 1] * map_Bx3x3[:, None, None, :, c] for c in range(3))
    return sum(parts, start=jnp.zeros((), x.dtype))  # a matrix product of three channels would idle the matrix unit


def rotation(angle_B: jax.Array) -> jax.Array:
    """Return matrices R_Bx2x2 that turn x towards y."""
    c, s = jnp.cos(angle_B), jnp.sin(angle_B)
    return jnp.stack([jnp.stack([c, -s], -1), jnp.stack([s, c], -1)], -2)


def product(a_Bx2x2: jax.Array, b_Bx2xN: jax.Array) -> jax.Array:
    """Multiply small matrices by sums, so that no matrix unit rounds them."""
    return (a_Bx2x2[..., None] * b_Bx2xN[:, None]).sum(2)


def turned(x_BxHxWxC: jax.Array, turns_B: jax.Array) -> jax.Array:
    """Turn square pictures by quarters, exactly: pixel q shows the one at q turned by `turns` quarters."""
    x = _where(turns_B % 2 == 1, jnp.rot90(x_BxHxWxC, 1, (1, 2)), x_BxHxWxC)
    return _where(turns_B % 4 >= 2, x[:, ::-1, ::-1], x)


def warped(x_BxHxWxC: jax.Array, map_Bx2x2: jax.Array, shift_Bx2: jax.Array, half: bool = False) -> jax.Array:
    """Move square pictures: pixel q shows the one at `map q + shift`, interpolated linearly.

    Exact for the identity with whole shifts, and as good near any quarter turn. A strong stretch turned by almost 45
    degrees makes wrong corners: the second shear moves them by over half a side. Differentiable by the pictures. half:
    multiply in bfloat16.
    """
    side = x_BxHxWxC.shape[1]
    a, b, c, d = (map_Bx2x2[:, row, column] for row in (0, 1) for column in (0, 1))
    turns_B = jnp.round(jnp.arctan2(c - b, a + d) / (jnp.pi / 2)).astype(jnp.int32)
    back_Bx2x2 = rotation(-turns_B.astype(jnp.float32) * (jnp.pi / 2))
    map_Bx2x2 = jnp.where((turns_B == 0)[:, None, None], map_Bx2x2, product(back_Bx2x2, map_Bx2x2))
    shift_Bx2 = jnp.where((turns_B == 0)[:, None], shift_Bx2, product(back_Bx2x2, shift_Bx2[..., None])[..., 0])
    # the rest is (1 u; 0 1) (p 0; 0 d) (1 0; l 1)
    a, b, c, d = (map_Bx2x2[:, row, column] for row in (0, 1) for column in (0, 1))
    upper_B, lower_B, across_B = b / d, c / d, a - b * c / d
    from_x_B, from_y_B = shift_Bx2[:, 0] - upper_B * shift_Bx2[:, 1], shift_Bx2[:, 1]
    edge, dtype = side // 2, jnp.bfloat16 if half else x_BxHxWxC.dtype
    # twice the size and mirrored, it is periodic: pixels rolled out on one side come in on the other
    wide = jnp.pad(turned(x_BxHxWxC, turns_B), ((0, 0), (edge, edge), (edge, edge), (0, 0)), mode="symmetric")
    wide = _sheared(wide, upper_B)
    across_BxPxS = _scaling(across_B, from_x_B, side, 2 * side).astype(dtype)
    down_BxPxS = _scaling(d, from_y_B, 2 * side, 2 * side).astype(dtype)
    wide = jnp.einsum("bji,byic->byjc", across_BxPxS, wide.astype(dtype))
    wide = jnp.einsum("bji,bixc->bjxc", down_BxPxS, wide).astype(x_BxHxWxC.dtype)
    return _sheared(wide.swapaxes(1, 2), lower_B).swapaxes(1, 2)[:, edge : edge + side]


def _sheared(x_BxHxWxC: jax.Array, slope_B: jax.Array) -> jax.Array:
    # moves each row by `slope` times its distance from the middle, around the edges
    move_BxH = slope_B[:, None] * _offsets(x_BxHxWxC.shape[1])[None]
    whole_BxH = jnp.floor(move_BxH)
    x_BxHxWxC = _rolled(x_BxHxWxC, whole_BxH.astype(jnp.int32))
    share = (move_BxH - whole_BxH)[..., None, None].astype(x_BxHxWxC.dtype)
    return x_BxHxWxC + share * (jnp.roll(x_BxHxWxC, -1, 2) - x_BxHxWxC)


@jax.custom_vjp
def _rolled(x_BxHxWxC: jax.Array, pixels_BxH: jax.Array) -> jax.Array:
    W = x_BxHxWxC.shape[2]
    for power in range(W.bit_length() - 1):
        moved = jnp.roll(x_BxHxWxC, -(1 << power), 2)
        x_BxHxWxC = jnp.where((pixels_BxH % W >> power & 1 == 1)[..., None, None], moved, x_BxHxWxC)
    return x_BxHxWxC


def _rolled_forward(x_BxHxWxC: jax.Array, pixels_BxH: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _rolled(x_BxHxWxC, pixels_BxH), pixels_BxH


def _rolled_backward(pixels_BxH: jax.Array, grad_BxHxWxC: jax.Array) -> tuple[jax.Array, None]:
    return _rolled(grad_BxHxWxC, -pixels_BxH), None


_rolled.defvjp(_rolled_forward, _rolled_backward)


def _scaling(scale_B: jax.Array, shift_B: jax.Array, places: int, size: int) -> jax.Array:
    """Weights M_BxPxS of `places` outputs over a periodic axis of `size`: a triangle as wide as the picture shrinks."""
    source_BxP = scale_B[:, None] * _offsets(places)[None] + shift_B[:, None]
    distance_BxPxS = (source_BxP[..., None] - _offsets(size)[None, None] + size / 2) % size - size / 2
    weight_BxPxS = jnp.maximum(0.0, 1 - jnp.abs(distance_BxPxS) / jnp.maximum(1.0, jnp.abs(scale_B))[:, None, None])
    return weight_BxPxS / weight_BxPxS.sum(-1, keepdims=True)


def _offsets(count: int) -> jax.Array:
    return jnp.arange(count, dtype=jnp.float32) - (count - 1) / 2


def _where(mask_B: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
    return jnp.where(mask_B[:, None, None, None], new, old)
