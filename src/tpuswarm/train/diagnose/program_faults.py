"""Find faults of a program before its first step, in its jaxprs: nothing is computed."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxprs_in_params

from tpuswarm.catalog import generation_of
from tpuswarm.train.diagnose.finding import Finding
from tpuswarm.train.paths import leaf_paths
from tpuswarm.train.process.numerics import run_key
from tpuswarm.train.program.compiled import Compiled
from tpuswarm.train.program.float32 import float32_products
from tpuswarm.train.program.flops import Flops
from tpuswarm.train.program.jax_versions import scan_counts
from tpuswarm.train.program.rounding import MAX_TERMS, is_long_sum
from tpuswarm.train.program.underfilled import underfilled
from tpuswarm.train.recipe import Batch, Program, State
from tpuswarm.train.user_code import recipe_line

MAX_NAMED = 3
"""Parameters or products that a finding names."""
NO_GRADIENT = (
    "no gradient reaches {}, so they are not trained: give running statistics in extra=, name constants in --freeze, "
    "and remove unused ones"
)
ROUNDED = (
    "the gradient of {} adds up in bfloat16 over more than 256 steps of a loop, which loses small terms: name them in "
    "float32=, or cast them in the loop"
)
CALLBACKS = {
    "debug_print": "jax.debug.print",
    "debug_callback": "jax.debug.callback",
    "pure_callback": "jax.pure_callback",
    "io_callback": "io_callback",
}


def tied_weights(program: Program) -> list[Finding]:
    """Return pairs of matrices that `init` makes from one array; they diverge at the first step.

    A pytree can hold one array twice; jax.jit, or saving and restoring, makes two of it. PyTorch models on TPU had the
    same fault (Lightning issue 2705). Arrays loaded from outside are compared by content. Vectors and constants often
    start equal for good reason and do not count.
    """
    get = program.exchange().get
    paths: list[str] = []

    def parameters(key: jax.Array) -> Any:
        tree = get(program.init(key))
        paths.extend(leaf_paths(tree))
        return jax.tree.leaves(tree)

    traced = jax.make_jaxpr(parameters)(jax.eval_shape(lambda: run_key(0)))
    loaded = dict(zip(traced.jaxpr.constvars, traced.consts, strict=True))
    constant = {
        equation.outvars[0]
        for equation in traced.jaxpr.eqns
        if equation.primitive.name == "broadcast_in_dim" and isinstance(equation.invars[0], Literal)
    }
    leaves = [
        (path, leaf)
        for path, leaf in zip(paths, traced.jaxpr.outvars, strict=True)
        if len(leaf.aval.shape) >= 2 and leaf not in constant
    ]

    def is_tied(leaf: Any, other: Any) -> bool:
        return _is_equal(loaded[leaf], loaded.get(other)) if leaf in loaded else leaf is other

    return [
        _tied(path, other_path, leaf.aval)
        for (path, leaf), (other_path, other) in itertools.combinations(leaves, 2)
        if leaf.aval == other.aval and is_tied(leaf, other)
    ]


def _is_equal(array: Any, other: Any) -> bool:
    """Return whether two loaded arrays have equal content, unless it is one number throughout."""
    if other is None or not np.array_equal(array[:1], other[:1]):
        return False
    content = np.asarray(array)
    return bool((content != content.flat[0]).any()) and (array is other or np.array_equal(content, other))


def _tied(path: str, other: str, aval: Any) -> Finding:
    shape = "x".join(map(str, aval.shape))
    return Finding(
        "tied-weights",
        f"{path} and {other} start as one {shape} array but are two parameters: each follows its own gradient, so they "
        f"diverge at the first step; to tie them, keep only {path} and use it in both places in the loss",
        {"parameters": [path, other], "shape": list(aval.shape)},
    )


@runtime_checkable
class GivesGradient(Protocol):
    """A program that gives the gradient of a batch by its trained parameters."""

    def batch_gradient(self, state: State, batch: Batch, key: jax.Array) -> Any:
        """Return a tree of arrays."""
        ...


def gradients(compiled: Compiled, micro_batch: int) -> list[Finding]:
    """Return parameters whose gradient is always 0, and those whose gradient is a long sum in bfloat16.

    micro_batch: rows, over all devices.
    """
    program = compiled.program
    if not isinstance(program, GivesGradient):
        return []
    rows, key = dict(program.batch_spec(micro_batch)), jax.eval_shape(lambda: run_key(0))
    paths: list[str] = []

    def gradient(state: Any, rows: Any, key: jax.Array) -> list[jax.Array]:
        tree = program.batch_gradient(state, rows, key)
        paths.extend(leaf_paths(tree))
        return jax.tree.leaves(tree)

    with jax.sharding.use_abstract_mesh(compiled.mesh.abstract_mesh):
        traced = jax.make_jaxpr(gradient)(compiled.state, rows, key)
    leaves = list(zip(paths, traced.jaxpr.outvars, strict=True))
    makers = _makers(traced.jaxpr)
    zero = [path for path, leaf in leaves if _is_zero(leaf, makers)]
    rounded = [path for path, leaf in leaves if _is_long_sum(leaf, makers)]
    return [
        *([_about_parameters("no-gradient", zero, NO_GRADIENT)] if zero else []),
        *([_about_parameters("bfloat16-sum", rounded, ROUNDED)] if rounded else []),
    ]


def _about_parameters(kind: str, paths: list[str], sentence: str) -> Finding:
    more = f" and {len(paths) - MAX_NAMED} more" if len(paths) > MAX_NAMED else ""
    return Finding(kind, sentence.format(", ".join(paths[:MAX_NAMED]) + more), {"parameters": paths})


def _makers(jaxpr: Jaxpr) -> dict[Var, JaxprEqn]:
    return {variable: equation for equation in jaxpr.eqns for variable in equation.outvars}


def _is_zero(leaf: Any, makers: dict[Var, JaxprEqn]) -> bool:
    if isinstance(leaf, Literal):
        return bool(leaf.val == 0)
    maker = makers.get(leaf)
    return maker is not None and maker.primitive.name == "broadcast_in_dim" and _is_zero(maker.invars[0], {})


def _is_long_sum(leaf: Any, makers: dict[Var, JaxprEqn]) -> bool:
    """Return whether a result is a bfloat16 sum of many bfloat16 numbers, possibly reshaped or cast."""
    while not isinstance(leaf, Literal) and (maker := makers.get(leaf)) is not None:
        if is_long_sum(maker) or _accumulates(maker, leaf):
            return True
        if maker.primitive.name in ("jit", "pjit", "scan", "remat2"):
            inner = maker.params["jaxpr"]
            body = inner.jaxpr if isinstance(inner, ClosedJaxpr) else inner
            leaf, makers = body.outvars[maker.outvars.index(leaf)], _makers(body)
        elif maker.primitive.name in ("convert_element_type", "reshape", "squeeze", "copy", "transpose", "neg"):
            leaf = maker.invars[0]
        else:
            return False
    return False


def _accumulates(loop: JaxprEqn, leaf: Any) -> bool:
    """Return whether each step of a loop adds to a result, as to the gradient of a recurrent layer."""
    if loop.primitive.name != "scan" or loop.params["length"] <= MAX_TERMS or leaf.aval.dtype != jnp.bfloat16:
        return False
    carry, body = loop.outvars.index(leaf), loop.params["jaxpr"].jaxpr
    constants, carried = scan_counts(loop)
    if carry >= carried:
        return False
    before, after = body.invars[constants + carry], body.outvars[carry]
    maker = None if isinstance(after, Literal) else _makers(body).get(after)
    return maker is not None and maker.primitive.name in ("add", "add_any") and before in maker.invars


def host_callbacks(step: ClosedJaxpr) -> list[Finding]:
    """Return one finding for each line of the recipe that calls back to Python, which stops the devices."""
    calls = {
        (CALLBACKS[equation.primitive.name], str(recipe_line(equation.source_info.traceback) or "a library"))
        for equation in _equations(step.jaxpr)
        if equation.primitive.name in CALLBACKS
    }
    return [
        Finding(
            "host-callback",
            f"{line} calls {name} in every step: the devices stop until Python answers; compute it in JAX, return it "
            "as a metric, or remove it once the bug is found",
            {"place": line, "call": name},
        )
        for name, line in sorted(calls, key=lambda call: call[1])
    ]


def _equations(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    for equation in jaxpr.eqns:
        yield equation
        for body in jaxprs_in_params(equation.params):
            yield from _equations(body)


def float32_in_bf16(compiled: Compiled) -> list[Finding]:
    """Return the most costly products in float32 of a program that should compute in bf16."""
    return _about_products("precision", float32_products(compiled))


def half_empty(flops: Flops, device_kind: str, batch: int, devices: int) -> list[Finding]:
    """Return the most costly products that leave a TPU's matrix unit half empty. batch: rows of a micro-batch."""
    generation = generation_of(device_kind)
    if not generation:
        return []
    return _about_products("matrix-unit", underfilled(flops, generation.matrix_unit, batch, devices))


def _about_products(kind: str, products: Sequence[Any]) -> list[Finding]:
    return [
        Finding(kind, f"{product.place or 'the step'}: {product}", vars(product) | {"place": str(product.place)})
        for product in products[:MAX_NAMED]
    ]
