"""Count the model FLOPs of a traced program: matrix products and convolutions, two for each multiply and add.

The count has forward and backward pass, all iterations of loops, over all devices. It has no recomputation
(`jax.checkpoint`) and no elementwise work such as the optimizer's. Attention counts its whole square in any kernel,
causal or not, as the usual formula does (6 N + 12 L H Q T per token: Chowdhery et al. 2022, PaLM, appendix B). The
compiler's own count has only one iteration of a loop.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import starmap
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, jaxprs_in_params
from jax.interpreters.partial_eval import dce_jaxpr

from tpuswarm.train.user_code import CodeLine, is_recipe_file, recipe_line

STATED = re.compile(r"\bmodel_flops_(\d+)")
"""Scope of `stated_flops`."""

RECOMPUTED = "rematted_computation"
"""JAX's scope of recomputation in the backward pass of a checkpoint."""

UNCOUNTED = ("ffi_call", "cholesky", "eigh", "lu", "qr", "svd", "triangular_solve", "scaled_matmul", "cudnn_fusion")
"""Primitives with an unknown number of matrix products."""

ATTENTION = "attention"
"""Kind of the products inside an attention kernel."""

CUDNN_BTNH = 0
"""Layout of cuDNN's attention with heads after tokens."""


@dataclass(frozen=True)
class Contraction:
    """The product of one equation: `rows` x `contracted` times `contracted` x `columns`."""

    kind: str
    """`dot`, `convolution` or `attention` (in a kernel)."""
    flops: int
    rows: tuple[int, ...]
    contracted: tuple[int, ...]
    columns: tuple[int, ...]
    """Sizes of the axes of each dimension, of the whole batch, before any sharding."""
    leading: tuple[int, int, int] = (0, 0, 0)
    """Length of an operand's first axis, if it is part of rows, contracted or columns; else 0."""


@dataclass(frozen=True, kw_only=True)
class Product(Contraction):
    """A matrix product or convolution of a program; flops: of one step, over all devices and iterations of loops."""

    dtypes: tuple[Any, ...]
    """Dtypes of the operands."""
    trace: Any
    """JAX's traceback of the recipe's call."""
    scope: str
    """JAX's name stack: forward (`jvp()`), backward (`transpose(jvp())`), named scopes."""

    @property
    def place(self) -> CodeLine | None:
        """Line of the recipe, if there is one."""
        return recipe_line(self.trace)


@dataclass(frozen=True)
class Flops:
    """Products of one call of a program, over all devices."""

    products: tuple[Product, ...]
    unknown: tuple[str, ...]
    """Descriptions of operations that could not be counted, with their lines."""

    @cached_property
    def total(self) -> int:
        """Model FLOPs."""
        return sum(product.flops for product in self.products)

    @cached_property
    def least(self) -> int:
        """Fewest FLOPs of a program: half of attention kernels, which skip causally masked scores."""
        return sum(product.flops // (2 if product.kind == ATTENTION else 1) for product in self.products)


def stated_flops(flops: int) -> AbstractContextManager[None]:
    """Return a scope in which a product, and each of its gradients, counts `flops`.

    It has no effect on products in loops, checkpoints or jitted functions inside the scope, nor under `vmap`. For a
    form that multiplies by zeros, to suit the hardware.
    """
    return jax.named_scope(f"model_flops_{flops}")


def model_flops(program: ClosedJaxpr) -> Flops:
    """Return the FLOPs of one call of `program`, a traced function (`jax.jit(f).trace(...).jaxpr`).

    A `cond` counts its largest branch. A `while` loop and an opaque call count nothing and appear in `unknown`. A
    checkpoint counts too little if only its gradient is used, or if its recomputation alone is differentiated.
    """
    live, _ = dce_jaxpr(program.jaxpr, [True] * len(program.jaxpr.outvars))
    unknown: dict[str, None] = {}
    products = tuple(_products(live, 1, None, unknown))
    return Flops(products, tuple(unknown))


def _products(jaxpr: Jaxpr, times: int, caller: Any, unknown: dict[str, None]) -> Iterator[Product]:
    """Yield the products of `jaxpr` called `times` times; `caller` replaces their tracebacks."""
    for equation in jaxpr.eqns:
        if RECOMPUTED in str(equation.source_info.name_stack):
            continue
        name, params = equation.primitive.name, equation.params
        count = _counter(equation)
        if count is not None:
            shape, source = count(equation), equation.source_info
            stated = STATED.search(str(source.name_stack))
            yield Product(
                **vars(shape) | {"flops": times * (int(stated[1]) if stated else shape.flops)},
                dtypes=tuple(v.aval.dtype for v in equation.invars if hasattr(v.aval, "dtype")),
                trace=caller or source.traceback,
                scope=str(source.name_stack),
            )
        elif name == "pallas_call" or name in UNCOUNTED:
            unknown[f"{params.get('name') or params.get('target_name') or name}{_at(equation, caller)}"] = None
        elif name == "cond":
            branches = [list(_products(branch.jaxpr, times, caller, unknown)) for branch in params["branches"]]
            yield from max(branches, key=lambda products: sum(product.flops for product in products))
        elif name == "while":
            bodies = (params["cond_jaxpr"].jaxpr, params["body_jaxpr"].jaxpr)
            if any(list(_products(body, 1, caller, unknown)) for body in bodies):
                unknown[f"a while loop with matrix products, its turns unknown{_at(equation, caller)}"] = None
        else:
            for body in jaxprs_in_params(params):
                repetitions = times * _repetitions(name, params)
                yield from _products(body, repetitions, library_caller(body, equation, caller), unknown)


def _counter(equation: JaxprEqn) -> Callable[[JaxprEqn], Contraction] | None:
    if equation.primitive.name != "pallas_call":
        return PRIMITIVES.get(equation.primitive.name)
    kernel = str(equation.params["name"])
    return next((count for start, count in KERNELS.items() if kernel.startswith(start)), None)


def _repetitions(name: str, params: Mapping[str, Any]) -> int:
    if name == "scan":
        return int(params["length"])
    if name == "shard_map":
        axes = "newly_manual_axes" if "newly_manual_axes" in params else "manual_axes"  # by JAX's version
        return math.prod(params["mesh"].shape[axis] for axis in params[axes])
    return 1


def library_caller(body: Jaxpr, equation: JaxprEqn, caller: Any) -> Any:
    """Return the traceback of a call into a library, for the equations of its `body`; else `caller`.

    JAX traces a jitted library function (jnp.einsum) once for all its callers, so lines inside it may belong to
    another. A library function mapped over devices (an attention kernel) is traced without a recipe's lines.
    """
    file = body.debug_info.func_filename
    is_library = equation.primitive.name in ("jit", "pjit", "shard_map") and not (file and is_recipe_file(file))
    return equation.source_info.traceback if caller is None and is_library else caller


def _at(equation: JaxprEqn, caller: Any) -> str:
    place = recipe_line(caller or equation.source_info.traceback)
    return f" ({place})" if place else ""


def _shape(variable: Any) -> tuple[int, ...]:
    return variable.aval.shape


def _dot(equation: JaxprEqn) -> Contraction:
    """Count a product. In a ragged one, each group of rows has its own matrix."""
    ragged: Any = equation.params.get("ragged_dot_dimension_numbers")
    groups = ragged.rhs_group_dimensions if ragged else ()
    numbers = ragged.dot_dimension_numbers if ragged else equation.params["dimension_numbers"]
    (left, right), (left_batch, right_batch) = numbers
    lhs, rhs = map(_shape, equation.invars[:2])
    contracted = tuple(lhs[axis] for axis in left)
    rows = tuple(size for axis, size in enumerate(lhs) if axis not in (*left, *left_batch))
    columns = tuple(size for axis, size in enumerate(rhs) if axis not in (*right, *right_batch, *groups))
    first = (
        lhs[0] if 0 not in (*left, *left_batch) else 0,
        lhs[0] if 0 in left else 0,
        rhs[0] if 0 not in (*right, *right_batch) else 0,
    )
    return Contraction("dot", 2 * math.prod(lhs) * math.prod(columns), rows, contracted, columns, first)


def _convolution(equation: JaxprEqn) -> Contraction:
    """Count a convolution without taps on padding or between dilated elements, so gradients count as much."""
    params = equation.params
    numbers = params["dimension_numbers"]
    lhs, rhs, out = map(_shape, (*equation.invars, *equation.outvars))
    batch, features, *space = (out[axis] for axis in numbers.out_spec)
    inputs, *kernel = (rhs[axis] for axis in numbers.rhs_spec[1:])
    sizes = [lhs[axis] for axis in numbers.lhs_spec[2:]]
    taps = math.prod(
        starmap(
            _taps,
            zip(
                sizes, kernel, space, params["window_strides"], params["padding"],
                params["lhs_dilation"], params["rhs_dilation"], strict=True,
            ),
        )
    )  # fmt: skip
    flops = 2 * batch * features * inputs * taps
    groups = params["feature_group_count"] * params["batch_group_count"]
    return Contraction(
        "convolution", flops, (batch, *space), (inputs, *kernel), (features // groups,), (batch, inputs, 0)
    )


def _taps(size: int, kernel: int, out: int, stride: int, padding: tuple[int, int], spread: int, dilation: int) -> int:
    """Return the number of pairs of output position and kernel tap that meet an input element, along one axis."""
    at = np.arange(out)[:, None] * stride + np.arange(kernel)[None] * dilation - padding[0]
    return int(((at >= 0) & (at <= (size - 1) * spread) & (at % spread == 0)).sum())


def _attention(equation: JaxprEqn, products: int) -> Contraction:
    """Count an attention kernel: two products forward, four backward without recomputation.

    Its first floating-point operands are queries ...xTxK, keys ...xSxK and values ...xSxV.
    """
    operands: list[Any] = [v.aval for v in equation.invars]
    q, k, v = [operand.shape for operand in operands if jnp.issubdtype(operand.dtype, jnp.inexact)][:3]
    if equation.params.get("layout") == CUDNN_BTNH:
        q, k, v = ((B, N, T, K) for B, T, N, K in (q, k, v))
    T, K, S, V = q[-2], q[-1], k[-2], v[-1]
    once = math.prod(q[:-2]) * T * S * (K + V)  # mean of a product with K and one with V, two FLOPs each
    return Contraction(ATTENTION, products * once, (T,), (K,), (S,))


PRIMITIVES: Mapping[str, Callable[[JaxprEqn], Contraction]] = {
    "dot_general": _dot,
    "ragged_dot_general": _dot,
    "conv_general_dilated": _convolution,
    "dot_product_attention_fwd_wrapper": partial(_attention, products=2),
    "dot_product_attention_bwd_wrapper": partial(_attention, products=4),
}
"""Counting functions by primitive; the last two are cuDNN's attention."""

KERNELS: Mapping[str, Callable[[JaxprEqn], Contraction]] = {
    f"splash_{heads}_{part}": partial(_attention, products=products)
    for heads in ("mha", "mqa")
    for part, products in (("fwd", 2), ("dkv", 4), ("dq", 0))
}
"""Counting functions by the start of a Pallas kernel's name. Not every backward pass has a dq kernel, so dkv counts
all four products."""
