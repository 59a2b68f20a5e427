"""Random operators. They draw from JAX keys, so a run can be repeated, but with other numbers than torch's."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tpuswarm.errors import InputError
from tpuswarm.torch.graph import Dtype
from tpuswarm.torch.ops.dtypes import jax_dtype


def _require_key(key: jax.Array | None) -> jax.Array:
    if key is None:
        raise InputError("the module draws random numbers in evaluation; draw them only in training")
    return key


def dropout(key: jax.Array | None, x: Any, p: float, train: bool | None = True) -> Any:
    """Return x after dropout and a boolean mask; without a key dropout is off and the mask is floats."""
    if not train or p == 0 or key is None:
        return x, jnp.ones(x.shape)
    keep = jax.random.bernoulli(key, 1 - p, x.shape)
    return keep_scaled(x, keep, 1 / (1 - p) if p < 1 else 0.0), keep


def keep_scaled(x: Any, keep: Any, scale: float) -> Any:
    """Return x * scale, 0 where not kept. Like torch, multiply in float32: bfloat16 would round the scale."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return jnp.where(keep, wide * scale, 0).astype(x.dtype)


def _bernoulli(key: jax.Array | None, x: Any, p: float | None = None) -> Any:
    return jax.random.bernoulli(_require_key(key), x if p is None else p, x.shape).astype(x.dtype)


def _like(draw: Callable[..., Any]) -> Callable[..., Any]:
    def apply(key: jax.Array | None, x: Any, *, dtype: Dtype | None = None) -> Any:
        return draw(_require_key(key), x.shape, jax_dtype(dtype, x.dtype))

    return apply


def _new(draw: Callable[..., Any]) -> Callable[..., Any]:
    def apply(key: jax.Array | None, size: Sequence[int], *, dtype: Dtype | None = None) -> Any:
        return draw(_require_key(key), tuple(size), jax_dtype(dtype, jnp.float32))

    return apply


def _randint(key: jax.Array | None, *args: Any, dtype: Dtype | None = None) -> Any:
    *bounds, size = args
    low, high = bounds if len(bounds) == 2 else (0, bounds[0])
    return jax.random.randint(_require_key(key), tuple(size), low, high).astype(jax_dtype(dtype, jnp.int32))


def _randint_like(key: jax.Array | None, x: Any, *bounds: int, dtype: Dtype | None = None) -> Any:
    return _randint(key, *bounds, x.shape).astype(jax_dtype(dtype, x.dtype))


def _normal(
    key: jax.Array | None, mean: Any, std: Any = 1.0, size: Sequence[int] | None = None, *, dtype: Dtype | None = None
) -> Any:  # fmt: skip
    shape = jnp.broadcast_shapes(jnp.shape(mean), jnp.shape(std)) if size is None else tuple(size)
    return (jax.random.normal(_require_key(key), shape) * std + mean).astype(jax_dtype(dtype, jnp.float32))


def _multinomial(key: jax.Array | None, weights: Any, count: int, replacement: bool = False) -> Any:
    key, logits = _require_key(key), jnp.log(weights)
    if replacement:
        drawn = jax.random.categorical(key, logits, shape=(count, *weights.shape[:-1]))
        return jnp.moveaxis(drawn, 0, -1)
    return jax.lax.top_k(logits + jax.random.gumbel(key, weights.shape), count)[1]


def _rrelu(
    key: jax.Array | None, x: Any, noise: Any, lower: float = 0.125, upper: float = 1 / 3, train: bool = False,
    generator: Any = None,
) -> Any:  # fmt: skip
    slopes = jax.random.uniform(_require_key(key), x.shape, x.dtype, lower, upper) if train else (lower + upper) / 2
    slopes = jnp.where(x > 0, 1.0, slopes).astype(x.dtype)
    return x * slopes, slopes


def _randperm(key: jax.Array | None, n: int, *, dtype: Dtype | None = None) -> Any:
    return jax.random.permutation(_require_key(key), n).astype(jax_dtype(dtype, jnp.int32))


def _exponential(key: jax.Array | None, x: Any, rate: float = 1.0) -> Any:
    return jax.random.exponential(_require_key(key), x.shape, x.dtype) / rate


def _uniform(key: jax.Array | None, x: Any, low: float = 0.0, high: float = 1.0) -> Any:
    return jax.random.uniform(_require_key(key), x.shape, x.dtype, low, high)


OPS: dict[str, Callable[..., Any]] = {
    "native_dropout": dropout, "bernoulli": _bernoulli, "rand": _new(jax.random.uniform),
    "randn": _new(jax.random.normal), "rand_like": _like(jax.random.uniform), "randn_like": _like(jax.random.normal),
    "randint": _randint, "randint_like": _randint_like, "randperm": _randperm, "exponential": _exponential,
    "uniform": _uniform, "normal": _normal,
    "normal_functional": lambda key, x, mean=0.0, std=1.0: _normal(key, mean, std, x.shape),
    "log_normal": lambda key, x, mean=1.0, std=2.0: jnp.exp(_normal(key, mean, std, x.shape)),
    "cauchy": lambda key, x, median=0.0, sigma=1.0: median + sigma * jax.random.cauchy(_require_key(key), x.shape),
    "geometric": lambda key, x, p: jax.random.geometric(_require_key(key), p, x.shape).astype(x.dtype),
    "multinomial": _multinomial, "rrelu_with_noise_functional": _rrelu,
}  # fmt: skip
