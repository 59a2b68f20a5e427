"""Pictures and volumes read at places between their elements: `grid_sample`, as spatial transformers use it."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

A = -0.75
"""Of the cubic that torch takes."""
ZEROS, BORDER, REFLECTION = range(3)
NEAREST, BICUBIC = 1, 2


def grid_sample(x: Any, grid: Any, mode: int, padding: int, align_corners: bool) -> Any:
    """[n, c, (d,) h, w] at [n, …, axes] places of -1 to 1, the last axis named first → [n, c, …].

    mode: 0 linear, 1 nearest, 2 bicubic; padding: 0 zeros, 1 border, 2 reflection.
    """
    sizes = x.shape[2:]
    places = [_unscaled(grid[..., -1 - axis], size, align_corners) for axis, size in enumerate(sizes)]
    if mode != BICUBIC:  # a bicubic's neighbours are padded one by one
        places = [_inside(at, size, padding, align_corners) for at, size in zip(places, sizes, strict=True)]
    if mode == NEAREST:
        return _read(x, [jnp.round(at) for at in places])
    low = [jnp.floor(at) for at in places]
    weights = [(_cubic if mode == BICUBIC else _linear)(at - floor) for at, floor in zip(places, low, strict=True)]
    total: Any = 0
    for steps in itertools.product(range(len(weights[0])), repeat=len(sizes)):
        near = [floor + step - (mode == BICUBIC) for floor, step in zip(low, steps, strict=True)]
        if mode == BICUBIC:
            near = [_inside(at, size, padding, align_corners) for at, size in zip(near, sizes, strict=True)]
        share: Any = 1.0
        for weight, step in zip(weights, steps, strict=True):
            share = share * weight[step]
        total = total + _read(x, near) * share[:, None].astype(x.dtype)
    return total


def grid_sample_backward(
    gradient: Any, x: Any, grid: Any, mode: int, padding: int, align_corners: bool,
    wanted: Sequence[bool] = (True, True),
) -> Any:  # fmt: skip
    """Of the picture and of the places."""
    _, pull = jax.vjp(lambda x, grid: grid_sample(x, grid, mode, padding, align_corners), x, grid)
    return tuple(pull(gradient.astype(x.dtype)))


def _unscaled(at: Any, size: int, align_corners: bool) -> Any:
    """From -1 to 1 to numbers of elements."""
    return (at + 1) / 2 * (size - 1) if align_corners else ((at + 1) * size - 1) / 2


def _inside(at: Any, size: int, padding: int, align_corners: bool) -> Any:
    """Places outside, where the padding has them. On the border the derivative is that outside, as in torch."""
    if padding == REFLECTION:
        low, span = (0.0, size - 1.0) if align_corners else (-0.5, float(size))
        if span == 0:
            return jnp.zeros_like(at)
        away = jnp.where(at < low, low - at, at - low)
        turns = jnp.floor(away / span)
        rest = away - jax.lax.stop_gradient(turns) * span
        at = jnp.where(turns % 2 == 0, rest, span - rest) + low
    return jnp.where(at <= 0, 0.0, jnp.where(at >= size - 1, size - 1.0, at)) if padding else at


def _linear(t: Any) -> list[Any]:
    """Of the two neighbours, by the distance from the lower one."""
    return [1 - t, t]


def _cubic(t: Any) -> list[Any]:
    """Of the four neighbours."""

    def near(distance: Any) -> Any:
        return ((A + 2) * distance - (A + 3)) * distance**2 + 1

    def far(distance: Any) -> Any:
        return ((distance - 5) * distance + 8) * distance * A - 4 * A

    return [far(t + 1), near(t), near(1 - t), far(2 - t)]


def _read(x: Any, places: Sequence[Any]) -> Any:
    """The elements at whole numbers; outside there are zeros."""
    n, channels, *sizes = x.shape
    there, at = jnp.ones(places[0].shape, bool), jnp.zeros(places[0].shape, jnp.int32)
    for place, size in zip(places, sizes, strict=True):
        there &= (place >= 0) & (place < size)
        at = at * size + jnp.clip(place, 0, size - 1).astype(jnp.int32)
    found = jnp.take_along_axis(x.reshape(n, channels, -1), at.reshape(n, 1, -1), axis=2)
    return jnp.where(there[:, None], found.reshape(n, channels, *at.shape[1:]), 0)


OPS: dict[str, Callable[..., Any]] = {
    "grid_sampler_2d": grid_sample,
    "grid_sampler_3d": grid_sample,
    "grid_sampler_2d_backward": grid_sample_backward,
    "grid_sampler_3d_backward": grid_sample_backward,
}
"""By name."""
