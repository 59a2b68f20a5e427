"""What draws numbers: from JAX's keys, so that a run can be repeated bit by bit; never torch's numbers."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tpuswarm.errors import InputError
from tpuswarm.torch.graph import Dtype
from tpuswarm.torch.ops.dtypes import jax_dtype


def _key(key: jax.Array | None) -> jax.Array:
    if key is None:
        raise InputError("the module draws random numbers in evaluation too: draw them in training alone")
    return key


def dropout(key: jax.Array | None, x: Any, p: float, train: bool | None = True) -> Any:
    """What stays, and where it stays; without a key all of it, and the mask, of floats, says so."""
    if not train or p == 0 or key is None:
        return x, jnp.ones(x.shape)
    keep = jax.random.bernoulli(key, 1 - p, x.shape)
    return jnp.where(keep, x / (1 - p), 0).astype(x.dtype), keep


def bernoulli(key: jax.Array | None, x: Any, p: float | None = None) -> Any:
    """Ones and zeros, with the probabilities in x or with one for all."""
    return jax.random.bernoulli(_key(key), x if p is None else p, x.shape).astype(x.dtype)


def _like(draw: Callable[..., Any]) -> Callable[..., Any]:
    def apply(key: jax.Array | None, x: Any, *, dtype: Dtype | None = None) -> Any:
        return draw(_key(key), x.shape, jax_dtype(dtype, x.dtype))

    return apply


def _new(draw: Callable[..., Any]) -> Callable[..., Any]:
    def apply(key: jax.Array | None, size: Sequence[int], *, dtype: Dtype | None = None) -> Any:
        return draw(_key(key), tuple(size), jax_dtype(dtype, jnp.float32))

    return apply


def randint_like(
    key: jax.Array | None, x: Any, low: int, high: int | None = None, *, dtype: Dtype | None = None
) -> Any:  # fmt: skip
    """Whole numbers below a bound, or between two."""
    low, high = (0, low) if high is None else (low, high)
    return jax.random.randint(_key(key), x.shape, low, high).astype(jax_dtype(dtype, x.dtype))


def randint(key: jax.Array | None, *given: Any, dtype: Dtype | None = None) -> Any:
    """The same in a shape."""
    *bounds, size = given
    low, high = bounds if len(bounds) == 2 else (0, bounds[0])
    return jax.random.randint(_key(key), tuple(size), low, high).astype(jax_dtype(dtype, jnp.int32))


def normal(
    key: jax.Array | None, mean: Any, std: Any = 1.0, size: Sequence[int] | None = None, *, dtype: Dtype | None = None
) -> Any:  # fmt: skip
    """Of means and deviations, numbers or arrays."""
    shape = jnp.broadcast_shapes(jnp.shape(mean), jnp.shape(std)) if size is None else tuple(size)
    return (jax.random.normal(_key(key), shape) * std + mean).astype(jax_dtype(dtype, jnp.float32))


def multinomial(key: jax.Array | None, weights: Any, count: int, replacement: bool = False) -> Any:
    """Places along the last axis, by weights."""
    if replacement:
        drawn = jax.random.categorical(_key(key), jnp.log(weights), shape=(count, *weights.shape[:-1]))
        return jnp.moveaxis(drawn, 0, -1)
    return jax.lax.top_k(jnp.log(weights) + jax.random.gumbel(_key(key), weights.shape), count)[1]


def rrelu(
    key: jax.Array | None, x: Any, noise: Any, low: float = 0.125, high: float = 1 / 3, train: bool = False,
    generator: Any = None,
) -> Any:  # fmt: skip
    """Below 0 a slope that is drawn, in evaluation the mean one; and the slopes."""
    slopes = jax.random.uniform(_key(key), x.shape, x.dtype, low, high) if train else (low + high) / 2
    slopes = jnp.where(x > 0, 1.0, slopes).astype(x.dtype)
    return x * slopes, slopes


OPS: dict[str, Callable[..., Any]] = {
    "native_dropout": dropout, "bernoulli": bernoulli, "rand": _new(jax.random.uniform),
    "randn": _new(jax.random.normal), "rand_like": _like(jax.random.uniform), "randn_like": _like(jax.random.normal),
    "randint_like": randint_like, "randint": randint,
    "randperm": lambda key, n, *, dtype=None: jax.random.permutation(_key(key), n).astype(jax_dtype(dtype, jnp.int32)),
    "exponential": lambda key, x, rate=1.0: jax.random.exponential(_key(key), x.shape, x.dtype) / rate,
    "uniform": lambda key, x, low=0.0, high=1.0: jax.random.uniform(_key(key), x.shape, x.dtype, low, high),
    "normal": normal, "normal_functional": lambda key, x, mean=0.0, std=1.0: normal(key, mean, std, x.shape),
    "multinomial": multinomial, "rrelu_with_noise_functional": rrelu,
}  # fmt: skip
"""By name; each has a key first, None in evaluation."""
