"""Find products of float32 operands in a step that should compute in bfloat16."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Literal, jaxprs_in_params

from tpuswarm.config.formatting import MIN_SHOWN_SHARE
from tpuswarm.train.program.compiled import Compiled
from tpuswarm.train.program.flops import PRIMITIVES, library_caller
from tpuswarm.train.program.jax_versions import scan_counts
from tpuswarm.train.user_code import CodeLine, recipe_line

MIN_SHARE = 0.01
"""Smallest reported share of all FLOPs, at one line."""

Inputs = frozenset[str]
"""Names of batch arrays that make a value float32."""
NO_INPUTS: Inputs = frozenset()
ALWAYS: Inputs = frozenset([""])
"""Cause of values that are always float32: the state, products with float32 results."""
Found = defaultdict[CodeLine | None, set[Inputs]]


@dataclass(frozen=True)
class Float32Products:
    """Products of one line whose operands are all float32."""

    place: CodeLine | None
    share: float
    """Share of the step's FLOPs."""
    inputs: tuple[str, ...]
    """Float32 arrays of the batch that cause these products."""

    def __str__(self) -> str:
        part = "nearly all" if 1 - MIN_SHOWN_SHARE < self.share < 1 else f"{self.share:.0%} of all"
        products = f"float32 matrix products, {part} FLOPs, although bf16 was requested"
        if self.inputs:
            given = ", ".join(f'"{name}"' for name in self.inputs)
            reason = f"because of float32 {' and '.join(self.inputs)} in the batch"
            return f"{products}, {reason}; give supervised cast=[{given}]"
        cost = "twice the bytes, and several passes of the matrix unit at higher precision"
        return f"{products}: {cost}; cast the operands to bfloat16"


def float32_products(compiled: Compiled) -> list[Float32Products]:
    """Return the products by line, most FLOPs first; none without bf16.

    Products with only one float32 operand count only if an input causes them: gradients of a float32 loss are usual.
    """
    if compiled.options.precision != "bf16":
        return []
    inputs = _responsible_inputs(compiled)
    found: Counter[CodeLine | None] = Counter()
    for product in compiled.flops.products:
        whole = [dtype == jnp.float32 for dtype in product.dtypes]
        if whole and (all(whole) or (any(whole) and product.place in inputs)):
            found[product.place] += product.flops
    shares = [
        Float32Products(place, count / compiled.flops.total, tuple(sorted(inputs.get(place, NO_INPUTS))))
        for place, count in found.most_common()
        if count
    ]
    return [products for products in shares if products.share >= MIN_SHARE]


def _responsible_inputs(compiled: Compiled) -> Mapping[CodeLine | None, Inputs]:
    """Return for each line with float32 products the batch arrays that alone cause them."""
    found: Found = defaultdict(set)
    step, inputs = compiled.jaxpr.jaxpr, sorted(compiled.program.batch_spec(1))  # arguments: state, batch, clock
    names = [ALWAYS] * len(jax.tree.leaves(compiled.state)) + [frozenset([name]) for name in inputs]
    names += [ALWAYS] * (len(step.invars) - len(names))
    _trace_inputs(step, names, None, found)
    all_causes: set[Inputs] = set().union(*found.values())
    # A target that meets a float32 prediction is no cause of the products in the prediction's gradient.
    minimal = [cause for cause in all_causes if not any(other < cause for other in all_causes)]
    return {
        place: NO_INPUTS.union(*(cause for cause in minimal if any(cause <= other for other in causes)))
        for place, causes in found.items()
    }


def _trace_inputs(jaxpr: Jaxpr, names: Sequence[Inputs], caller: Any, found: Found) -> list[Inputs]:
    """Return the causes of each result of `jaxpr`, given the causes of its arguments in `names`."""
    known: dict[Any, Inputs] = dict(zip(jaxpr.invars, names, strict=True))

    def causes_of(variable: Any) -> Inputs:
        is_float32 = not isinstance(variable, Literal) and getattr(variable.aval, "dtype", None) == jnp.float32
        return known.get(variable, NO_INPUTS) if is_float32 else NO_INPUTS

    for equation in jaxpr.eqns:
        taken = [causes_of(variable) for variable in equation.invars]
        reached = NO_INPUTS.union(*taken)
        if equation.primitive.name in PRIMITIVES:
            reached = reached or ALWAYS
            if not reached & ALWAYS:
                found[recipe_line(caller or equation.source_info.traceback)].add(reached)
        results = _trace_call(equation, taken, caller, found) or [reached] * len(equation.outvars)
        known.update(zip(equation.outvars, results, strict=True))
    return [causes_of(variable) for variable in jaxpr.outvars]


def _trace_call(equation: JaxprEqn, taken: list[Inputs], caller: Any, found: Found) -> list[Inputs] | None:
    """Return the causes of each result of an equation that calls a program; None for other equations."""
    params, total = equation.params, None
    first, carried = params.get("body_nconsts"), len(equation.outvars)  # of a while loop
    if equation.primitive.name == "scan":
        first, carried = scan_counts(equation)
    for body in jaxprs_in_params(params):
        if len(body.outvars) != len(equation.outvars) or len(body.invars) > len(taken):
            continue
        # Arguments that a body does not take come first: index of a branch, constants of a loop's condition.
        names = taken[len(taken) - len(body.invars) :]
        results = _trace_inputs(body, names, library_caller(body, equation, caller), found)
        if first is not None:  # the next iteration takes the results of this one
            after = [
                *names[:first],
                *(old | new for old, new in zip(names[first:], results[:carried], strict=False)),
                *names[first + carried :],
            ]
            if after != names:
                return _trace_call(equation, taken[: len(taken) - len(after)] + after, caller, found)
        total = results if total is None else [old | new for old, new in zip(total, results, strict=True)]
    return total
