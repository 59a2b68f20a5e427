"""Runs an exported graph on JAX arrays: op by op, each in the scope of its module."""

import functools
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

import jax
import jax.numpy as jnp

from tpuswarm.errors import InputError
from tpuswarm.torch.graph import Graph, Node, resolve
from tpuswarm.torch.ops import OPS, RANDOM

Arrays = Mapping[str, Any]


def unknown(graph: Graph) -> list[Node]:
    """The first node of each operator that there is no form of."""
    found: dict[str, Node] = {}
    for node in graph.nodes:
        if node.op not in OPS and node.op not in RANDOM:
            found.setdefault(node.op, node)
    return list(found.values())


def run(
    graph: Graph, arrays: Mapping[str, Arrays], batch: Arrays, key: jax.Array | None
) -> tuple[jax.Array, dict[str, jax.Array], dict[str, jax.Array]]:
    """The loss of a batch, its metrics, and the buffers that change.

    arrays: those of each group by name; key: None in evaluation. Raises InputError, with the module's line.
    """
    known: dict[str, Any] = {name: arrays[group][of] for name, (group, of) in graph.arrays.items()}
    known |= {name: batch[of] for name, of in graph.batch.items()}
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for number, node in enumerate(graph.nodes):
            known[node.name] = _value(node, known, None if key is None else jax.random.fold_in(key, number))
    loss = resolve(graph.loss, known)
    if jnp.shape(loss) != ():
        raise InputError(f"the loss has shape {list(jnp.shape(loss))}: it returns a scalar, a mean over the batch")
    metrics = {name: jnp.asarray(resolve(each, known), jnp.float32) for name, each in graph.metrics.items()}
    return loss, metrics, {name: resolve(each, known) for name, each in graph.buffers.items()}


def _value(node: Node, known: Mapping[str, Any], key: jax.Array | None) -> Any:
    args, kwargs = resolve(node.args, known), {name: resolve(each, known) for name, each in node.kwargs.items()}

    def made() -> Any:
        return RANDOM[node.op](key, *args, **kwargs) if node.op in RANDOM else OPS[node.op](*args, **kwargs)

    with jax.named_scope(node.module or node.op):
        try:
            return _at(node.where)(made) if node.where else made()
        except InputError as error:
            raise InputError(f"{described(node)}: {error}") from error
        except (TypeError, ValueError, IndexError) as error:
            raise InputError(f"{described(node)} cannot be computed here: {str(error).splitlines()[0]}") from error


def _call(make: Callable[[], Any]) -> Any:
    return make()


@functools.cache
def _at(where: str) -> Callable[[Callable[[], Any]], Any]:
    """Calls a function as if it stood on that line of the module's source.

    JAX notes which lines called for an operation, and all that tells a user where something is reads that.
    """
    file, _, line = where.rpartition(":")
    code = _call.__code__.replace(co_filename=file, co_firstlineno=int(line) - 1)  # what calls is the line after `def`
    return FunctionType(code, {})


def described(node: Node) -> str:
    """An operator, where it comes from."""
    of = f" of {node.module}" if node.module else ""
    return f"{node.where + ': ' if node.where else ''}{node.op}{of}"
