"""Affine maps of pictures, each by a map of its own, as exact turns, two shears and a scaling of both axes.

Whoever looks up each pixel's place gathers, and scatters in the backward pass: a TPU does that one element after the
other. Here a row moves by rolling the whole array by powers of two, of which each row takes those that it needs, and an
axis is scaled by a matrix of each picture's own. What lies outside a picture is its mirror image.

Coordinates are (x, y) in pixels from the middle of the picture.
"""

import jax
import jax.numpy as jnp


def rotation(angle_B: jax.Array) -> jax.Array:
    """Matrices R_Bx2x2 that turn x towards y."""
    c, s = jnp.cos(angle_B), jnp.sin(angle_B)
    return jnp.stack([jnp.stack([c, -s], -1), jnp.stack([s, c], -1)], -2)


def product(a_Bx2x2: jax.Array, b_Bx2xN: jax.Array) -> jax.Array:
    """Of small matrices, by sums: no matrix unit rounds them."""
    return (a_Bx2x2[..., None] * b_Bx2xN[:, None]).sum(2)


def turned(x_BxHxWxC: jax.Array, turns_B: jax.Array) -> jax.Array:
    """Square pictures, of which each pixel q shows what was at q turned by `turns` quarters; exact."""
    x = _where(turns_B % 2 == 1, jnp.rot90(x_BxHxWxC, 1, (1, 2)), x_BxHxWxC)
    return _where(turns_B % 4 >= 2, x[:, ::-1, ::-1], x)


def warped(x_BxHxWxC: jax.Array, map_Bx2x2: jax.Array, shift_Bx2: jax.Array, half: bool = False) -> jax.Array:
    """Square pictures, of which each pixel q shows what was at `map q + shift`, interpolated linearly.

    A map near a rotation by a multiple of 90 degrees is as good as one near the identity. With the identity and whole
    shifts nothing is interpolated. Corners that the second shear moves by more than half a side are wrong: that takes a
    strong stretch, turned by almost 45 degrees. Differentiable by the pictures. half: products of bfloat16.
    """
    side = x_BxHxWxC.shape[1]
    a, b, c, d = (map_Bx2x2[:, row, column] for row in (0, 1) for column in (0, 1))
    turns_B = jnp.round(jnp.arctan2(c - b, a + d) / (jnp.pi / 2)).astype(jnp.int32)
    back_Bx2x2 = rotation(-turns_B.astype(jnp.float32) * (jnp.pi / 2))
    map_Bx2x2 = jnp.where((turns_B == 0)[:, None, None], map_Bx2x2, product(back_Bx2x2, map_Bx2x2))
    shift_Bx2 = jnp.where((turns_B == 0)[:, None], shift_Bx2, product(back_Bx2x2, shift_Bx2[..., None])[..., 0])
    # what is left is (1 u; 0 1) (p 0; 0 d) (1 0; l 1)
    a, b, c, d = (map_Bx2x2[:, row, column] for row in (0, 1) for column in (0, 1))
    upper_B, lower_B, across_B = b / d, c / d, a - b * c / d
    from_x_B, from_y_B = shift_Bx2[:, 0] - upper_B * shift_Bx2[:, 1], shift_Bx2[:, 1]
    edge, dtype = side // 2, jnp.bfloat16 if half else x_BxHxWxC.dtype
    # twice the size, mirrored, it repeats itself: what is rolled out on one side comes in on the other
    wide = jnp.pad(turned(x_BxHxWxC, turns_B), ((0, 0), (edge, edge), (edge, edge), (0, 0)), mode="symmetric")
    wide = _sheared(wide, upper_B)
    across_BxPxS = _scaling(across_B, from_x_B, side, 2 * side).astype(dtype)
    down_BxPxS = _scaling(d, from_y_B, 2 * side, 2 * side).astype(dtype)
    wide = jnp.einsum("bji,byic->byjc", across_BxPxS, wide.astype(dtype))
    wide = jnp.einsum("bji,bixc->bjxc", down_BxPxS, wide).astype(x_BxHxWxC.dtype)
    return _sheared(wide.swapaxes(1, 2), lower_B).swapaxes(1, 2)[:, edge : edge + side]


def _sheared(x_BxHxWxC: jax.Array, slope_B: jax.Array) -> jax.Array:
    """Each row moved by `slope` times its distance from the middle; what goes out comes in on the other side."""
    move_BxH = slope_B[:, None] * _places(x_BxHxWxC.shape[1])[None]
    whole_BxH = jnp.floor(move_BxH)
    x_BxHxWxC = _rolled(x_BxHxWxC, whole_BxH.astype(jnp.int32))
    share = (move_BxH - whole_BxH)[..., None, None].astype(x_BxHxWxC.dtype)
    return x_BxHxWxC + share * (jnp.roll(x_BxHxWxC, -1, 2) - x_BxHxWxC)


@jax.custom_vjp
def _rolled(x_BxHxWxC: jax.Array, by_BxH: jax.Array) -> jax.Array:
    """Each row rolled to the left by pixels of its own."""
    W = x_BxHxWxC.shape[2]
    for power in range(W.bit_length() - 1):
        moved = jnp.roll(x_BxHxWxC, -(1 << power), 2)
        x_BxHxWxC = jnp.where((by_BxH % W >> power & 1 == 1)[..., None, None], moved, x_BxHxWxC)
    return x_BxHxWxC


def _rolled_forward(x_BxHxWxC: jax.Array, by_BxH: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _rolled(x_BxHxWxC, by_BxH), by_BxH


def _rolled_backward(by_BxH: jax.Array, grad_BxHxWxC: jax.Array) -> tuple[jax.Array, None]:
    return _rolled(grad_BxHxWxC, -by_BxH), None


_rolled.defvjp(_rolled_forward, _rolled_backward)


def _scaling(scale_B: jax.Array, shift_B: jax.Array, places: int, size: int) -> jax.Array:
    """Weights M_BxPxS by which each of `places` is made of an axis of `size` that repeats itself.

    A triangle, which is as wide as the picture shrinks.
    """
    at_BxP = scale_B[:, None] * _places(places)[None] + shift_B[:, None]
    apart_BxPxS = (at_BxP[..., None] - _places(size)[None, None] + size / 2) % size - size / 2
    weight_BxPxS = jnp.maximum(0.0, 1 - jnp.abs(apart_BxPxS) / jnp.maximum(1.0, jnp.abs(scale_B))[:, None, None])
    return weight_BxPxS / weight_BxPxS.sum(-1, keepdims=True)


def _places(count: int) -> jax.Array:
    """Pixels from the middle."""
    return jnp.arange(count, dtype=jnp.float32) - (count - 1) / 2


def _where(mask_B: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
    return jnp.where(mask_B[:, None, None, None], new, old)
