"""Pictures read at places between their pixels: `grid_sampler_2d`, as spatial transformers use it."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

A = -0.75
"""Of the cubic that torch takes."""


def grid_sample(x: Any, grid: Any, mode: int, padding: int, align_corners: bool) -> Any:
    """[n, c, h, w] at [n, y, x, 2] places of -1 to 1 → [n, c, y, x].

    mode: 0 bilinear, 1 nearest, 2 bicubic; padding: 0 zeros, 1 border, 2 reflection.
    """
    sizes = x.shape[3], x.shape[2]
    places = [_unscaled(grid[..., axis], size, align_corners) for axis, size in enumerate(sizes)]
    if mode != 2:  # a bicubic's neighbours are padded one by one
        places = [_inside(at, size, padding, align_corners) for at, size in zip(places, sizes, strict=True)]
    if mode == 1:
        return _read(x, jnp.round(places[0]), jnp.round(places[1]))
    steps, weight = (range(2), _near) if mode == 0 else (range(-1, 3), _cubic)
    low = [jnp.floor(at) for at in places]
    total: Any = 0
    for down in steps:
        for right in steps:
            near = [low[0] + right, low[1] + down]
            share = weight(jnp.abs(places[0] - near[0])) * weight(jnp.abs(places[1] - near[1]))
            if mode == 2:
                near = [_inside(at, size, padding, align_corners) for at, size in zip(near, sizes, strict=True)]
            total = total + _read(x, *near) * share[:, None].astype(x.dtype)
    return total


def _unscaled(at: Any, size: int, align_corners: bool) -> Any:
    """From -1 to 1 to numbers of pixels."""
    return (at + 1) / 2 * (size - 1) if align_corners else ((at + 1) * size - 1) / 2


def _inside(at: Any, size: int, padding: int, align_corners: bool) -> Any:
    """Places outside, where the padding has them."""
    if padding == 2:
        low, span = (0.0, size - 1.0) if align_corners else (-0.5, float(size))
        if span == 0:
            return jnp.zeros_like(at)
        away = jnp.abs(at - low)
        rest, turns = jnp.fmod(away, span), jnp.floor(away / span)
        at = jnp.where(turns % 2 == 0, rest, span - rest) + low
    return jnp.clip(at, 0, size - 1) if padding else at


def _near(distance: Any) -> Any:
    return 1 - distance


def _cubic(distance: Any) -> Any:
    near = ((A + 2) * distance - (A + 3)) * distance**2 + 1
    far = ((distance - 5) * distance + 8) * distance * A - 4 * A
    return jnp.where(distance <= 1, near, far)


def _read(x: Any, right: Any, down: Any) -> Any:
    """The pixels at whole numbers; outside there are zeros."""
    n, channels, height, width = x.shape
    there = (right >= 0) & (right < width) & (down >= 0) & (down < height)
    at = jnp.clip(down, 0, height - 1).astype(jnp.int32) * width + jnp.clip(right, 0, width - 1).astype(jnp.int32)
    flat = x.reshape(n, channels, height * width)
    found = jnp.take_along_axis(flat, at.reshape(n, 1, -1), axis=2).reshape(n, channels, *at.shape[1:])
    return jnp.where(there[:, None], found, 0)


OPS: dict[str, Callable[..., Any]] = {"grid_sampler_2d": grid_sample}
"""By name."""
