"""Decompositions of small matrices, what torch's backward pass solves with them, and Fourier transforms."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tpuswarm.torch.ops.dtypes import as_float
from tpuswarm.torch.ops.pointwise import sign


def _adjoint(a: Any) -> Any:
    return jnp.conj(jnp.swapaxes(a, -1, -2))


def _fine(a: Any) -> Any:
    """torch's word that a decomposition was found; where it was not, its numbers are NaN here."""
    return jnp.zeros(a.shape[:-2], jnp.int32)


def cholesky(a: Any, *, upper: bool = False, check_errors: bool = False) -> Any:
    """The triangle, and that it was found."""
    found = jnp.linalg.cholesky(_adjoint(a) if upper else a, symmetrize_input=False)  # it reads one triangle alone
    return (_adjoint(found) if upper else found), _fine(a)


def triangular(a: Any, b: Any, *, upper: bool, left: bool = True, unitriangular: bool = False) -> Any:
    """x with a @ x = b, or x @ a = b."""
    lead = jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a, b = (jnp.broadcast_to(each, (*lead, *each.shape[-2:])) for each in (a, b))
    return lax.linalg.triangular_solve(a, b, left_side=left, lower=not upper, unit_diagonal=unitriangular)


def _factors(a: Any) -> tuple[Any, Any]:
    lu, pivots, _ = lax.linalg.lu(a)
    return lu, pivots + 1  # torch counts from 1


def lu_solve(lu: Any, pivots: Any, b: Any, *, left: bool = True, adjoint: bool = False) -> Any:
    """x with a @ x = b, or x @ a = b, by the factors of a."""
    if not left:
        return _adjoint(lu_solve(lu, pivots, _adjoint(b), adjoint=not adjoint))
    lead = jnp.broadcast_shapes(lu.shape[:-2], b.shape[:-2])
    lu, pivots = jnp.broadcast_to(lu, (*lead, *lu.shape[-2:])), jnp.broadcast_to(pivots, (*lead, pivots.shape[-1]))
    b = jnp.broadcast_to(b, (*lead, *b.shape[-2:]))
    return jax.scipy.linalg.lu_solve((lu, pivots - 1), b, trans=2 if adjoint else 0)


def solve(a: Any, b: Any, *, left: bool = True, check_errors: bool = False) -> Any:
    """The solution, the factors, and that they were found."""
    lu, pivots = _factors(a)
    vector = b.ndim == 1 or (b.ndim == a.ndim - 1 and b.shape == a.shape[:-1])
    found = lu_solve(lu, pivots, b[..., None] if vector else b, left=left or vector)
    return (found[..., 0] if vector else found), lu, pivots, _fine(a)


def determinant(a: Any) -> Any:
    """It and the factors."""
    return jnp.linalg.det(a), *_factors(a)


def log_determinant(a: Any) -> Any:
    """Its sign, its logarithm and the factors."""
    sign, log = jnp.linalg.slogdet(a)
    return sign, log, *_factors(a)


def svd(a: Any, full_matrices: bool = False, compute_uv: bool = True, *, driver: str | None = None) -> Any:
    """U, S, Vh."""
    if compute_uv:
        return tuple(jnp.linalg.svd(a, full_matrices=full_matrices))
    return jnp.zeros((0,), a.dtype), jnp.linalg.svd(a, compute_uv=False), jnp.zeros((0,), a.dtype)


def eigh(a: Any, UPLO: str = "L", compute_v: bool = True) -> Any:  # ATen's name
    """Values and vectors of a symmetric matrix."""
    values, vectors = jnp.linalg.eigh(a, UPLO=UPLO, symmetrize_input=False)
    return values, vectors if compute_v else jnp.zeros((0,), a.dtype)


def qr(a: Any, mode: str = "reduced") -> Any:
    """Q and R; without Q in the mode "r"."""
    found = jnp.linalg.qr(a, mode)
    return (jnp.zeros((0,), a.dtype), found) if mode == "r" else tuple(found)


def angle(x: Any) -> Any:
    """Of complex numbers; of real ones 0 or pi."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return jnp.angle(x)
    x = as_float(x)
    return jnp.where(x != x, x, jnp.where(x < 0, jnp.pi, 0)).astype(x.dtype)


def complex_(real: Any, imaginary: Any) -> Any:
    """Of two arrays."""
    return lax.complex(*jnp.broadcast_arrays(real, imaginary))


NORMS = {0: "backward", 1: "ortho", 2: "forward"}
"""Of a transform forwards, by ATen's number."""


def _transform(function: Callable[..., Any], x: Any, dims: Sequence[int], norm: int, forward: bool, **more: Any) -> Any:
    kinds = NORMS if forward else {0: "forward", 1: "ortho", 2: "backward"}
    return function(x, axes=tuple(dims), norm=kinds[norm], **more)


def real_transform(x: Any, dims: Sequence[int], norm: int, onesided: bool) -> Any:
    """Of real numbers."""
    return _transform(jnp.fft.rfftn if onesided else jnp.fft.fftn, x, dims, norm, True)


def complex_transform(x: Any, dims: Sequence[int], norm: int, forward: bool) -> Any:
    """Of complex numbers, forwards or back."""
    return _transform(jnp.fft.fftn if forward else jnp.fft.ifftn, x, dims, norm, forward)


def transform_to_real(x: Any, dims: Sequence[int], norm: int, last: int) -> Any:
    """Back to real numbers, so many along the last axis."""
    sizes = [*(x.shape[dim] for dim in dims[:-1]), last]
    return _transform(jnp.fft.irfftn, x, dims, norm, False, s=sizes)


OPS: dict[str, Callable[..., Any]] = {
    "linalg_cholesky_ex": cholesky, "cholesky": lambda a, upper=False: cholesky(a, upper=upper)[0],
    "cholesky_solve": lambda b, factor, upper=False: jax.scipy.linalg.cho_solve((factor, not upper), b),
    "linalg_solve_triangular": triangular, "linalg_lu_solve": lu_solve,
    "_linalg_solve_ex": solve, "_linalg_det": determinant, "_linalg_slogdet": log_determinant,
    "linalg_inv_ex": lambda a, *, check_errors=False: (jnp.linalg.inv(a), _fine(a)), "_linalg_svd": svd,
    "linalg_qr": qr, "_linalg_eigh": eigh,
    "linalg_matrix_exp": jax.scipy.linalg.expm, "_fft_r2c": real_transform, "_fft_c2c": complex_transform,
    "_fft_c2r": transform_to_real, "view_as_real": lambda x: jnp.stack([x.real, x.imag], -1),
    "view_as_complex": lambda x: lax.complex(x[..., 0], x[..., 1]), "complex": complex_, "real": jnp.real,
    "imag": jnp.imag, "_conj": jnp.conj, "conj_physical": jnp.conj, "_conj_physical": jnp.conj,
    "resolve_conj": lambda x: x,
    "resolve_neg": lambda x: x, "angle": angle, "sgn": sign, "polar": lambda r, at: lax.complex(
        r * jnp.cos(at), r * jnp.sin(at)
    ),
}  # fmt: skip
"""By name."""
