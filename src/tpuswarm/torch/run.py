"""Runs a traced graph on JAX arrays: op by op, each in the scope of its module. The backward pass is torch's."""

import functools
import re
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tpuswarm.errors import InputError, first_line
from tpuswarm.torch.graph import Graph, Node, referred, resolve
from tpuswarm.torch.ops import NARROW, OPS, RANDOM, WHOLE, WIDE, randoms
from tpuswarm.torch.ops.dtypes import in_dtype
from tpuswarm.train.recipe import Options, Remat

Arrays = Mapping[str, Any]
USUAL = Options()
BACKWARD = "_backward"
KEPT = ("mm", "addmm", "tpuswarm.attention")
"""What is not computed again where `remat` is "dots": products with weights, and attention."""


class Found(NamedTuple):
    """What a graph gives."""

    loss: jax.Array
    metrics: dict[str, jax.Array]
    buffers: dict[str, jax.Array]
    """Those that change, as they are afterwards."""
    gradients: dict[str, jax.Array]
    """By parameter; none in evaluation."""


def check_operators(*graphs: Graph) -> None:
    """Raises InputError where there is no form of an operator, with the module's line."""
    for node in (each for graph in graphs for each in graph.nodes):
        if node.op not in OPS and node.op not in RANDOM and _whole(node) is None:
            raise InputError(
                f'{described(node)} has no form in JAX here: write one, `@tpuswarm.torch.op("{node.op}")`, '
                "with ATen's arguments (docs/torch.md)"
            )


def draws(node: Node) -> bool:
    """Whether an operator draws numbers, as it was traced."""
    if node.op == "native_dropout":
        return node.args[1] > 0 and node.args[2] is not False
    if node.op == "tpuswarm.attention":
        return node.args[4] > 0
    if node.op == "rrelu_with_noise_functional":
        return bool(node.args[4:5] == (True,))
    return node.op in randoms.OPS


def run(
    graph: Graph, arrays: Mapping[str, Arrays], batch: Arrays, key: jax.Array | None, options: Options = USUAL
) -> Found:
    """The loss of a batch, its metrics, the buffers that change, and the gradients.

    arrays: those of each group by name; key: None in evaluation; options: precision, attention and remat are honoured.
    Raises InputError, with the module's line.
    """
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return _Run(graph, arrays, batch, key, options).found()


class _Run:
    """One batch through a graph."""

    def __init__(self, graph: Graph, arrays: Mapping[str, Arrays], batch: Arrays, key: Any, options: Options):
        self._graph, self._key, self._options = graph, key, options
        self._at = {node.name: number for number, node in enumerate(graph.nodes)}
        self._known = {name: jnp.asarray(arrays[group][of]) for name, (group, of) in graph.arrays.items()}
        self._known |= {name: jnp.asarray(batch[of]) for name, of in graph.batch.items()}
        self._rows = len(next(iter(batch.values())))
        self._pullbacks: dict[str, Callable[..., Any]] = {}

    def found(self) -> Found:
        graph, known = self._graph, self._known
        layers = recomputations(graph, self._options.remat)
        layer_of = {name: layer for layer, again in layers.items() for name in again.wanted}
        for number, node in enumerate(graph.nodes):
            if number >= graph.forward:
                needed = _needs(node)
                for layer in sorted({layer_of[name] for name in needed if name in layer_of}):
                    if layer in layers:
                        known = known | self._computed_again(layers.pop(layer), known, needed)
            known[node.name] = self._value(number, known)
        loss = self._resolved(graph.loss, self._known)
        if jnp.shape(loss) != ():
            raise InputError(f"the loss has shape {list(jnp.shape(loss))}: it returns a scalar, a mean over the batch")
        return Found(
            jnp.asarray(loss),
            {name: jnp.asarray(self._resolved(each, known), jnp.float32) for name, each in graph.metrics.items()},
            {name: self._resolved(each, known) for name, each in graph.buffers.items()},
            {name: self._resolved(each, known) for name, each in graph.gradients.items()},
        )

    def _resolved(self, value: Any, known: Arrays) -> Any:
        return resolve(value, known, self._rows)

    def _computed_again(self, again: "Again", known: Arrays, trigger: set[str]) -> dict[str, Any]:
        """What the backward pass takes of a layer, computed once more, not before the gradient that asks for it."""
        gradients = {name: known[name] for name in trigger if self._at.get(name, -1) >= self._graph.forward}
        held, _ = jax.lax.optimization_barrier(({name: known[name] for name in again.inputs}, gradients))
        inner = {**known, **held}
        for number in again.numbers:
            inner[self._graph.nodes[number].name] = self._value(number, inner)
        return {name: inner[name] for name in again.wanted}

    def _value(self, number: int, known: Arrays) -> Any:
        node, options = self._graph.nodes[number], self._options
        form = _whole(node)
        linked = 1 if form is not None and node.op.endswith(BACKWARD) else 0
        args = self._resolved(node.args[linked:], known)
        kwargs = {name: self._resolved(each, known) for name, each in node.kwargs.items()}
        outer = node.op in ("mm", "bmm") and args[0].shape[-1] == 1  # it sums nothing: positions stay exact
        narrow = node.op in NARROW and not outer
        if options.precision == "bf16" and (narrow or node.op in WIDE):
            dtype = jnp.bfloat16 if narrow else jnp.float32
            args, kwargs = in_dtype(args, dtype), {name: in_dtype(each, dtype) for name, each in kwargs.items()}

        def made() -> Any:
            if form is not None:
                return self._backward(node, form, args) if linked else self._forward(node, form, args)
            if node.op in RANDOM:
                return RANDOM[node.op](self._key_of(node.name), *args, **kwargs)
            return OPS[node.op](*args, **kwargs)

        with jax.named_scope(node.module or node.op):
            try:
                return _at(node.where)(made) if node.where else made()
            except InputError as error:
                raise InputError(f"{described(node)}: {error}") from error
            except (TypeError, ValueError, IndexError) as error:
                raise InputError(f"{described(node)} cannot be computed here: {first_line(error)}") from error

    def _key_of(self, name: str) -> jax.Array | None:
        return None if self._key is None else jax.random.fold_in(self._key, self._at[name])

    def _forward(self, node: Node, form: Callable[..., Any], args: list[Any]) -> Any:
        """Of an operator that JAX differentiates as a whole; its derivative is kept, unless layers are recomputed."""
        function, floats = _of_floats(functools.partial(form, self._key_of(node.name), self._options), args)
        if not self._graph.gradients or self._options.remat != "none":
            return function(*floats)
        found, self._pullbacks[node.name] = jax.vjp(function, *floats)
        return found

    def _backward(self, node: Node, form: Callable[..., Any], args: list[Any]) -> Any:
        forward, gradients = node.args[0].name, args[0]
        pull = self._pullbacks.get(forward)
        function, floats = _of_floats(functools.partial(form, self._key_of(forward), self._options), args[1:])
        shapes = jax.eval_shape(function, *floats)
        if pull is None:
            _, pull = jax.vjp(function, *floats)
        given = [each.astype(like.dtype) for each, like in zip(gradients, jax.tree.leaves(shapes), strict=True)]
        return list(pull(jax.tree.unflatten(jax.tree.structure(shapes), given)))


def _of_floats(form: Callable[..., Any], args: list[Any]) -> tuple[Callable[..., Any], list[jax.Array]]:
    """A function of the arrays of floats among its arguments, and these."""
    leaves, tree = jax.tree.flatten(args)
    at = [
        n for n, each in enumerate(leaves) if isinstance(each, jax.Array) and jnp.issubdtype(each.dtype, jnp.floating)
    ]

    def function(*floats: jax.Array) -> Any:
        mine = dict(zip(at, floats, strict=True))
        return form(*jax.tree.unflatten(tree, [mine.get(n, each) for n, each in enumerate(leaves)]))

    return function, [leaves[n] for n in at]


def _whole(node: Node) -> Callable[..., Any] | None:
    """The form of an operator that has its derivative with it, also for its backward pass."""
    return WHOLE.get(node.op.removesuffix(BACKWARD))


def _needs(node: Node) -> set[str]:
    """The nodes whose values a node takes: of a whole operator's result its backward pass needs the name alone."""
    linked = 1 if _whole(node) is not None and node.op.endswith(BACKWARD) else 0
    return referred([*node.args[linked:], *node.kwargs.values()])


class Again(NamedTuple):
    """What of a layer's forward pass is computed again in the backward pass."""

    numbers: list[int]
    """The places of its nodes in the graph."""
    inputs: set[str]
    """The nodes that they take from elsewhere, or that are kept."""
    wanted: set[str]
    """Those of them that the backward pass takes."""


def recomputations(graph: Graph, remat: Remat) -> dict[str, Again]:
    """By layer: what is in a module of a numbered path (`layers.3`)."""
    if remat == "none":
        return {}
    forward = graph.nodes[: graph.forward]
    layer = {node.name: label for node in forward if (label := _layer(node.module))}
    at = {node.name: number for number, node in enumerate(forward)}
    kept = {node.name for node in forward if remat == "dots" and node.op in KEPT}
    kept |= referred([graph.loss, *graph.metrics.values(), *graph.buffers.values()])
    for node in forward:  # what a layer gives to others is kept
        kept |= {name for name in _needs(node) if layer.get(name) != layer.get(node.name)}
    found: dict[str, Again] = {}
    for node in graph.nodes[graph.forward :]:
        for name in _needs(node):
            if name in layer and name not in kept:
                found.setdefault(layer[name], Again([], set(), set())).wanted.add(name)
    for again in found.values():
        waiting, seen = list(again.wanted), set(again.wanted)
        while waiting:
            name = waiting.pop()
            again.numbers.append(at[name])
            for other in _needs(forward[at[name]]) - seen:
                seen.add(other)
                if layer.get(other) == layer[name] and other not in kept:
                    waiting.append(other)
                else:
                    again.inputs.add(other)
        again.numbers.sort()
    return found


def _layer(path: str) -> str:
    found = re.match(r"(?:.*?\.)?\d+(?=\.|$)", path)
    return found[0] if found else ""


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
