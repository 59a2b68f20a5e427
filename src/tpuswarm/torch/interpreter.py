"""Run a traced graph on JAX arrays, operation by operation, in the named scope of each module."""

import functools
import re
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tpuswarm.errors import InputError, first_line
from tpuswarm.torch.graph import Graph, Node, referenced_names, resolve
from tpuswarm.torch.ops import BF16_OPS, DIFFERENTIABLE, FLOAT32_OPS, OPS, RANDOM
from tpuswarm.torch.ops.dtypes import cast_floats
from tpuswarm.torch.ops.products import is_outer_product
from tpuswarm.train.recipe import Options, Remat

Arrays = Mapping[str, Any]
DEFAULT_OPTIONS = Options()
BACKWARD = "_backward"
SAVED_BY_DOTS = ("mm", "addmm", "tpuswarm.attention")
"""Operators whose outputs the remat policy "dots" saves."""


class StepOutputs(NamedTuple):
    """Outputs of a graph."""

    loss: jax.Array
    metrics: dict[str, jax.Array]
    buffers: dict[str, jax.Array]
    """New values of the buffers that change."""
    gradients: dict[str, jax.Array]
    """Gradients by parameter; empty in evaluation."""


def check_operators(*graphs: Graph, advice: str = "") -> None:
    """Raise InputError with the module's line and the advice if an operator is not implemented."""
    for node in (node for graph in graphs for node in graph.nodes):
        if node.op not in OPS and node.op not in RANDOM and _differentiable_op(node) is None:
            raise InputError(
                f'{node} is not implemented in JAX; {advice}add it with @tpuswarm.torch.op("{node.op}") '
                "(see docs/torch.md)"
            )


def draws_random_numbers(node: Node) -> bool:
    """Return whether an operator draws random numbers with its traced arguments."""
    match node.op:
        case "native_dropout":
            return node.args[1] > 0 and node.args[2] is not False
        case "tpuswarm.attention":
            return node.args[4] > 0
    return node.op in RANDOM


def run_graph(
    graph: Graph, arrays: Mapping[str, Arrays], batch: Arrays, key: jax.Array | None, options: Options = DEFAULT_OPTIONS
) -> StepOutputs:
    """Compute the outputs of a graph for a batch. Raise InputError with the module's line.

    arrays: by group and name; key: None in evaluation; options: precision, attention and remat are used.
    """
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return _Interpreter(graph, arrays, batch, key, options).run()


class _Interpreter:
    def __init__(self, graph: Graph, arrays: Mapping[str, Arrays], batch: Arrays, key: Any, options: Options):
        self._graph, self._key, self._options = graph, key, options
        self._position = {node.name: position for position, node in enumerate(graph.nodes)}
        self._inputs = {name: jnp.asarray(arrays[group][array]) for name, (group, array) in graph.arrays.items()}
        self._inputs |= {name: jnp.asarray(batch[array]) for name, array in graph.batch.items()}
        self._rows = len(next(iter(batch.values())))
        self._pullbacks: dict[str, Callable[..., Any]] = {}
        """JAX's derivatives of differentiable operators, by node."""

    def run(self) -> StepOutputs:
        graph, outputs = self._graph, self._inputs
        pending = plan_recomputation(graph, self._options.remat)
        layer_of = {name: layer for layer, recomputation in pending.items() for name in recomputation.outputs}
        for position, node in enumerate(graph.nodes):
            if position >= graph.forward:
                inputs = _input_names(node)
                for layer in sorted({layer_of[name] for name in inputs if name in layer_of}):
                    if layer in pending:
                        outputs |= self._recompute(pending.pop(layer), outputs, inputs)
            outputs[node.name] = self._compute(node, outputs)
        return StepOutputs(
            jnp.asarray(self._resolve(graph.loss, outputs)),
            {name: jnp.asarray(self._resolve(value, outputs), jnp.float32) for name, value in graph.metrics.items()},
            {name: self._resolve(value, outputs) for name, value in graph.buffers.items()},
            {name: self._resolve(value, outputs) for name, value in graph.gradients.items()},
        )

    def _resolve(self, value: Any, outputs: Arrays) -> Any:
        return resolve(value, outputs, self._rows)

    def _recompute(self, recomputation: "Recomputation", outputs: Arrays, trigger: set[str]) -> dict[str, Any]:
        """Compute part of a layer again, but not before the gradients that need it."""
        gradients = {name: outputs[name] for name in trigger if self._position.get(name, -1) >= self._graph.forward}
        saved = {name: outputs[name] for name in recomputation.inputs}
        saved, _ = jax.lax.optimization_barrier((saved, gradients))
        local = {**outputs, **saved}
        for position in recomputation.positions:
            node = self._graph.nodes[position]
            local[node.name] = self._compute(node, local)
        return {name: local[name] for name in recomputation.outputs}

    def _compute(self, node: Node, outputs: Arrays) -> Any:
        differentiable, is_backward = _differentiable_op(node), _is_backward(node)
        args = self._resolve(node.args[is_backward:], outputs)
        kwargs = {name: self._resolve(value, outputs) for name, value in node.kwargs.items()}
        if self._options.precision == "bf16":
            is_exact = node.op in ("mm", "bmm") and is_outer_product(*args)  # keeps large positions exact
            uses_bf16 = node.op in BF16_OPS and not is_exact
            if uses_bf16 or node.op in FLOAT32_OPS:
                dtype = jnp.bfloat16 if uses_bf16 else jnp.float32
                args = cast_floats(args, dtype)
                kwargs = {name: cast_floats(value, dtype) for name, value in kwargs.items()}

        def compute() -> Any:
            if differentiable is not None:
                return (self._differentiate if is_backward else self._compute_forward)(node, differentiable, args)
            if node.op in RANDOM:
                return RANDOM[node.op](self._node_key(node.name), *args, **kwargs)
            return OPS[node.op](*args, **kwargs)

        with jax.named_scope(node.module or node.op):
            try:
                return _call_from_line(node.source_line)(compute) if node.source_line else compute()
            except InputError as error:
                raise InputError(f"{node}: {error}") from error
            except (TypeError, ValueError, IndexError) as error:
                raise InputError(f"{node} failed in JAX: {first_line(error)}") from error

    def _node_key(self, name: str) -> jax.Array | None:
        return None if self._key is None else jax.random.fold_in(self._key, self._position[name])

    def _compute_forward(self, node: Node, op: Callable[..., Any], args: list[Any]) -> Any:
        function, floats = _function_of_floats(functools.partial(op, self._node_key(node.name), self._options), args)
        if not self._graph.gradients or self._options.remat != "none":
            return function(*floats)
        y, self._pullbacks[node.name] = jax.vjp(function, *floats)
        return y

    def _differentiate(self, node: Node, op: Callable[..., Any], args: list[Any]) -> Any:
        forward, gradients = node.args[0].name, args[0]
        function, floats = _function_of_floats(functools.partial(op, self._node_key(forward), self._options), args[1:])
        leaves, structure = jax.tree.flatten(jax.eval_shape(function, *floats))
        pullback = self._pullbacks.get(forward)
        if pullback is None:
            _, pullback = jax.vjp(function, *floats)
        cotangents = [gradient.astype(leaf.dtype) for gradient, leaf in zip(gradients, leaves, strict=True)]
        return list(pullback(jax.tree.unflatten(structure, cotangents)))


def _function_of_floats(op: Callable[..., Any], args: list[Any]) -> tuple[Callable[..., Any], list[jax.Array]]:
    """Return `op` as a function of the float arrays in its arguments, and these arrays."""
    leaves, structure = jax.tree.flatten(args)
    floats = {
        at: leaf
        for at, leaf in enumerate(leaves)
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jnp.floating)
    }

    def function(*values: jax.Array) -> Any:
        replaced = dict(zip(floats, values, strict=True))
        return op(*jax.tree.unflatten(structure, [replaced.get(at, leaf) for at, leaf in enumerate(leaves)]))

    return function, list(floats.values())


def _differentiable_op(node: Node) -> Callable[..., Any] | None:
    return DIFFERENTIABLE.get(node.op.removesuffix(BACKWARD))


def _is_backward(node: Node) -> bool:
    return node.op.endswith(BACKWARD) and _differentiable_op(node) is not None


def _input_names(node: Node) -> set[str]:
    args = node.args[_is_backward(node) :]  # a backward pass needs only the name of its forward node
    return referenced_names([*args, *node.kwargs.values()])


class Recomputation(NamedTuple):
    """The part of a layer's forward pass that the backward pass computes again."""

    positions: list[int]
    inputs: set[str]
    """Nodes of other layers, and saved nodes."""
    outputs: set[str]
    """Recomputed nodes that the backward pass uses."""


def plan_recomputation(graph: Graph, remat: Remat) -> dict[str, Recomputation]:
    """Return what to recompute in each layer, a module with a numbered path (`layers.3`)."""
    if remat == "none":
        return {}
    forward = graph.nodes[: graph.forward]
    layer_of = {node.name: layer for node in forward if (layer := _layer(node.module))}
    position = {node.name: at for at, node in enumerate(forward)}
    saved = {node.name for node in forward if remat == "dots" and node.op in SAVED_BY_DOTS}
    saved |= referenced_names([graph.loss, *graph.metrics.values(), *graph.buffers.values()])
    for node in forward:  # save the outputs that other layers use
        saved |= {name for name in _input_names(node) if layer_of.get(name) != layer_of.get(node.name)}
    plan: dict[str, Recomputation] = {}
    for node in graph.nodes[graph.forward :]:
        for name in _input_names(node):
            if name in layer_of and name not in saved:
                plan.setdefault(layer_of[name], Recomputation([], set(), set())).outputs.add(name)
    for recomputation in plan.values():
        queue, seen = list(recomputation.outputs), set(recomputation.outputs)
        while queue:
            name = queue.pop()
            recomputation.positions.append(position[name])
            for other in _input_names(forward[position[name]]) - seen:
                seen.add(other)
                if layer_of.get(other) == layer_of[name] and other not in saved:
                    queue.append(other)
                else:
                    recomputation.inputs.add(other)
        recomputation.positions.sort()
    return plan


def _layer(path: str) -> str:
    match = re.match(r"(?:.*?\.)?\d+(?=\.|$)", path)
    return match[0] if match else ""


def _call(function: Callable[[], Any]) -> Any:
    return function()


@functools.cache
def _call_from_line(source_line: str) -> Callable[[Callable[[], Any]], Any]:
    """Return a function that calls another one as if from a line of the user's source, which JAX records."""
    file, _, line = source_line.rpartition(":")
    code = _call.__code__.replace(co_filename=file, co_firstlineno=int(line) - 1)  # the call is below `def`
    return FunctionType(code, {})
