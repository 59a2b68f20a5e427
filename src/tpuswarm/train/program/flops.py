"""Model FLOPs of a traced program: matrix products and convolutions, two FLOPs for each multiply and add.

Counted is what the model asks for: forward and backward pass, loops multiplied out, over all devices. Recomputation
(`jax.checkpoint`) is not counted, nor is elementwise work such as the optimizer's. Attention counts its whole square,
causal or not, as the usual formula does (6 N + 12 L H Q T a token: Chowdhery et al. 2022, PaLM, appendix B), whichever
kernel computes it. The compiler's own count will not do: it counts a loop's body once.
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
"""The scope that `stated` opens."""

RECOMPUTED = "rematted_computation"
"""JAX's name for the scope of what a checkpoint computes again in the backward pass."""

UNCOUNTED = ("ffi_call", "cholesky", "eigh", "lu", "qr", "svd", "triangular_solve", "scaled_matmul", "cudnn_fusion")
"""Primitives that may hold matrix products and do not say how many."""

ATTENTION = "attention"
"""The kind of products inside an attention kernel."""

CUDNN_BTNH = 0
"""The layout of cuDNN's attention in which heads come after tokens."""


@dataclass(frozen=True)
class Shape:
    """What one equation computes: `rows` x `contracted` times `contracted` x `columns`."""

    kind: str
    """`dot`, `convolution` or `attention` (in a kernel)."""
    flops: int
    rows: tuple[int, ...]
    contracted: tuple[int, ...]
    columns: tuple[int, ...]
    """Sizes of the axes that make each dimension, as the program has them: of the whole batch, before any sharding."""
    leading: tuple[int, int, int] = (0, 0, 0)
    """Of rows, contracted and columns: length of an operand's first axis where it is part of them, else 0."""


@dataclass(frozen=True, kw_only=True)
class Product(Shape):
    """A matrix product or convolution of a program; its flops are of one step, over all devices and turns of loops."""

    dtypes: tuple[Any, ...]
    """Of the operands."""
    trace: Any
    """JAX's traceback of the call that the recipe made."""
    scope: str
    """JAX's name for where it belongs: forward (`jvp()`), backward (`transpose(jvp())`), named scopes."""

    @property
    def place(self) -> CodeLine | None:
        """Line of the recipe; None where no line of a recipe led to it."""
        return recipe_line(self.trace)


@dataclass(frozen=True)
class Flops:
    """What one call of a program computes, over all devices."""

    products: tuple[Product, ...]
    unknown: tuple[str, ...]
    """What could not be counted, each in a few words with its place."""

    @cached_property
    def total(self) -> int:
        """Model FLOPs."""
        return sum(product.flops for product in self.products)

    @cached_property
    def least(self) -> int:
        """FLOPs that no program can skip: of an attention kernel half, for it leaves out what a causal mask hides."""
        return sum(product.flops // (2 if product.kind == ATTENTION else 1) for product in self.products)


def stated(flops: int) -> AbstractContextManager[None]:
    """A scope in which a product counts `flops`, as does each of its gradients.

    Not one in a loop, a checkpoint or a jitted function in it, and not under `vmap`. For a form with more
    multiplications than the model has, by zeros, because the hardware likes it better.
    """
    return jax.named_scope(f"model_flops_{flops}")


def model_flops(program: ClosedJaxpr) -> Flops:
    """The FLOPs of one call of `program`, a traced function (`jax.jit(f).trace(...).jaxpr`).

    A `cond` counts its largest branch. A `while` loop, whose turns nobody knows, and a call that computes out of sight
    are named in `unknown` and count nothing. Where a checkpoint's gradient is used and its result is not, or where a
    recomputation is itself differentiated apart from its first pass, the checkpoint counts less than it would without.
    """
    live, _ = dce_jaxpr(program.jaxpr, [True] * len(program.jaxpr.outvars))
    unknown: dict[str, None] = {}
    products = tuple(_products(live, 1, None, unknown))
    return Flops(products, tuple(unknown))


def _products(jaxpr: Jaxpr, times: int, caller: Any, unknown: dict[str, None]) -> Iterator[Product]:
    """The products of `jaxpr` called `times` times; `caller`, where given, is the traceback of them all."""
    for equation in jaxpr.eqns:
        if RECOMPUTED in str(equation.source_info.name_stack):
            continue
        name, params = equation.primitive.name, equation.params
        count = _counter(equation)
        if count is not None:
            shape, source = count(equation), equation.source_info
            said = STATED.search(str(source.name_stack))
            yield Product(
                **vars(shape) | {"flops": times * (int(said[1]) if said else shape.flops)},
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
                turns = times * _turns(name, params)
                yield from _products(body, turns, library_caller(body, equation, caller), unknown)


def _counter(equation: JaxprEqn) -> Callable[[JaxprEqn], "Shape"] | None:
    if equation.primitive.name != "pallas_call":
        return PRIMITIVES.get(equation.primitive.name)
    kernel = str(equation.params["name"])
    return next((count for start, count in KERNELS.items() if kernel.startswith(start)), None)


def _turns(name: str, params: Mapping[str, Any]) -> int:
    if name == "scan":
        return int(params["length"])
    if name == "shard_map":
        axes = "newly_manual_axes" if "newly_manual_axes" in params else "manual_axes"  # by JAX's version
        return math.prod(params["mesh"].shape[axis] for axis in params[axes])
    return 1


def library_caller(body: Jaxpr, equation: JaxprEqn, caller: Any) -> Any:
    """The traceback of a call into a library, for the equations of its `body`; None where the recipe wrote them.

    JAX traces a jitted library function (jnp.einsum) once for all its callers: lines inside it may be another's. What
    a library splits over devices (an attention kernel) is traced where nobody's line is left.
    """
    file = body.debug_info.func_filename
    library = equation.primitive.name in ("jit", "pjit", "shard_map") and not (file and is_recipe_file(file))
    return equation.source_info.traceback if caller is None and library else caller


def _at(equation: JaxprEqn, caller: Any) -> str:
    place = recipe_line(caller or equation.source_info.traceback)
    return f" ({place})" if place else ""


def _shape(variable: Any) -> tuple[int, ...]:
    return variable.aval.shape


def _dot(equation: JaxprEqn) -> Shape:
    """Of a ragged one, whose rows come in groups, each with a matrix of its own, a row meets one of them."""
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
    return Shape("dot", 2 * math.prod(lhs) * math.prod(columns), rows, contracted, columns, first)


def _convolution(equation: JaxprEqn) -> Shape:
    """Taps that fall on padding or between dilated elements do not count, so both gradients count as the forward."""
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
    return Shape("convolution", flops, (batch, *space), (inputs, *kernel), (features // groups,), (batch, inputs, 0))


def _taps(size: int, kernel: int, out: int, stride: int, padding: tuple[int, int], spread: int, dilation: int) -> int:
    """Pairs of an output position and a kernel tap that meet an element of the input, along one axis."""
    at = np.arange(out)[:, None] * stride + np.arange(kernel)[None] * dilation - padding[0]
    return int(((at >= 0) & (at <= (size - 1) * spread) & (at % spread == 0)).sum())


def _attention(equation: JaxprEqn, products: int) -> Shape:
    """Queries ...xTxK, keys ...xSxK and values ...xSxV are the first floating-point operands of every such kernel.

    Forward has two products; backward has four: what it computes again of the forward counts nothing.
    """
    operands: list[Any] = [v.aval for v in equation.invars]
    q, k, v = [each.shape for each in operands if jnp.issubdtype(each.dtype, jnp.inexact)][:3]
    if equation.params.get("layout") == CUDNN_BTNH:
        q, k, v = ((B, N, T, K) for B, T, N, K in (q, k, v))
    T, K, S, V = q[-2], q[-1], k[-2], v[-1]
    once = math.prod(q[:-2]) * T * S * (K + V)  # the mean of a product with K and one with V, two FLOPs each
    return Shape(ATTENTION, products * once, (T,), (K,), (S,))


PRIMITIVES: Mapping[str, Callable[[JaxprEqn], Shape]] = {
    "dot_general": _dot,
    "ragged_dot_general": _dot,
    "conv_general_dilated": _convolution,
    "dot_product_attention_fwd_wrapper": partial(_attention, products=2),
    "dot_product_attention_bwd_wrapper": partial(_attention, products=4),
}
"""Primitive → what it computes; the last two are cuDNN's attention."""

KERNELS: Mapping[str, Callable[[JaxprEqn], Shape]] = {
    f"splash_{heads}_{part}": partial(_attention, products=products)
    for heads in ("mha", "mqa")
    for part, products in (("fwd", 2), ("dkv", 4), ("dq", 0))
}
"""Start of a Pallas kernel's name → what it computes. The queries' gradient has a kernel of its own or not: all four
products of the backward pass are counted with dkv, which is always there."""
