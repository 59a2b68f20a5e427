"""What traced programs look like before JAX 0.12 and since."""

from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn


def replace_jaxpr(closed: ClosedJaxpr, jaxpr: Jaxpr) -> ClosedJaxpr:
    """Return a program with another body. Since JAX 0.12 both are one class, and a body has its constants."""
    body: Any = jaxpr
    return body if issubclass(Jaxpr, ClosedJaxpr) else closed.replace(jaxpr=body)


def scan_counts(scan: JaxprEqn) -> tuple[int, int]:
    """Return the number of constants of a `lax.scan`, its first inputs, and of carried values, which follow."""
    if "ft_in" not in scan.params:
        return scan.params["num_consts"], scan.params["num_carry"]
    constants, carried, _ = (len([*tree.vals]) for tree in scan.params["ft_in"].unpack())
    return constants, carried
