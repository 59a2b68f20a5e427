"""Element-wise operators."""

import math
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tpuswarm.torch.graph import Dtype
from tpuswarm.torch.ops.dtypes import as_float, is_inexact, jax_dtype, promote, result_dtype, saturating_cast


def _binary(function: Callable[..., Any], to_float: bool = False) -> Callable[..., Any]:
    def apply(a: Any, b: Any) -> Any:
        a, b = promote(a, b)
        return function(as_float(a), as_float(b)) if to_float else function(a, b)

    return apply


def _float(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x: function(as_float(x))


def _with_alpha(function: Callable[..., Any]) -> Callable[..., Any]:
    def apply(a: Any, b: Any, alpha: Any = 1) -> Any:
        a, b = promote(a, b)
        return function(a, b if alpha == 1 else jnp.asarray(alpha, b.dtype) * b)

    return apply


def _div(a: Any, b: Any, *, rounding_mode: str | None = None) -> Any:
    a, b = promote(a, b)
    if rounding_mode is None:
        return as_float(a) / as_float(b)
    if rounding_mode == "floor":
        return jnp.floor_divide(a, b)
    return jnp.trunc(a / b) if is_inexact(a) else truncating_divide(a, b)


def truncating_divide(a: Any, b: Any) -> Any:
    """Divide integers and round towards 0."""
    return lax.div(*jnp.broadcast_arrays(a, jnp.asarray(b, a.dtype)))


def _pow(a: Any, b: Any) -> Any:
    if isinstance(b, (int, float)) and float(b).is_integer() and abs(b) <= 8 and is_inexact(a):
        return lax.integer_pow(a, int(b))
    if isinstance(b, float) and b == 0.5 and jnp.issubdtype(a.dtype, jnp.floating):
        return jnp.sqrt(a)  # NaN for -inf, as in torch
    return jnp.power(*promote(a, b))


def sign(x: Any) -> Any:
    """Return -1, 0 or 1, and 0 for NaN."""
    return x if x.dtype == jnp.bool_ else jnp.where(x != x, jnp.zeros((), x.dtype), jnp.sign(x))


def _round(x: Any, *, decimals: int = 0) -> Any:
    return x if not is_inexact(x) and decimals >= 0 else jnp.round(x, decimals)


def _clamp(x: Any, min: Any = None, max: Any = None) -> Any:
    dtype = result_dtype(*(value for value in (x, min, max) if value is not None))
    low, high = (None if bound is None else jnp.asarray(bound, dtype) for bound in (min, max))
    return jnp.clip(jnp.asarray(x).astype(dtype), low, high)


def _where(condition: Any, a: Any, b: Any) -> Any:
    dtype = result_dtype(a, b)
    return jnp.where(condition, saturating_cast(a, dtype), saturating_cast(b, dtype))


def _to_copy(x: Any, *, dtype: Dtype | None = None) -> Any:
    x = jnp.asarray(x)
    target = jax_dtype(dtype, x.dtype)
    if jnp.issubdtype(x.dtype, jnp.complexfloating) and not jnp.issubdtype(target, jnp.complexfloating):
        x = x.real
    if jnp.issubdtype(x.dtype, jnp.floating) and jnp.issubdtype(target, jnp.integer) and target.itemsize < 4:
        x = x.astype(jnp.int32)  # small integers wrap around, as in torch
    return x.astype(target)


def _gelu(x: Any, *, approximate: str = "none") -> Any:
    return jax.nn.gelu(x, approximate=approximate == "tanh")


def _digamma(x: Any) -> Any:
    x = as_float(x)
    return jnp.where(x == 0, jnp.copysign(jnp.inf, -x), lax.digamma(x)).astype(x.dtype)


def _polygamma(n: int, x: Any) -> Any:
    """Differentiate digamma n times; below 1/2 use the reflection formula, as the series needs positive numbers."""
    x = as_float(x)
    if n == 0:
        return _digamma(x)
    is_low, sign = x < 0.5, -1.0 if n % 2 == 0 else 1.0
    reflected = jnp.where(is_low, 1 - x, x)
    series = sign * math.factorial(n) * lax.zeta(jnp.full(x.shape, n + 1.0, x.dtype), reflected)
    series = jnp.where(reflected == jnp.inf, 0, series)
    derivative = np.polynomial.Polynomial([0.0, 1.0])  # the cotangent; its derivatives are polynomials of it
    for _ in range(n):
        derivative = derivative.deriv() * np.polynomial.Polynomial([-1.0, 0.0, -1.0])
    cotangent = 1 / jnp.tan(math.pi * (x - jnp.round(x)))
    below = -sign * series - math.pi ** (n + 1) * jnp.polyval(jnp.asarray(derivative.coef[::-1], x.dtype), cotangent)
    below = jnp.where(x == jnp.round(x), sign * jnp.inf, below)
    return jnp.where(is_low, below, series).astype(x.dtype)


def _bitwise(logical: Callable[..., Any], bitwise: Callable[..., Any]) -> Callable[..., Any]:
    def apply(a: Any, b: Any) -> Any:
        a, b = promote(a, b)
        return (logical if a.dtype == jnp.bool_ else bitwise)(a, b)

    return apply


def _rounding(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x: function(x) if is_inexact(x) else x


_add, _sub = _with_alpha(operator.add), _with_alpha(operator.sub)

OPS: dict[str, Callable[..., Any]] = {
    "add": _add, "sub": _sub, "rsub": lambda a, b, alpha=1: _sub(b, a, alpha), "mul": _binary(jnp.multiply),
    "div": _div, "pow": _pow, "remainder": _binary(jnp.remainder), "fmod": _binary(jnp.fmod),
    "maximum": _binary(jnp.maximum), "minimum": _binary(jnp.minimum), "fmax": _binary(jnp.fmax),
    "fmin": _binary(jnp.fmin), "atan2": _binary(jnp.arctan2, to_float=True),
    **{name: _binary(getattr(jnp, name), to_float=True) for name in ("copysign", "hypot", "nextafter")},
    "igamma": _binary(jax.scipy.special.gammainc, to_float=True),
    "igammac": _binary(jax.scipy.special.gammaincc, to_float=True),
    "special_zeta": _binary(jax.scipy.special.zeta, to_float=True), "frexp": jnp.frexp,
    "ldexp": lambda a, b: as_float(a) * jnp.exp2(as_float(b)), "clamp": _clamp, "where": _where,
    "masked_fill": lambda x, mask, value: jnp.where(mask, saturating_cast(value, x.dtype), x),
    "eq": _binary(jnp.equal), "ne": _binary(jnp.not_equal), "lt": _binary(jnp.less), "le": _binary(jnp.less_equal),
    "gt": _binary(jnp.greater), "ge": _binary(jnp.greater_equal),
    "logical_and": lambda a, b: jnp.logical_and(a, b), "logical_or": lambda a, b: jnp.logical_or(a, b),
    "logical_xor": lambda a, b: jnp.logical_xor(a, b), "logical_not": jnp.logical_not,
    "bitwise_and": _bitwise(jnp.logical_and, jnp.bitwise_and), "bitwise_or": _bitwise(jnp.logical_or, jnp.bitwise_or),
    "bitwise_xor": _bitwise(jnp.logical_xor, jnp.bitwise_xor), "bitwise_not": jnp.bitwise_not,
    "neg": operator.neg, "abs": jnp.abs, "sign": sign, "signbit": jnp.signbit, "isnan": jnp.isnan, "isinf": jnp.isinf,
    "floor": _rounding(jnp.floor), "ceil": _rounding(jnp.ceil), "trunc": _rounding(jnp.trunc), "round": _round,
    **{name: _float(getattr(jnp, name)) for name in (
        "exp", "exp2", "expm1", "log", "log1p", "log2", "log10", "sqrt", "sin", "cos", "tan", "sinh", "cosh", "tanh",
        "reciprocal",
    )},
    **{name: _float(getattr(jnp, f"arc{name[1:]}")) for name in ("asin", "acos", "atan", "asinh", "acosh", "atanh")},
    **{name: _float(getattr(lax, name)) for name in ("rsqrt", "erf", "erfc", "lgamma")},
    "erfinv": _float(lax.erf_inv), "digamma": _digamma, "polygamma": _polygamma,
    **{name: _float(jax.scipy.special.i0) for name in ("i0", "special_modified_bessel_i0")},
    **{name: _float(jax.scipy.special.i1) for name in ("special_i1", "special_modified_bessel_i1")},
    **{f"special_{name}": _float(getattr(jax.scipy.special, name)) for name in ("i0e", "i1e", "ndtri", "log_ndtr")},
    "special_spherical_bessel_j0": lambda x: jnp.sinc(as_float(x) / math.pi),
    "relu": jax.nn.relu, "sigmoid": _float(jax.nn.sigmoid), "gelu": _gelu,
    "silu": jax.nn.silu, "_to_copy": _to_copy,
    "copy": lambda x, source, non_blocking=False: jnp.broadcast_to(jnp.asarray(source, x.dtype), x.shape),
    "fill": lambda x, value: jnp.full(x.shape, value, x.dtype),
}  # fmt: skip
