"""Matrix decompositions, solvers, Fourier transforms and complex numbers."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tpuswarm.torch.ops.dtypes import as_float
from tpuswarm.torch.ops.pointwise import sign


def _adjoint(a: Any) -> Any:
    return jnp.conj(jnp.swapaxes(a, -1, -2))


def _success(a: Any) -> Any:
    return jnp.zeros(a.shape[:-2], jnp.int32)  # torch's error code; a failed decomposition gives NaN here


def _cholesky_ex(a: Any, *, upper: bool = False, check_errors: bool = False) -> Any:
    factor = jnp.linalg.cholesky(_adjoint(a) if upper else a, symmetrize_input=False)  # reads one triangle
    return (_adjoint(factor) if upper else factor), _success(a)


def _broadcast_batch(*arrays: tuple[Any, int]) -> list[Any]:  # (array, number of axes that are not batch axes)
    lead = jnp.broadcast_shapes(*(x.shape[: x.ndim - rank] for x, rank in arrays))
    return [jnp.broadcast_to(x, (*lead, *x.shape[x.ndim - rank :])) for x, rank in arrays]


def _solve_triangular(a: Any, b: Any, *, upper: bool, left: bool = True, unitriangular: bool = False) -> Any:
    a, b = _broadcast_batch((a, 2), (b, 2))
    return lax.linalg.triangular_solve(a, b, left_side=left, lower=not upper, unit_diagonal=unitriangular)


def _lu_factor(a: Any) -> tuple[Any, Any]:
    lu, pivots, _ = lax.linalg.lu(a)
    return lu, pivots + 1  # torch counts from 1


def _lu_factor_ex(a: Any, *, pivot: bool = True, check_errors: bool = False) -> Any:
    if not pivot:
        raise ValueError("JAX always pivots")
    return (*_lu_factor(a), _success(a))


def _lu_unpack(lu: Any, pivots: Any, unpack_data: bool = True, unpack_pivots: bool = True) -> Any:
    rows, size = lu.shape[-2], min(lu.shape[-2:])
    permutation = lax.linalg.lu_pivots_to_permutation(pivots - 1, rows)
    p = jnp.swapaxes(jax.nn.one_hot(permutation, rows, dtype=lu.dtype), -1, -2)
    return p, jnp.tril(lu[..., :size], -1) + jnp.eye(rows, size, dtype=lu.dtype), jnp.triu(lu[..., :size, :])


def _pinv(a: Any, *, atol: Any = None, rtol: Any = None, hermitian: bool = False) -> Any:
    a = jnp.tril(a) + _adjoint(jnp.tril(a, -1)) if hermitian else a
    u, values, v = jnp.linalg.svd(a, full_matrices=False)
    if rtol is None:
        has_atol = 0 if atol is None else jnp.asarray(atol) > 0
        rtol = jnp.where(has_atol, 0, max(a.shape[-2:]) * jnp.finfo(a.dtype).eps)  # type: ignore[no-untyped-call]
    absolute, relative = (jnp.asarray(bound, values.dtype)[..., None] for bound in (0 if atol is None else atol, rtol))
    is_zero = values <= jnp.maximum(absolute, relative * values.max(-1, keepdims=True, initial=0))
    inverse = jnp.where(is_zero, 0, 1 / jnp.where(is_zero, 1, values)).astype(a.dtype)
    return (_adjoint(v) * inverse[..., None, :]) @ _adjoint(u)


def _triangular_solve(b: Any, a: Any, upper: bool = True, transpose: bool = False, unitriangular: bool = False) -> Any:
    a, b = _broadcast_batch((a, 2), (b, 2))
    x = lax.linalg.triangular_solve(
        a, b, left_side=True, lower=not upper, transpose_a=transpose, unit_diagonal=unitriangular
    )
    return x, a


def _lu_solve(lu: Any, pivots: Any, b: Any, *, left: bool = True, adjoint: bool = False) -> Any:
    if not left:
        return _adjoint(_lu_solve(lu, pivots, _adjoint(b), adjoint=not adjoint))
    lu, pivots, b = _broadcast_batch((lu, 2), (pivots, 1), (b, 2))
    return jax.scipy.linalg.lu_solve((lu, pivots - 1), b, trans=2 if adjoint else 0)


def _solve_ex(a: Any, b: Any, *, left: bool = True, check_errors: bool = False) -> Any:
    lu, pivots = _lu_factor(a)
    is_vector = b.ndim == 1 or (b.ndim == a.ndim - 1 and b.shape == a.shape[:-1])
    x = _lu_solve(lu, pivots, b[..., None] if is_vector else b, left=left or is_vector)
    return (x[..., 0] if is_vector else x), lu, pivots, _success(a)


def _svd(a: Any, full_matrices: bool = False, compute_uv: bool = True, *, driver: str | None = None) -> Any:
    if compute_uv:
        return tuple(jnp.linalg.svd(a, full_matrices=full_matrices))
    return jnp.zeros((0,), a.dtype), jnp.linalg.svd(a, compute_uv=False), jnp.zeros((0,), a.dtype)


def _eigh(a: Any, UPLO: str = "L", compute_v: bool = True) -> Any:  # ATen's name
    values, vectors = jnp.linalg.eigh(a, UPLO=UPLO, symmetrize_input=False)
    return values, vectors if compute_v else jnp.zeros((0,), a.dtype)


def _qr(a: Any, mode: str = "reduced") -> Any:
    factors = jnp.linalg.qr(a, mode)
    return (jnp.zeros((0,), a.dtype), factors) if mode == "r" else tuple(factors)


def _angle(x: Any) -> Any:
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return jnp.angle(x)
    x = as_float(x)
    return jnp.where(x != x, x, jnp.where(x < 0, jnp.pi, 0)).astype(x.dtype)


FORWARD_NORMS, INVERSE_NORMS = ("backward", "ortho", "forward"), ("forward", "ortho", "backward")
"""JAX's names of ATen's normalizations 0, 1 and 2."""


def _fft_r2c(x: Any, dims: Sequence[int], norm: int, onesided: bool) -> Any:
    transform = jnp.fft.rfftn if onesided else jnp.fft.fftn
    return transform(x, axes=tuple(dims), norm=FORWARD_NORMS[norm])


def _fft_c2c(x: Any, dims: Sequence[int], norm: int, forward: bool) -> Any:
    if forward:
        return jnp.fft.fftn(x, axes=tuple(dims), norm=FORWARD_NORMS[norm])
    return jnp.fft.ifftn(x, axes=tuple(dims), norm=INVERSE_NORMS[norm])


def _fft_c2r(x: Any, dims: Sequence[int], norm: int, last_size: int) -> Any:
    sizes = [*(x.shape[dim] for dim in dims[:-1]), last_size]
    return jnp.fft.irfftn(x, s=sizes, axes=tuple(dims), norm=INVERSE_NORMS[norm])


OPS: dict[str, Callable[..., Any]] = {
    "linalg_cholesky_ex": _cholesky_ex, "cholesky": lambda a, upper=False: _cholesky_ex(a, upper=upper)[0],
    "cholesky_solve": lambda b, factor, upper=False: jax.scipy.linalg.cho_solve((factor, not upper), b),
    "cholesky_inverse": lambda factor, upper=False: jax.scipy.linalg.cho_solve(
        (factor, not upper), jnp.broadcast_to(jnp.eye(factor.shape[-1], dtype=factor.dtype), factor.shape)
    ),
    "linalg_solve_triangular": _solve_triangular, "linalg_lu_solve": _lu_solve, "_linalg_solve_ex": _solve_ex,
    "linalg_lu_factor_ex": _lu_factor_ex, "lu_unpack": _lu_unpack,
    "linalg_lu": lambda a, *, pivot=True: _lu_unpack(*_lu_factor_ex(a, pivot=pivot)[:2]), "linalg_pinv": _pinv,
    "linalg_householder_product": lax.linalg.householder_product, "triangular_solve": _triangular_solve,
    "_linalg_det": lambda a: (jnp.linalg.det(a), *_lu_factor(a)),
    "_linalg_slogdet": lambda a: (*jnp.linalg.slogdet(a), *_lu_factor(a)),
    "linalg_inv_ex": lambda a, *, check_errors=False: (jnp.linalg.inv(a), _success(a)),
    "_linalg_svd": _svd, "linalg_qr": _qr, "_linalg_eigh": _eigh, "linalg_matrix_exp": jax.scipy.linalg.expm,
    "_fft_r2c": _fft_r2c, "_fft_c2c": _fft_c2c, "_fft_c2r": _fft_c2r,
    "complex": lambda real, imag: lax.complex(*jnp.broadcast_arrays(real, imag)),
    "polar": lambda radius, angle: lax.complex(radius * jnp.cos(angle), radius * jnp.sin(angle)),
    "view_as_real": lambda x: jnp.stack([x.real, x.imag], -1),
    "view_as_complex": lambda x: lax.complex(x[..., 0], x[..., 1]),
    "_conj": jnp.conj, "_conj_physical": jnp.conj, "angle": _angle, "sgn": sign,
}  # fmt: skip
