"""Runs an exported graph on JAX arrays: op by op, each in the scope of its module."""

import functools
import itertools
import re
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tpuswarm.errors import InputError, first_line
from tpuswarm.torch.graph import Graph, Node, referred, resolve
from tpuswarm.torch.ops import ATTENTION, NARROW, OPS, RANDOM, WIDE, randoms
from tpuswarm.torch.ops.dtypes import in_dtype
from tpuswarm.train.program.remat import recomputed
from tpuswarm.train.recipe import Options, Remat

Arrays = Mapping[str, Any]
USUAL = Options()


def unknown(graph: Graph) -> list[Node]:
    """The first node of each operator that there is no form of."""
    found: dict[str, Node] = {}
    for node in graph.nodes:
        if not any(node.op in table for table in (OPS, RANDOM, ATTENTION)):
            found.setdefault(node.op, node)
    return list(found.values())


def draws(node: Node) -> bool:
    """Whether an operator draws numbers, as it was traced."""
    if node.op == "native_dropout":
        return node.args[1] > 0 and (len(node.args) < 3 or node.args[2] is not False)
    if node.op in ATTENTION:
        return (node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)) > 0
    return node.op in randoms.OPS


def run(
    graph: Graph, arrays: Mapping[str, Arrays], batch: Arrays, key: jax.Array | None, options: Options = USUAL
) -> tuple[jax.Array, dict[str, jax.Array], dict[str, jax.Array]]:
    """The loss of a batch, its metrics, and the buffers that change.

    arrays: those of each group by name; key: None in evaluation; options: precision, attention and remat are honoured.
    Raises InputError, with the module's line.
    """
    known: dict[str, Any] = {name: arrays[group][of] for name, (group, of) in graph.arrays.items()}
    known |= {name: batch[of] for name, of in graph.batch.items()}

    def step(number: int, known: dict[str, Any]) -> None:
        node = graph.nodes[number]
        known[node.name] = _value(node, known, None if key is None else jax.random.fold_in(key, number), options)

    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for part in blocks(graph) if options.remat != "none" else [Block(tuple(range(len(graph.nodes))), None)]:
            if part.gives is None:
                for number in part.numbers:
                    step(number, known)
            else:
                known |= _recomputed(part, known, step, options.remat)
    loss = resolve(graph.loss, known)
    if jnp.shape(loss) != ():
        raise InputError(f"the loss has shape {list(jnp.shape(loss))}: it returns a scalar, a mean over the batch")
    metrics = {name: jnp.asarray(resolve(each, known), jnp.float32) for name, each in graph.metrics.items()}
    return loss, metrics, {name: resolve(each, known) for name, each in graph.buffers.items()}


class Block(NamedTuple):
    """A stretch of a graph: the places of its nodes."""

    numbers: tuple[int, ...]
    gives: frozenset[str] | None
    """What the rest of the graph takes of a layer; None for what is between layers."""


def blocks(graph: Graph) -> list[Block]:
    """A graph's layers, which are recomputed each by itself: what is in a module of a numbered path (`layers.3`)."""
    parts = [
        (label, tuple(number for number, _ in each))
        for label, each in itertools.groupby(enumerate(graph.nodes), lambda pair: _layer(pair[1].module))
    ]
    at = {graph.nodes[number].name: part for part, (_, numbers) in enumerate(parts) for number in numbers}
    gives: list[set[str]] = [set() for _ in parts]
    takes = [(at[node.name], referred([*node.args, *node.kwargs.values()])) for node in graph.nodes]
    takes.append((-1, referred([graph.loss, *graph.metrics.values(), *graph.buffers.values()])))
    for part, names in takes:
        for name in names:
            if at.get(name, part) != part:
                gives[at[name]].add(name)
    return [Block(numbers, frozenset(gives[part]) if label else None) for part, (label, numbers) in enumerate(parts)]


def _layer(path: str) -> str:
    found = re.match(r"(?:.*?\.)?\d+(?=\.|$)", path)
    return found[0] if found else ""


def _recomputed(
    part: Block, known: dict[str, Any], step: Callable[[int, dict[str, Any]], None], remat: Remat
) -> dict[str, Any]:
    """What a layer gives; the backward pass computes again what is within it."""
    plain: dict[str, Any] = {}

    def layer() -> dict[str, Any]:
        inner = dict(known)
        for number in part.numbers:
            step(number, inner)
        found = {name: inner[name] for name in part.gives or ()}
        plain.update({name: each for name, each in found.items() if isinstance(each, int)})  # sizes stay numbers
        return {name: each for name, each in found.items() if name not in plain}

    return recomputed(layer, remat)() | plain


def _value(node: Node, known: Mapping[str, Any], key: jax.Array | None, options: Options) -> Any:
    args, kwargs = resolve(node.args, known), {name: resolve(each, known) for name, each in node.kwargs.items()}
    outer = node.op in ("mm", "bmm") and args[0].shape[-1] == 1  # it sums nothing: positions by frequencies stay exact
    narrow = node.op in NARROW and not outer
    if options.precision == "bf16" and (narrow or node.op in WIDE):
        dtype = jnp.bfloat16 if narrow else jnp.float32
        args, kwargs = in_dtype(args, dtype), {name: in_dtype(each, dtype) for name, each in kwargs.items()}

    def made() -> Any:
        if node.op in ATTENTION:
            return ATTENTION[node.op](key, options, *args, **kwargs)
        return RANDOM[node.op](key, *args, **kwargs) if node.op in RANDOM else OPS[node.op](*args, **kwargs)

    with jax.named_scope(node.module or node.op):
        try:
            return _at(node.where)(made) if node.where else made()
        except InputError as error:
            raise InputError(f"{described(node)}: {error}") from error
        except (TypeError, ValueError, IndexError) as error:
            raise InputError(f"{described(node)} cannot be computed here: {first_line(error)}") from error


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
