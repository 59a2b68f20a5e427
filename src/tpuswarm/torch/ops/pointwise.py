"""What is computed for each element."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
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


def add(a: Any, b: Any, alpha: Any = 1) -> Any:
    """a + alpha·b."""
    a, b = alike(a, b)
    return a + (b if alpha == 1 else jnp.asarray(alpha, b.dtype) * b)


def sub(a: Any, b: Any, alpha: Any = 1) -> Any:
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
    if jnp.issubdtype(a.dtype, jnp.inexact):
        return jnp.trunc(a / b)
    return truncated(a, b)


def truncated(a: Any, b: Any) -> Any:
    """a / b of integers, towards 0."""
    return lax.div(*jnp.broadcast_arrays(a, jnp.asarray(b, a.dtype)))


def power(a: Any, b: Any) -> Any:
    """a to the b."""
    if isinstance(b, (int, float)) and float(b).is_integer() and abs(b) <= 8 and jnp.issubdtype(a.dtype, jnp.inexact):
        return lax.integer_pow(a, int(b))
    if isinstance(b, float) and b == 0.5 and jnp.issubdtype(a.dtype, jnp.floating):
        return jnp.sqrt(a)  # of -inf no number, as in torch
    a, b = alike(a, b)
    return jnp.power(a, b)


def sign(x: Any) -> Any:
    """-1, 0 or 1; 0 of what is no number."""
    if x.dtype == jnp.bool_:
        return x
    return jnp.where(x != x, jnp.zeros((), x.dtype), jnp.sign(x))


def rounded(x: Any, *, decimals: int = 0) -> Any:
    """To so many decimals, halves to even numbers."""
    return x if not jnp.issubdtype(x.dtype, jnp.inexact) and decimals >= 0 else jnp.round(x, decimals)


def hardtanh(x: Any, low: float = -1.0, high: float = 1.0) -> Any:
    """x between two bounds."""
    least, most = jnp.asarray(low, x.dtype), jnp.asarray(high, x.dtype)
    return jnp.where(x <= least, least, jnp.where(x >= most, most, x))


def clamp(x: Any, min: Any = None, max: Any = None) -> Any:
    """Between two bounds, numbers or arrays."""
    low, high = min, max
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


def to_copy(x: Any, *, dtype: Dtype | None = None) -> Any:
    """In another dtype. A float becomes a small integer by way of a large one, so that it wraps around as in torch."""
    x, wanted = jnp.asarray(x), jax_dtype(dtype, jnp.asarray(x).dtype)
    if jnp.issubdtype(x.dtype, jnp.complexfloating) and not jnp.issubdtype(wanted, jnp.complexfloating):
        x = x.real
    if jnp.issubdtype(x.dtype, jnp.floating) and jnp.issubdtype(wanted, jnp.integer) and wanted.itemsize < 4:
        x = x.astype(jnp.int32)
    return x.astype(wanted)


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


def digamma(x: Any) -> Any:
    """Infinite at 0, with the other sign."""
    x = as_float(x)
    return jnp.where(x == 0, jnp.copysign(jnp.inf, -x), lax.digamma(x)).astype(x.dtype)


def polygamma(n: int, x: Any) -> Any:
    """The n-th derivative of digamma; below 1/2 by reflection, whose series is for positive numbers."""
    x = as_float(x)
    if n == 0:
        return digamma(x)
    low, sign = x < 0.5, -1.0 if n % 2 == 0 else 1.0
    above = jnp.where(low, 1 - x, x)
    found = sign * math.factorial(n) * lax.zeta(jnp.full(x.shape, n + 1.0, x.dtype), above)
    found = jnp.where(above == jnp.inf, 0, found)
    derivative = np.polynomial.Polynomial([0.0, 1.0])  # of the cotangent, in terms of it
    for _ in range(n):
        derivative = derivative.deriv() * np.polynomial.Polynomial([-1.0, 0.0, -1.0])
    cotangent = 1 / jnp.tan(math.pi * (x - jnp.round(x)))
    reflected: Any = 0.0
    for factor in derivative.coef[::-1]:
        reflected = reflected * cotangent + float(factor)
    below = -sign * found - math.pi ** (n + 1) * reflected
    below = jnp.where(x == jnp.round(x), sign * jnp.inf, below)
    return jnp.where(low, below, found).astype(x.dtype)


def _bits(logical: Callable[..., Any], bitwise: Callable[..., Any]) -> Callable[..., Any]:
    def apply(a: Any, b: Any) -> Any:
        a, b = alike(a, b)
        return (logical if a.dtype == jnp.bool_ else bitwise)(a, b)

    return apply


def _whole(function: Callable[..., Any]) -> Callable[..., Any]:
    """Rounding, which leaves integers as they are."""
    return lambda x: function(x) if jnp.issubdtype(x.dtype, jnp.inexact) else x


OPS: dict[str, Callable[..., Any]] = {
    "add": add, "sub": sub, "div": div, "pow": power, "clamp": clamp, "where": where, "masked_fill": masked_fill,
    "mul": _binary(jnp.multiply), "remainder": _binary(jnp.remainder), "fmod": _binary(jnp.fmod),
    "rsub": lambda a, b, alpha=1: sub(b, a, alpha=alpha),
    "maximum": _binary(jnp.maximum), "minimum": _binary(jnp.minimum), "atan2": _binary(jnp.arctan2, floats=True),
    "fmax": _binary(jnp.fmax), "fmin": _binary(jnp.fmin), "copysign": _binary(jnp.copysign, floats=True),
    "hypot": _binary(jnp.hypot, floats=True), "signbit": jnp.signbit, "i0": _float(jax.scipy.special.i0),
    "special_i1": _float(jax.scipy.special.i1), "ldexp": lambda a, b: as_float(a) * jnp.exp2(as_float(b)),
    "eq": _binary(jnp.equal), "ne": _binary(jnp.not_equal), "lt": _binary(jnp.less), "le": _binary(jnp.less_equal),
    "gt": _binary(jnp.greater), "ge": _binary(jnp.greater_equal),
    "logical_and": lambda a, b: jnp.logical_and(a, b), "logical_or": lambda a, b: jnp.logical_or(a, b),
    "logical_xor": lambda a, b: jnp.logical_xor(a, b),
    "logical_not": jnp.logical_not,
    "bitwise_and": _bits(jnp.logical_and, jnp.bitwise_and), "bitwise_or": _bits(jnp.logical_or, jnp.bitwise_or),
    "bitwise_xor": _bits(jnp.logical_xor, jnp.bitwise_xor), "bitwise_not": jnp.bitwise_not,
    "neg": lambda x: -x, "abs": jnp.abs, "sign": sign, "floor": _whole(jnp.floor), "ceil": _whole(jnp.ceil),
    "trunc": _whole(jnp.trunc), "round": rounded, "relu": jax.nn.relu, "isnan": jnp.isnan,
    "isinf": jnp.isinf, "square": jnp.square,
    **{name: _float(getattr(jnp, name)) for name in (
        "exp", "exp2", "expm1", "log", "log1p", "log2", "log10", "sqrt", "sin", "cos", "tan", "sinh", "cosh", "tanh",
        "reciprocal",
    )},
    **{name: _float(getattr(jnp, f"arc{name[1:]}")) for name in (
        "asin", "acos", "atan", "asinh", "acosh", "atanh",
    )},
    "rsqrt": _float(lax.rsqrt), "erf": _float(lax.erf), "erfc": _float(lax.erfc), "erfinv": _float(lax.erf_inv),
    "lgamma": _float(lax.lgamma), "digamma": digamma,
    "polygamma": polygamma, "sigmoid": _float(jax.nn.sigmoid),
    "gelu": gelu, "elu": elu, "softplus": softplus, "silu": jax.nn.silu, "mish": jax.nn.mish,
    "leaky_relu": lambda x, slope=0.01: jnp.where(x > 0, x, x * jnp.asarray(slope, x.dtype)),
    "hardtanh": hardtanh,
    "hardsigmoid": lambda x: jnp.clip(x / 6 + 0.5, 0, 1).astype(x.dtype),
    "hardswish": lambda x: (x * jnp.clip(x / 6 + 0.5, 0, 1)).astype(x.dtype),
    "log_sigmoid_forward": lambda x: (jax.nn.log_sigmoid(x), jnp.exp(-jnp.abs(x))),
    "_to_copy": to_copy,
    "copy": lambda x, source, non_blocking=False: jnp.broadcast_to(jnp.asarray(source, x.dtype), x.shape),
    "fill": lambda x, value: jnp.full(x.shape, value, x.dtype),
}  # fmt: skip
"""By name."""
