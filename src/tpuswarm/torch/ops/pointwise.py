"""What is computed for each element."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tpuswarm.torch.graph import Dtype
from tpuswarm.torch.ops.dtypes import alike, as_float, jax_dtype, result_dtype, within


def _binary(function: Callable[..., Any], floats: bool = False) -> Callable[..., Any]:
    def apply(a: Any, b: Any) -> Any:
        a, b = alike(a, b)
        return function(as_float(a), as_float(b)) if floats else function(a, b)

    return apply


def _float(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x: function(as_float(x))


def add(a: Any, b: Any, *, alpha: Any = 1) -> Any:
    """a + alpha·b."""
    a, b = alike(a, b)
    return a + (b if alpha == 1 else jnp.asarray(alpha, b.dtype) * b)


def sub(a: Any, b: Any, *, alpha: Any = 1) -> Any:
    """a - alpha·b."""
    a, b = alike(a, b)
    return a - (b if alpha == 1 else jnp.asarray(alpha, b.dtype) * b)


def div(a: Any, b: Any, *, rounding_mode: str | None = None) -> Any:
    """a / b, rounded to integers where a mode is given."""
    a, b = alike(a, b)
    if rounding_mode is None:
        return as_float(a) / as_float(b)
    if rounding_mode == "floor":
        return jnp.floor_divide(a, b)
    return jnp.trunc(a / b).astype(a.dtype)


def power(a: Any, b: Any) -> Any:
    """a to the b; a small whole number stays one, for its gradient at 0."""
    if isinstance(b, (int, float)) and float(b).is_integer() and abs(b) <= 8 and jnp.issubdtype(a.dtype, jnp.inexact):
        return lax.integer_pow(a, int(b))
    a, b = alike(a, b)
    return jnp.power(a, b)


def absolute(x: Any) -> Any:
    """The gradient is 0 at 0, where JAX's own is 1."""
    return x * lax.stop_gradient(jnp.sign(x)) if jnp.issubdtype(x.dtype, jnp.floating) else jnp.abs(x)


def hardtanh(x: Any, low: float = -1.0, high: float = 1.0) -> Any:
    """The gradient is 0 at the bounds."""
    least, most = jnp.asarray(low, x.dtype), jnp.asarray(high, x.dtype)
    return jnp.where(x <= least, least, jnp.where(x >= most, most, x))


def clamp(x: Any, low: Any = None, high: Any = None, **given: Any) -> Any:
    """Between two bounds, numbers or arrays."""
    low, high = given.get("min", low), given.get("max", high)
    dtype = result_dtype(*(each for each in (x, low, high) if each is not None))
    x = jnp.asarray(x).astype(dtype)
    if low is not None:
        x = jnp.where((x < low) | (low != low), jnp.asarray(low, dtype), x)  # a bound of NaN is a NaN
    return x if high is None else jnp.where((x > high) | (high != high), jnp.asarray(high, dtype), x)


def where(condition: Any, a: Any, b: Any) -> Any:
    """a where the condition holds, else b."""
    dtype = result_dtype(a, b)
    return jnp.where(condition, within(a, dtype), within(b, dtype))


def masked_fill(x: Any, mask: Any, value: Any) -> Any:
    """`value` where the mask holds."""
    return jnp.where(mask, within(value, x.dtype), x)


def to_copy(x: Any, *, dtype: Dtype | None = None, **_: Any) -> Any:
    """In another dtype."""
    x = jnp.asarray(x)
    return x.astype(jax_dtype(dtype, x.dtype))


def gelu(x: Any, *, approximate: str = "none") -> Any:
    """Exact, or with tanh."""
    return jax.nn.gelu(x, approximate=approximate == "tanh")


def elu(x: Any, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Any:
    """ELU, SELU and CELU are this with other numbers."""
    safe = jnp.where(x > 0, 0.0, x * input_scale).astype(x.dtype)
    return jnp.where(x > 0, x * scale, jnp.expm1(safe) * (alpha * scale)).astype(x.dtype)


def softplus(x: Any, beta: float = 1.0, threshold: float = 20.0) -> Any:
    """log(1 + exp(beta·x)) / beta, x itself beyond the threshold."""
    return jnp.where(x * beta > threshold, x, jax.nn.softplus(x * beta) / beta).astype(x.dtype)


def _bits(logical: Callable[..., Any], bitwise: Callable[..., Any]) -> Callable[..., Any]:
    def apply(*values: Any) -> Any:
        values = tuple(alike(*values))
        return (logical if values[0].dtype == jnp.bool_ else bitwise)(*values)

    return apply


def _copy(x: Any, *_: Any, **__: Any) -> Any:
    return x


OPS: dict[str, Callable[..., Any]] = {
    "add": add, "sub": sub, "div": div, "pow": power, "clamp": clamp, "where": where, "masked_fill": masked_fill,
    "mul": _binary(jnp.multiply), "remainder": _binary(jnp.remainder), "fmod": _binary(jnp.fmod),
    "rsub": lambda a, b, alpha=1: sub(b, a, alpha=alpha),
    "maximum": _binary(jnp.maximum), "minimum": _binary(jnp.minimum), "atan2": _binary(jnp.arctan2, floats=True),
    "eq": _binary(jnp.equal), "ne": _binary(jnp.not_equal), "lt": _binary(jnp.less), "le": _binary(jnp.less_equal),
    "gt": _binary(jnp.greater), "ge": _binary(jnp.greater_equal),
    "logical_and": jnp.logical_and, "logical_or": jnp.logical_or, "logical_xor": jnp.logical_xor,
    "logical_not": jnp.logical_not,
    "bitwise_and": _bits(jnp.logical_and, jnp.bitwise_and), "bitwise_or": _bits(jnp.logical_or, jnp.bitwise_or),
    "bitwise_xor": _bits(jnp.logical_xor, jnp.bitwise_xor), "bitwise_not": _bits(jnp.logical_not, jnp.bitwise_not),
    "neg": jnp.negative, "abs": absolute, "sign": jnp.sign, "floor": jnp.floor, "ceil": jnp.ceil, "trunc": jnp.trunc,
    "round": jnp.round, "relu": jax.nn.relu, "isnan": jnp.isnan,
    "isinf": jnp.isinf, "square": jnp.square,
    **{name: _float(getattr(jnp, name)) for name in (
        "exp", "expm1", "log", "log1p", "log2", "log10", "sqrt", "sin", "cos", "tan", "sinh", "cosh", "tanh",
        "reciprocal",
    )},
    **{name: _float(getattr(jnp, f"arc{name[1:]}")) for name in (
        "asin", "acos", "atan", "asinh", "acosh", "atanh",
    )},
    "rsqrt": _float(lax.rsqrt), "erf": _float(lax.erf), "sigmoid": _float(jax.nn.sigmoid),
    "gelu": gelu, "elu": elu, "softplus": softplus, "silu": jax.nn.silu, "mish": jax.nn.mish,
    "leaky_relu": lambda x, slope=0.01: jnp.where(x > 0, x, x * jnp.asarray(slope, x.dtype)),
    "hardtanh": hardtanh,
    "hardsigmoid": lambda x: jnp.clip(x / 6 + 0.5, 0, 1).astype(x.dtype),
    "hardswish": lambda x: (x * jnp.clip(x / 6 + 0.5, 0, 1)).astype(x.dtype),
    "log_sigmoid_forward": lambda x: (jax.nn.log_sigmoid(x), jnp.zeros((0,), x.dtype)),
    "_to_copy": to_copy, "clone": _copy, "alias": _copy, "detach": lax.stop_gradient, "lift_fresh_copy": _copy,
    "copy": lambda x, source, *_: jnp.broadcast_to(jnp.asarray(source, x.dtype), x.shape),
    "fill": lambda x, value: jnp.full(x.shape, value, x.dtype),
}  # fmt: skip
"""By name."""
