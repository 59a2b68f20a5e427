"""Calls from the compiled step back to Python: each makes the devices wait for the host, in every step."""

from collections.abc import Iterator

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, jaxprs_in_params

from tpuswarm.train.diagnose.finding import Finding
from tpuswarm.train.user_code import recipe_line

PRIMITIVES = {
    "debug_print": "jax.debug.print",
    "debug_callback": "jax.debug.callback",
    "pure_callback": "jax.pure_callback",
    "io_callback": "io_callback",
}


def host_callbacks(step: ClosedJaxpr) -> list[Finding]:
    """One finding for each line of the recipe that calls back."""
    found = {
        (PRIMITIVES[each.primitive.name], str(recipe_line(each.source_info.traceback) or "a library"))
        for each in _equations(step.jaxpr)
        if each.primitive.name in PRIMITIVES
    }
    return [
        Finding(
            "host-callback",
            f"{place} calls {name} in every step: the devices stop until Python answers; compute it in JAX, return it "
            "as a metric, or remove it once the bug is found",
            {"place": place, "call": name},
        )
        for name, place in sorted(found, key=lambda each: each[1])
    ]


def _equations(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    for equation in jaxpr.eqns:
        yield equation
        for body in jaxprs_in_params(equation.params):
            yield from _equations(body)
