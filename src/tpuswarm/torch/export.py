"""Export a PyTorch module and its loss to a graph without torch. Needs torch."""

import inspect
import io
import logging
import operator
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from functools import cache
from typing import Any

import numpy as np
import torch

from tpuswarm.errors import InputError, first_line
from tpuswarm.torch.graph import Dtype, ExportedModule, Graph, Group, Node, Ref, referenced_names, zeros_without_memory
from tpuswarm.torch.index_limits import find_index_limits
from tpuswarm.torch.interpreter import check_operators, draws_random_numbers
from tpuswarm.torch.lightning import LightningSteps
from tpuswarm.torch.masks import simplify_attention_masks
from tpuswarm.torch.merge_traces import TRACED_ROWS, merge_traces
from tpuswarm.torch.trace import Location, TracedStep, copy_module, location_of, trace, traceback_line
from tpuswarm.train.process.terminal import echo

MIN_TORCH = (2, 13)
IDENTITY_OPS = ("clone", "detach", "alias", "lift_fresh_copy")
IGNORED_ARGUMENTS = ("layout", "device", "pin_memory", "memory_format", "generator", "non_blocking")
MAX_INTEGER = 2**31 - 1
"""JAX has 32-bit integers for torch's 64-bit ones."""
ARRAY_DTYPES: dict[str, Any] = {
    "float64": np.float32, "bfloat16": np.float32, "float16": np.float32, "int64": np.int32, "complex128": np.complex64
}  # fmt: skip
"""Dtypes in which arrays of a module train, if they differ."""


class Tracer:
    """Traces a module and its loss in training and in evaluation, for given numbers of rows."""

    def __init__(self, module: Any, loss: Callable[..., Any], row: Mapping[str, np.ndarray]):
        """row: arrays of the data; those named like arguments of `forward` are the inputs.

        Raise InputError for a module that cannot be traced.
        """
        self._device = _check_module(module)
        self._module, self._loss, self._inputs = copy_module(module), loss, input_names(module, loss, row)
        self._row = {name: to_batch(name, array[:1], 1) for name, array in row.items()}
        self._masks: dict[bool, list[bool | None]] = {True: [], False: []}
        self._is_output_shown = False
        self._arrays: dict[Group, dict[str, np.ndarray]] = {
            "params": {name: to_array(name, param) for name, param in module.named_parameters()},
            "buffers": {name: to_array(name, buffer) for name, buffer in module.named_buffers()},
        }
        for name, param in self._arrays["params"].items():
            if not np.issubdtype(param.dtype, np.floating):
                raise InputError(f"parameter {name} is {param.dtype}; parameters must be floats")

    def trace(self, train: bool, rows: int, constants: dict[str, np.ndarray]) -> Graph:
        """Return the graph for a number of rows; add its constants to `constants`.

        Show the output of the module once. Raise InputError with the module's line.
        """
        batch = {
            name: torch.empty((rows, *array.shape[1:]), dtype=array.dtype, device="meta")
            for name, array in self._row.items()
        }
        show_output, self._is_output_shown = not self._is_output_shown, True
        step = trace_batch(self._module, self._loss, self._inputs, batch, train, show_output)
        graph = to_graph(step, train, constants, self._masks[train])
        check_operators(graph)
        if not train and (random := next(filter(draws_random_numbers, graph.nodes), None)):
            raise InputError(f"{random} draws random numbers in evaluation; draw them only in training")
        return graph

    def to_exported(self, train: Graph, evaluate: Graph, constants: dict[str, np.ndarray]) -> ExportedModule:
        """Return the module with these graphs; print which parameters are not trained although they could be."""
        trainable = {name for name, param in self._module.named_parameters() if param.requires_grad}
        if unreached := sorted(trainable - train.gradients.keys()):
            more = f" and {len(unreached) - 3} more" if len(unreached) > 3 else ""
            echo(f"No gradient reaches {', '.join(unreached[:3])}{more}; they are not trained, as in torch.", err=True)
        return ExportedModule(
            type(self._module).__name__,
            {**self._arrays, "constants": constants},
            _tied_names(self._module),
            train,
            evaluate,
            frozen=tuple(name for name in self._arrays["params"] if name not in train.gradients),
            has_weights=self._device != "meta",
        )


def export(module: Any, loss: Callable[..., Any], row: Mapping[str, np.ndarray]) -> ExportedModule:
    """Export a module with graphs for any number of rows, which need no torch. Raise InputError if there are none."""
    tracer, constants = Tracer(module, loss, row), dict[str, np.ndarray]()
    train, evaluate = (
        merge_traces(tracer.trace(is_train, rows, constants) for rows in TRACED_ROWS) for is_train in (True, False)
    )
    return tracer.to_exported(train, evaluate, constants)


def export_by_rows(
    module: Any, loss: Callable[..., Any], row: Mapping[str, np.ndarray], rows: int
) -> tuple[ExportedModule, Callable[[bool, int], tuple[Graph, dict[str, np.ndarray]]]]:
    """Export a module for one number of rows.

    Also return a function that traces it for others: (train, rows) → graph and constants.
    """
    tracer, constants = Tracer(module, loss, row), dict[str, np.ndarray]()
    train, evaluate = (tracer.trace(is_train, rows, constants) for is_train in (True, False))

    @cache
    def trace(is_train: bool, rows: int) -> tuple[Graph, dict[str, np.ndarray]]:
        constants: dict[str, np.ndarray] = {}
        graph, first = tracer.trace(is_train, rows, constants), train if is_train else evaluate
        for what in ("gradients", "buffers"):
            if changed := sorted(getattr(graph, what).keys() ^ getattr(first, what).keys()):
                raise InputError(f"whether {changed[0]} is trained depends on the number of rows; use it always")
        return graph, constants

    return tracer.to_exported(train, evaluate, constants), trace


def _check_module(module: Any) -> str:
    """Return the device of a module. Raise InputError if it cannot be exported from there."""
    if tuple(map(int, re.findall(r"\d+", torch.__version__)[:2])) < MIN_TORCH:
        version = ".".join(map(str, MIN_TORCH))
        raise InputError(f"torch {torch.__version__} is too old; install torch {version} or newer to export modules")
    if not isinstance(module, torch.nn.Module):
        raise InputError(f"{type(module).__name__} is not a torch.nn.Module")
    devices = {tensor.device.type for tensor in (*module.parameters(), *module.buffers())}
    if others := devices - {"cpu", "meta"}:
        raise InputError(f"the module is on {', '.join(sorted(others))}; move it to the CPU with module.cpu()")
    if len(devices) > 1:
        raise InputError(
            "only part of the module is on the meta device; move the rest there to plan, or give every part weights to "
            "train (module.to_empty(device='cpu') and an initialization)"
        )
    for name, param in module.named_parameters():
        if param.is_complex():
            raise InputError(f"{name} is complex; split it into real and imaginary parts")
    return next(iter(devices), "cpu")


def input_names(module: Any, loss: Callable[..., Any], row: Mapping[str, np.ndarray]) -> list[str]:
    """Return the arrays of the data that are arguments of `forward`. Raise InputError if one is missing."""
    if isinstance(loss, LightningSteps):
        return []
    arguments = inspect.signature(module.forward).parameters
    found = [name for name in row if name in arguments]
    required = [
        name
        for name, argument in arguments.items()
        if argument.default is argument.empty and argument.kind not in (argument.VAR_POSITIONAL, argument.VAR_KEYWORD)
    ]
    missing = [name for name in required if name not in row]
    if missing or not found:
        needed = missing[0] if missing else f"one of {', '.join(arguments)}"
        raise InputError(
            f"{type(module).__name__}.forward needs {needed}, but the data has {', '.join(row)}; name arrays like the "
            "arguments of forward"
        )
    return found


def to_batch(name: str, array: np.ndarray, rows: int) -> Any:
    """Return a tensor of so many rows; repeat the array's rows if it has fewer."""
    array = np.asarray(array)
    if np.iscomplexobj(array):
        raise InputError(f"{name} is complex; split it into real and imaginary parts")
    if array.dtype == np.float64:
        array = array.astype(np.float32)
    if array.dtype in (np.int32, np.uint16, np.uint32):  # torch indexes with int64
        array = array.astype(np.int64)
    return torch.from_numpy(np.ascontiguousarray(np.resize(array[:rows], (rows, *array.shape[1:]))))


def trace_batch(
    module: Any, loss: Callable[..., Any], inputs: list[str], batch: Mapping[str, Any], train: bool, show_output: bool
) -> TracedStep:  # fmt: skip
    """Trace a step. Raise InputError with the user's line for every failure."""
    try:
        with _capture_output(show_output):
            return trace(module, loss, inputs, batch, train)
    except Exception as error:  # torch raises many types
        raise InputError(_explain(error)) from error


@contextmanager
def _capture_output(show: bool) -> Iterator[None]:
    """Hide messages of torch, and print those of the module if tracing succeeds."""
    logging_level, stderr = logging.root.manager.disable, io.StringIO()
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stderr(stderr), nullcontext() if show else redirect_stdout(stderr):
            warnings.filterwarnings("error", ".*autograd kernel was not registered")  # gradients would be missing
            yield
    finally:
        logging.disable(logging_level)
    if show:
        sys.stderr.write(stderr.getvalue())


def _explain(error: Exception) -> str:
    text, kind = str(error), type(error).__name__
    if isinstance(error, InputError):
        reason = text
    elif kind == "DynamicOutputShapeException":
        reason = "the shape depends on the data, as of a mask used as an index; use torch.where or a weighted sum"
    elif kind.startswith("DataDependent") or "data-dependent" in text or "unbacked" in text:
        reason = "the control flow depends on values of the data; use torch.where"
    else:
        reason = f"torch cannot trace the module: {first_line(error)[:300]}"
    line = traceback_line(error)
    return f"{line}: {reason}" if line else reason


def _tied_names(module: Any) -> dict[str, str]:
    first: dict[int, str] = {}
    names = {name: first.setdefault(id(p), name) for name, p in module.named_parameters(remove_duplicate=False)}
    return {name: holder for name, holder in names.items() if name != holder}


def to_graph(step: TracedStep, train: bool, constants: dict[str, np.ndarray], masks: list[bool | None]) -> Graph:
    """Convert a traced step; add its constants to `constants`. masks: see `simplify_attention_masks`."""
    module, prefix = step.graph, "train." if train else "evaluate."
    simplify_attention_masks(module, masks)
    placeholders = [node.name for node in module.graph.nodes if node.op == "placeholder"]
    inputs = dict(zip(placeholders, step.inputs, strict=True))
    aliases: dict[str, Ref] = {}
    nodes = []
    for fx_node in module.graph.nodes:
        if fx_node.op == "get_attr":
            name = f"{prefix}{fx_node.target}"
            inputs[fx_node.name] = ("constants", name)
            _add_constant(constants, name, getattr(module, fx_node.target), location_of(fx_node))
        elif fx_node.op == "call_function":
            node = _to_node(fx_node, aliases)
            if node.op == "copy_":
                group, written = inputs[node.args[0].name]
                _check_write(group, written, train)
            elif node.op in IDENTITY_OPS:
                aliases[node.name] = node.args[0]
            else:
                nodes.append(node)
    outputs = iter(_to_argument(next(iter(reversed(module.graph.nodes))).args[0], aliases))
    loss = next(outputs)
    metrics, buffers, gradients = (
        {name: next(outputs) for name in names} for names in (step.metrics, step.buffers, step.gradients)
    )
    buffers = {name: value for name, value in buffers.items() if inputs.get(value.name) != ("buffers", name)}
    nodes = _used_nodes(nodes, [loss, *metrics.values(), *buffers.values(), *gradients.values()])
    backward = {fx_node.name for fx_node in module.graph.nodes if location_of(fx_node).is_backward}
    forward = next((number for number, node in enumerate(nodes) if node.name in backward), len(nodes))
    arrays = {name: source for name, source in inputs.items() if source[0] != "batch"}
    batch = {name: source for name, (group, source) in inputs.items() if group == "batch"}
    limits = find_index_limits(module.graph, batch, step.rows)
    return Graph(arrays, batch, tuple(nodes), loss, metrics, buffers, gradients, forward, limits)


def _add_constant(constants: dict[str, np.ndarray], name: str, tensor: Any, location: Location) -> None:
    if tensor.requires_grad:
        raise InputError("the loss uses a parameter outside the module; make it part of the module to train it")
    array = to_array(name, tensor)
    known = constants.setdefault(name, array)
    if not np.array_equal(known, array, equal_nan=array.dtype.kind == "f"):
        raise InputError(
            f"{location.source_line}: a constant depends on the number of rows; make it with torch.arange or torch.full"
        )


def _check_write(group: str, name: str, train: bool) -> None:
    """Raise InputError for a write into an input; one into a parameter ends with the evaluation (RWKV scales them)."""
    if group == "batch":
        raise InputError(f"the module or its loss writes into its input {name}; copy it first (x = x.clone())")
    if train:
        raise InputError(f"the module writes into {name}; use a buffer for what changes in training")


def _used_nodes(nodes: list[Node], outputs: list[Any]) -> list[Node]:
    needed = referenced_names(outputs)
    used = []
    for node in reversed(nodes):
        if node.name in needed:
            used.append(node)
            needed |= referenced_names([*node.args, *node.kwargs.values()])
    return used[::-1]


def to_array(name: str, tensor: Any) -> np.ndarray:
    """Return a tensor in the dtype in which it trains: 16-bit floats become float32."""
    if tensor.device.type == "meta":
        dtype = str(tensor.dtype).removeprefix("torch.")
        return zeros_without_memory(tensor.shape, ARRAY_DTYPES.get(dtype, dtype))
    is_16_bit = tensor.is_floating_point() and tensor.dtype.itemsize < 4
    array: np.ndarray = (tensor.float() if is_16_bit else tensor).numpy(force=True)  # JAX must not start yet
    if array.dtype == np.int64 and array.size and max(-int(array.min()), int(array.max())) > MAX_INTEGER:
        raise InputError(f"{name} holds {int(np.abs(array).max())}; JAX supports integers of 32 bits")
    return array.astype(ARRAY_DTYPES.get(str(array.dtype), array.dtype))


def _to_node(fx_node: Any, aliases: Mapping[str, Ref]) -> Node:
    target, location = fx_node.target, location_of(fx_node)
    if isinstance(target, torch._ops.OpOverload):
        namespace, _, name = target._schema.name.partition("::")
        op = name if namespace == "aten" else f"{namespace}.{name}"
        if op not in ("_to_copy", "lift_fresh_copy"):
            op = op.removesuffix("_copy")  # a view, functionalized
    else:
        op = "getitem" if target is operator.getitem else f"{getattr(target, '__module__', '')}.{target.__name__}"
    args = tuple(_to_argument(argument, aliases) for argument in fx_node.args)
    kwargs = {
        name: _to_argument(argument, aliases)
        for name, argument in fx_node.kwargs.items()
        if name not in IGNORED_ARGUMENTS
    }
    is_float = isinstance(fx_node.meta.get("val"), torch.Tensor) and fx_node.meta["val"].is_floating_point()
    if is_float and not op.startswith("slice"):
        args = tuple(float(value) if isinstance(value, int) and _large_integer(value) else value for value in args)
    node = Node(fx_node.name, op, args, kwargs, location.module, location.source_line)
    if not op.startswith("slice") and (large := _large_integer([*args, *kwargs.values()])):
        raise InputError(f"{node} takes the number {large}; JAX supports integers of 32 bits")
    return node


def _large_integer(value: Any) -> int:
    if isinstance(value, list):
        return next(filter(None, map(_large_integer, value)), 0)
    return value if isinstance(value, int) and abs(value) > MAX_INTEGER else 0


def _to_argument(value: Any, aliases: Mapping[str, Ref]) -> Any:
    if isinstance(value, torch.fx.Node):
        return aliases.get(value.name, Ref(value.name))
    if isinstance(value, (list, tuple)):
        return [_to_argument(item, aliases) for item in value]
    if isinstance(value, torch.dtype):
        return Dtype(str(value).removeprefix("torch."))
    if isinstance(value, (bool, int, float, complex, str)):
        return value
    return None  # also a layout, a device or a memory format
