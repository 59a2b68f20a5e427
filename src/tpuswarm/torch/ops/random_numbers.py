"""Random operators. They draw from JAX keys, so a run can be repeated, but with other numbers than torch's."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tpuswarm.torch.graph import Dtype
from tpuswarm.torch.ops.dtypes import jax_dtype


def dropout(key: jax.Array | None, x: Any, p: float, train: bool | None = True) -> Any:
    """Return x after dropout and a boolean mask; without a key dropout is off and the mask is floats."""
    if not train or p == 0 or key is None:
        return x, jnp.ones(x.shape)
    keep = jax.random.bernoulli(key, 1 - p, x.shape)
    return _keep_scaled(x, keep, 1 / (1 - p) if p < 1 else 0.0), keep


def dropout_backward(gradient: Any, mask: Any, scale: float) -> Any:
    """Return the gradient of dropout; a mask of floats means that it was off."""
    return _keep_scaled(gradient, mask, scale) if mask.dtype == jnp.bool_ else gradient


def _keep_scaled(x: Any, keep: Any, scale: float) -> Any:
    """Return x * scale, 0 where not kept. Like torch, multiply in float32: bfloat16 would round the scale."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return jnp.where(keep, wide * scale, 0).astype(x.dtype)


def _draw(draw: Callable[..., Any]) -> Callable[..., Any]:
    def apply(key: jax.Array, like: Any, *, dtype: Dtype | None = None) -> Any:  # like an array, or of a size
        shape, default = (like.shape, like.dtype) if isinstance(like, jax.Array) else (tuple(like), jnp.float32)
        return draw(key, shape, jax_dtype(dtype, default))

    return apply


def _randint(key: jax.Array, *args: Any, dtype: Dtype | None = None) -> Any:
    *bounds, size = args
    low, high = bounds if len(bounds) == 2 else (0, bounds[0])
    return jax.random.randint(key, tuple(size), low, high).astype(jax_dtype(dtype, jnp.int32))


def _normal(
    key: jax.Array, mean: Any, std: Any = 1.0, size: Sequence[int] | None = None, *, dtype: Dtype | None = None
) -> Any:  # fmt: skip
    shape = jnp.broadcast_shapes(jnp.shape(mean), jnp.shape(std)) if size is None else tuple(size)
    return (jax.random.normal(key, shape) * std + mean).astype(jax_dtype(dtype, jnp.float32))


def _multinomial(key: jax.Array, weights: Any, count: int, replacement: bool = False) -> Any:
    logits = jnp.log(weights)
    if replacement:
        drawn = jax.random.categorical(key, logits, shape=(count, *weights.shape[:-1]))
        return jnp.moveaxis(drawn, 0, -1)
    return jax.lax.top_k(logits + jax.random.gumbel(key, weights.shape), count)[1]


OPS: dict[str, Callable[..., Any]] = {
    "native_dropout": dropout, **dict.fromkeys(("rand", "rand_like"), _draw(jax.random.uniform)),
    **dict.fromkeys(("randn", "randn_like"), _draw(jax.random.normal)), "randint": _randint,
    "randint_like": lambda key, x, *bounds, dtype=None: _randint(key, *bounds, x.shape, dtype=dtype).astype(
        jax_dtype(dtype, x.dtype)
    ),
    "randperm": lambda key, n, *, dtype=None: jax.random.permutation(key, n).astype(jax_dtype(dtype, jnp.int32)),
    "bernoulli": lambda key, x, p=None: jax.random.bernoulli(key, x if p is None else p, x.shape).astype(x.dtype),
    "uniform": lambda key, x, low=0.0, high=1.0: jax.random.uniform(key, x.shape, x.dtype, low, high),
    "exponential": lambda key, x, rate=1.0: jax.random.exponential(key, x.shape, x.dtype) / rate,
    "normal": _normal, "normal_functional": lambda key, x, mean=0.0, std=1.0: _normal(key, mean, std, x.shape),
    "multinomial": _multinomial,
}  # fmt: skip
