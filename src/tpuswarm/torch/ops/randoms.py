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
    """What stays, and where it stays."""
    if not train or p == 0 or key is None:
        return x, jnp.ones(x.shape, bool)
    keep = jax.random.bernoulli(key, 1 - p, x.shape)
    return jnp.where(keep, x / (1 - p), 0).astype(x.dtype), keep


def bernoulli(key: jax.Array | None, x: Any, p: float | None = None, **_: Any) -> Any:
    """Ones and zeros, with the probabilities in x or with one for all."""
    return jax.random.bernoulli(_key(key), x if p is None else p, x.shape).astype(x.dtype)


def _like(draw: Callable[..., Any]) -> Callable[..., Any]:
    def apply(key: jax.Array | None, x: Any, *, dtype: Dtype | None = None, **_: Any) -> Any:
        return draw(_key(key), x.shape, jax_dtype(dtype, x.dtype))

    return apply


def _new(draw: Callable[..., Any]) -> Callable[..., Any]:
    def apply(key: jax.Array | None, size: Sequence[int], *, dtype: Dtype | None = None, **_: Any) -> Any:
        return draw(_key(key), tuple(size), jax_dtype(dtype, jnp.float32))

    return apply


def randint_like(key: jax.Array | None, x: Any, *bounds: int, dtype: Dtype | None = None, **_: Any) -> Any:
    """Whole numbers below a bound, or between two."""
    low, high = bounds if len(bounds) == 2 else (0, bounds[0])
    return jax.random.randint(_key(key), x.shape, low, high).astype(jax_dtype(dtype, x.dtype))


def randint(key: jax.Array | None, *given: Any, dtype: Dtype | None = None, **_: Any) -> Any:
    """The same in a shape."""
    *bounds, size = given
    low, high = bounds if len(bounds) == 2 else (0, bounds[0])
    return jax.random.randint(_key(key), tuple(size), low, high).astype(jax_dtype(dtype, jnp.int32))


OPS: dict[str, Callable[..., Any]] = {
    "native_dropout": dropout, "bernoulli": bernoulli, "rand": _new(jax.random.uniform),
    "randn": _new(jax.random.normal), "rand_like": _like(jax.random.uniform), "randn_like": _like(jax.random.normal),
    "randint_like": randint_like, "randint": randint,
    "randperm": lambda key, n, **_: jax.random.permutation(_key(key), n),
}  # fmt: skip
"""By name; each has a key first, None in evaluation."""
