"""Products of float32 operands in a step that was to compute in bfloat16."""

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
from tpuswarm.train.user_code import CodeLine, recipe_line

SHARE = 0.01
"""Of all FLOPs: what is less at one line is noise."""

Inputs = frozenset[str]
NONE: Inputs = frozenset()
Found = defaultdict[CodeLine | None, set[Inputs]]
OWN: Inputs = frozenset([""])
"""In what is float32 whatever the inputs are: the state, products that were asked to give float32."""


@dataclass(frozen=True)
class Float32:
    """Products of one line whose operands are all float32."""

    place: CodeLine | None
    share: float
    """Of the step's FLOPs."""
    inputs: tuple[str, ...]
    """Arrays of the batch that are float32, and because of which the products are."""

    def __str__(self) -> str:
        part = "nearly all" if 1 - MIN_SHOWN_SHARE < self.share < 1 else f"{self.share:.0%} of all"
        products = f"float32 matrix products, {part} FLOPs, although bf16 was requested"
        if self.inputs:
            given = ", ".join(f'"{each}"' for each in self.inputs)
            reason = f"because of float32 {' and '.join(self.inputs)} in the batch"
            return f"{products}, {reason}; give supervised cast=[{given}]"
        cost = "twice the bytes, and several passes of the matrix unit at higher precision"
        return f"{products}: {cost}; cast the operands to bfloat16"


def float32_products(compiled: Compiled) -> list[Float32]:
    """The lines with most of them, first; none where bf16 was not asked.

    A product of one float32 operand is usual, as gradients of a float32 loss are; not where an input is the reason.
    """
    if compiled.options.precision != "bf16":
        return []
    because = _because(compiled)
    found: Counter[CodeLine | None] = Counter()
    for product in compiled.flops.products:
        whole = [dtype == jnp.float32 for dtype in product.dtypes]
        if whole and (all(whole) or (any(whole) and product.place in because)):
            found[product.place] += product.flops
    shares = [
        Float32(place, count / compiled.flops.total, tuple(sorted(because.get(place, NONE))))
        for place, count in found.most_common()
        if count
    ]
    return [each for each in shares if each.share >= SHARE]


def _because(compiled: Compiled) -> Mapping[CodeLine | None, Inputs]:
    """For each line with float32 products, the arrays of the batch that are the only reason for it."""
    found: Found = defaultdict(set)
    step, inputs = compiled.jaxpr.jaxpr, sorted(compiled.program.batch_spec(1))  # of (state, batch, clock)
    names = [OWN] * len(jax.tree.leaves(compiled.state)) + [frozenset([name]) for name in inputs]
    names += [OWN] * (len(step.invars) - len(names))
    _follow(step, names, None, found)
    every: set[Inputs] = set().union(*found.values())
    # A target meets a prediction that an input has made float32, and shares no blame for what that gradient computes.
    least = [each for each in every if not any(other < each for other in every)]
    return {
        place: NONE.union(*(each for each in least if any(each <= other for other in reached)))
        for place, reached in found.items()
    }


def _follow(jaxpr: Jaxpr, names: Sequence[Inputs], caller: Any, found: Found) -> list[Inputs]:
    """What of the inputs is in each result of `jaxpr`, given what is in its arguments."""
    known: dict[Any, Inputs] = dict(zip(jaxpr.invars, names, strict=True))

    def of(variable: Any) -> Inputs:
        keeps = not isinstance(variable, Literal) and getattr(variable.aval, "dtype", None) == jnp.float32
        return known.get(variable, NONE) if keeps else NONE

    for equation in jaxpr.eqns:
        taken = [of(variable) for variable in equation.invars]
        reached = NONE.union(*taken)
        if equation.primitive.name in PRIMITIVES:
            reached = reached or OWN
            if not reached & OWN:
                found[recipe_line(caller or equation.source_info.traceback)].add(reached)
        results = _results(equation, taken, caller, found) or [reached] * len(equation.outvars)
        known.update(zip(equation.outvars, results, strict=True))
    return [of(variable) for variable in jaxpr.outvars]


def _results(equation: JaxprEqn, taken: list[Inputs], caller: Any, found: Found) -> list[Inputs] | None:
    """As `_follow`, through what an equation calls; None where it calls nothing that has its results."""
    params, total = equation.params, None
    first = {"scan": params.get("num_consts", 0), "while": params.get("body_nconsts", 0)}.get(equation.primitive.name)
    for body in jaxprs_in_params(params):
        if len(body.outvars) != len(equation.outvars) or len(body.invars) > len(taken):
            continue
        # What a body does not take comes first: the index of a branch, the constants of a loop's condition.
        names = taken[len(taken) - len(body.invars) :]
        results = _follow(body, names, library_caller(body, equation, caller), found)
        if first is not None:  # what a turn leaves, the next one takes
            carried = params.get("num_carry", len(results))
            after = [
                *names[:first],
                *(old | new for old, new in zip(names[first:], results[:carried], strict=False)),
                *names[first + carried :],
            ]
            if after != names:
                return _results(equation, taken[: len(taken) - len(after)] + after, caller, found)
        total = results if total is None else [old | new for old, new in zip(total, results, strict=True)]
    return total
