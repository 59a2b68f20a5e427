"""Read arrays between their elements: antialiased `interpolate` and `grid_sample`, with gradients."""

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.ndimage import map_coordinates

NEAREST_MODE, BICUBIC_MODE = 1, 2
REFLECTION_PADDING = 2
CUBIC, ANTIALIASED_CUBIC = -0.75, -0.5
"""torch's coefficients of cubic kernels."""


def _near_weight(distance: Any, a: float) -> Any:
    return ((a + 2) * distance - (a + 3)) * distance**2 + 1


def _far_weight(distance: Any, a: float) -> Any:
    return (((distance - 5) * distance + 8) * distance - 4) * a


def _linear_weight(distance: Any) -> Any:
    return np.maximum(1 - distance, 0)


def _cubic_weight(distance: Any) -> Any:
    near, far = _near_weight(distance, ANTIALIASED_CUBIC), _far_weight(distance, ANTIALIASED_CUBIC)
    return np.where(distance < 1, near, np.where(distance < 2, far, 0))


def _resize_antialiased(weight: Callable[[Any], Any], reach: int) -> Callable[..., Any]:
    """Return a resize in which every output element averages all elements that it covers.

    torch decomposes resizing without antialiasing.
    """

    def apply(x: Any, size: Any, align_corners: bool, *scales: float | None) -> Any:
        for axis, new, scale in zip((-2, -1), size, scales or (None, None), strict=True):
            old = x.shape[axis]
            step = 1 / scale if scale else old / new
            if align_corners:
                step = (old - 1) / (new - 1) if new > 1 else 0.0
            weights = np.zeros((new, old))
            for row in range(new):
                center, radius = step * (row + 0.5), reach * max(step, 1)
                low, high = max(int(center - radius + 0.5), 0), min(int(center + radius + 0.5), old)
                weights[row, low:high] = weight(np.abs(np.arange(low, high) - center + 0.5) / max(step, 1))
            weights /= weights.sum(1, keepdims=True)
            x = jnp.moveaxis(jnp.tensordot(x, jnp.asarray(weights, x.dtype), (axis, 1)), -1, axis)
        return x

    return apply


def _resize_backward(resize: Callable[..., Any]) -> Callable[..., Any]:
    def apply(gradient: Any, size: Any, shape: Sequence[int], *args: Any) -> Any:
        like = jax.ShapeDtypeStruct(tuple(shape), gradient.dtype)
        return jax.linear_transpose(lambda x: resize(x, size, *args), like)(gradient)[0]

    return apply


def _grid_sample(x: Any, grid: Any, mode: int, padding: int, align_corners: bool) -> Any:
    """Read x [N, C, …] at positions of -1 to 1: grid [N, …, rank], the last axis of x first."""
    sizes = x.shape[2:]
    positions = [_pixel_position(grid[..., -1 - axis], size, align_corners) for axis, size in enumerate(sizes)]

    def pad(positions: list[Any]) -> list[Any]:
        return [_padded(at, size, padding, align_corners) for at, size in zip(positions, sizes, strict=True)]

    def read(positions: list[Any], order: int) -> Any:  # zeros outside
        read_channel = partial(map_coordinates, order=order, mode="constant")
        return jax.vmap(lambda image, at: jax.vmap(lambda channel: read_channel(channel, at))(image))(x, positions)

    if mode != BICUBIC_MODE:
        return read(pad(positions), 0 if mode == NEAREST_MODE else 1)
    low = [jnp.floor(at) for at in positions]
    weights = [_cubic_taps(at - index) for at, index in zip(positions, low, strict=True)]
    total: Any = 0
    for steps in itertools.product(range(4), repeat=2):
        weight = math.prod(of_axis[step] for of_axis, step in zip(weights, steps, strict=True))
        neighbour = read(pad([index + step - 1 for index, step in zip(low, steps, strict=True)]), 0)
        total = total + neighbour * weight[:, None].astype(x.dtype)
    return total


def _grid_sample_backward(
    gradient: Any, x: Any, grid: Any, mode: int, padding: int, align_corners: bool,
    output_mask: Sequence[bool] = (True, True),
) -> Any:  # fmt: skip
    _, pullback = jax.vjp(lambda x, grid: _grid_sample(x, grid, mode, padding, align_corners), x, grid)
    return tuple(pullback(gradient.astype(x.dtype)))


def _pixel_position(at: Any, size: int, align_corners: bool) -> Any:
    return (at + 1) / 2 * (size - 1) if align_corners else ((at + 1) * size - 1) / 2


def _padded(at: Any, size: int, padding: int, align_corners: bool) -> Any:
    """Move positions outside to where the padding reads. On the border the derivative is that outside, as in torch."""
    if padding == REFLECTION_PADDING:
        low, span = (0.0, size - 1.0) if align_corners else (-0.5, float(size))
        if span == 0:
            return jnp.zeros_like(at)
        distance = jnp.where(at < low, low - at, at - low)
        turns = jnp.floor(distance / span)
        rest = distance - jax.lax.stop_gradient(turns) * span
        at = jnp.where(turns % 2 == 0, rest, span - rest) + low
    return jnp.where(at <= 0, 0.0, jnp.where(at >= size - 1, size - 1.0, at)) if padding else at


def _cubic_taps(t: Any) -> list[Any]:
    return [_far_weight(t + 1, CUBIC), _near_weight(t, CUBIC), _near_weight(1 - t, CUBIC), _far_weight(2 - t, CUBIC)]


RESIZES = {
    "_upsample_bilinear2d_aa": _resize_antialiased(_linear_weight, 1),
    "_upsample_bicubic2d_aa": _resize_antialiased(_cubic_weight, 2),
}
OPS: dict[str, Callable[..., Any]] = {
    **RESIZES,
    **{f"{name}_backward": _resize_backward(resize) for name, resize in RESIZES.items()},
    **{f"grid_sampler_{rank}d": _grid_sample for rank in (2, 3)},
    **{f"grid_sampler_{rank}d_backward": _grid_sample_backward for rank in (2, 3)},
}
