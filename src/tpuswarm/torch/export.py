"""A PyTorch module and its loss, traced by torch.export into plain data. The only file that needs torch."""

import io
import logging
import operator
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import numpy as np

from tpuswarm.errors import InputError
from tpuswarm.torch.graph import Dtype, Exported, Graph, Group, Node, Ref, referred, shape_alone
from tpuswarm.torch.masks import plain_masks
from tpuswarm.torch.run import described, draws, unknown

LEAST = (2, 6)
"""The first torch whose export keeps what we ask it to keep."""
WHOLE = ("scaled_dot_product_attention", "lstm.input", "gru.input", "rnn_tanh.input", "rnn_relu.input")
"""What is kept as one operation, for which JAX has a form of its own."""
NOT_OURS = (r".*isinstance\(treespec, LeafSpec\)", "The tensor attributes .* were assigned during export")
"""Warnings that torch gives of its own code: its way to ask, and the weights that an LSTM keeps in a list."""
ROWS = 3
"""Of the batch that is traced: a number that is no other size by chance, so that it is taken for none."""


def _objective(module: Any, loss: Callable[..., Any], inputs: list[str], metrics: list[str]) -> Any:
    """A torch module that computes loss and metrics of a batch; the metrics' names are put into `metrics`."""
    import torch

    class Objective(torch.nn.Module):  # type: ignore[misc]  # torch is known where a module is made
        def __init__(self) -> None:
            super().__init__()
            self.module = module

        def forward(self, batch: dict[str, Any]) -> Any:
            found = loss(self.module(**{name: batch[name] for name in inputs}), batch)
            value, extra = found if isinstance(found, tuple) else (found, {})
            _check(value, "the loss")
            for name, each in extra.items():
                _check(each, f"the metric {name}")
            metrics[:] = list(extra)
            return (value, *extra.values())

    return Objective()


def _check(value: Any, what: str) -> None:
    import torch

    if not isinstance(value, torch.Tensor) or value.dim():
        sizes = [str(each) if isinstance(each, int) else "rows" for each in getattr(value, "shape", ())]
        found = f"[{', '.join(sizes)}]" if isinstance(value, torch.Tensor) else type(value).__name__
        raise InputError(f"{what} is {found}: it has to be a scalar tensor, a mean over the batch")


def export(module: Any, loss: Callable[..., Any], row: Mapping[str, np.ndarray]) -> Exported:
    """Trace `loss(module(**inputs), batch)` in training and in evaluation, for batches of any size.

    row: arrays of the data with one or more rows; those that `module.forward` names are its inputs. Raises InputError.
    """
    _needs_torch()
    import torch

    if not isinstance(module, torch.nn.Module):
        raise InputError(f"{type(module).__name__} is no torch.nn.Module")
    devices = {each.device.type for each in (*module.parameters(), *module.buffers())}
    if wrong := devices - {"cpu", "meta"}:
        raise InputError(f"the module is on {', '.join(sorted(wrong))}: export needs it on the CPU (module.cpu())")
    if len(devices) > 1:
        raise InputError(
            "a part of the module is on the meta device, without values: all of it has to be there, to be planned, or "
            "none (module.to_empty(device='cpu') and its own initialization)"
        )
    device = next(iter(devices), "cpu")
    complex_ = [name for name, each in module.named_parameters() if each.is_complex()]
    if complex_:
        raise InputError(f"{complex_[0]} is complex: split it into real and imaginary parts")
    inputs = inputs_of(module, row)
    batch = {name: example(name, array[:1]).to(device) for name, array in row.items()}
    was = module.training
    try:
        train, metrics = _traced(torch, module.train(), loss, inputs, batch)
        evaluate, others = _traced(torch, module.eval(), loss, inputs, batch)
    finally:
        module.train(was)
    tied = _tied(module)
    groups: dict[Group, dict[str, np.ndarray]] = {"params": {}, "buffers": {}, "constants": {}}
    graphs = [
        _graph(torch, program, names, batch, tied, groups, prefix)
        for program, names, prefix in ((train, metrics, "train."), (evaluate, others, "evaluate."))
    ]
    if missing := [each for graph in graphs for each in unknown(graph)]:
        raise InputError(
            f'{described(missing[0])} has no form in JAX here: write one, `@tpuswarm.torch.op("{missing[0].op}")`, '
            "with ATen's arguments (docs/torch.md)"
        )
    floats = {name: each for name, each in groups["params"].items() if not np.issubdtype(each.dtype, np.floating)}
    if floats:
        raise InputError(f"parameter {next(iter(floats))} is {floats[next(iter(floats))].dtype}: not a float")
    if drawn := next((each for each in graphs[1].nodes if draws(each)), None):
        raise InputError(f"{described(drawn)} draws random numbers in evaluation too: draw them in training alone")
    integers = tuple(name for name, each in batch.items() if not each.is_floating_point())
    frozen = tuple(name for name, each in module.named_parameters() if not each.requires_grad)
    return Exported(type(module).__name__, groups, tied, graphs[0], graphs[1], integers, frozen, device != "meta")


def _needs_torch() -> None:
    try:
        import torch
    except ImportError as error:
        raise InputError(
            "a module is exported where torch is, and it is not installed here: pip install 'tpuswarm[torch]'; hosts "
            "that train need the exported file alone"
        ) from error
    found = tuple(int(each) for each in re.findall(r"\d+", torch.__version__)[:2])
    if found < LEAST:
        raise InputError(f"torch {torch.__version__} is too old: {'.'.join(map(str, LEAST))} or newer exports modules")


def inputs_of(module: Any, row: Mapping[str, np.ndarray]) -> list[str]:
    """The arrays of the data that are arguments of a module's forward. Raises InputError where there is none."""
    import inspect

    given = inspect.signature(module.forward).parameters
    found = [name for name in row if name in given]
    needed = [name for name, each in given.items() if each.default is each.empty and each.kind in (0, 1, 3)]
    if absent := [name for name in needed if name not in row]:
        raise InputError(
            f"{type(module).__name__}.forward needs {absent[0]}, and the data has {', '.join(row)}: arrays are given "
            "to the argument of their name"
        )
    if not found:
        raise InputError(
            f"{type(module).__name__}.forward takes {', '.join(given)}, and the data has {', '.join(row)}: arrays are "
            "given to the argument of their name"
        )
    return found


def example(name: str, array: np.ndarray, rows: int = ROWS) -> Any:
    """So many rows as torch's tensor, as a module gets them; the first one again and again."""
    import torch

    array = np.asarray(array)
    if np.iscomplexobj(array):
        raise InputError(f"{name} is complex: split it into real and imaginary parts")
    if array.dtype == np.float64:
        array = array.astype(np.float32)
    if array.dtype in (np.int32, np.uint16, np.uint32):  # JAX has no larger ones, torch indexes with no smaller ones
        array = array.astype(np.int64)
    return torch.from_numpy(np.ascontiguousarray(np.resize(array[:rows], (rows, *array.shape[1:]))))


def _traced(
    torch: Any, module: Any, loss: Callable[..., Any], inputs: list[str], batch: Mapping[str, Any]
) -> tuple[Any, list[str]]:
    metrics: list[str] = []
    objective = _objective(module, loss, inputs, metrics).train(module.training)
    sizes = {name: {0: torch.export.Dim.AUTO} for name in batch}
    table = torch.export.default_decompositions()
    for each in WHOLE:
        name, _, overload = each.partition(".")
        kept = getattr(getattr(torch.ops.aten, name), overload or "default")
        if kept in table:
            table.pop(kept)
    try:
        with _quietly():
            program = torch.export.export(objective, (dict(batch),), dynamic_shapes=(sizes,), strict=False)
            program = program.run_decompositions(table)
    except InputError:
        raise
    except Exception as error:  # torch raises many types, for what a program does that no graph can
        raise InputError(_why(error)) from error
    for each in program.graph_signature.output_specs:
        if each.kind.name == "USER_INPUT_MUTATION":
            raise InputError(
                "the module or its loss writes into its input: copy it first (x = x.clone()), the batch is not its own"
            )
        if each.kind.name == "PARAMETER_MUTATION":
            raise InputError(f"the module writes into its parameter {each.target}: use a buffer for what it observes")
    for each in program.graph.nodes:
        if getattr(getattr(each.meta.get("val"), "dtype", None), "is_complex", False):
            raise InputError(
                f"{described(_node(torch, each))} makes complex numbers: split them into real and imaginary parts"
            )
    return program, metrics


@contextmanager
def _quietly() -> Iterator[None]:
    """Without what torch says of itself, and without the graphs that it prints where it fails: `_why` says the line."""
    disabled, held = logging.root.manager.disable, io.StringIO()
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stderr(held):
            for message in NOT_OURS:
                warnings.filterwarnings("ignore", message)
            yield
    finally:
        logging.disable(disabled)
    sys.stderr.write(held.getvalue())  # what the module itself warns of, where it can be traced


def _why(error: Exception) -> str:
    """In one sentence, with the line of the user's that it is about."""
    text = str(error)
    line = _line(text)
    if "data-dependent" in text or "Could not guard" in text or "unbacked" in text or "GuardOnDataDependent" in text:
        what = "what it does depends on values of the data, and a compiled program has one flow: use torch.where"
    else:
        what = f"torch.export cannot trace it: {text.strip().splitlines()[0][:300] if text.strip() else type(error)}"
    return f"{line + ': ' if line else ''}{what}"


def _line(trace: str) -> str:
    """The innermost line of a trace that is neither torch's nor ours."""
    import torch

    others = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]), "<")
    found = [each for each in re.findall(r'File "([^"]+)", line (\d+)', trace) if not each[0].startswith(others)]
    return f"{Path(found[-1][0]).name}:{found[-1][1]}" if found else ""


def _tied(module: Any) -> dict[str, str]:
    """Other names of parameters, by the first one of each."""
    first: dict[int, str] = {}
    found = {}
    for name, each in module.named_parameters(remove_duplicate=False):
        if first.setdefault(id(each), name) != name:
            found[name] = first[id(each)]
    return found


def _graph(
    torch: Any, program: Any, metrics: list[str], batch: Mapping[str, Any], tied: Mapping[str, str],
    groups: dict[Group, dict[str, np.ndarray]], prefix: str,
) -> Graph:  # fmt: skip
    """In plain data; arrays of the module are put into their groups."""
    arrays: dict[str, tuple[Group, str]] = {}
    rows: dict[str, str] = {}
    names = iter(batch)
    for each in program.graph_signature.input_specs:
        node, kind = each.arg.name, each.kind.name
        if kind == "USER_INPUT":
            rows[node] = next(names)
            continue
        target = str(each.target).removeprefix("module.")
        if kind == "PARAMETER":
            group: Group = "params"
            value, target = program.state_dict[each.target], tied.get(target, target)
        elif kind == "BUFFER":
            group = "buffers"
            value = (program.state_dict if each.persistent else program.constants)[each.target]
        else:
            group, value, target = "constants", program.constants[each.target], f"{prefix}{target}"
        arrays[node] = (group, target)
        groups[group].setdefault(target, _array(value))
    plain_masks(torch, program, batch)
    nodes = [_node(torch, each) for each in program.graph.nodes if each.op == "call_function"]
    outputs = next(each for each in program.graph.nodes if each.op == "output").args[0]
    found: list[Any] = []
    buffers: dict[str, Any] = {}
    for spec, value in zip(program.graph_signature.output_specs, outputs, strict=True):
        if spec.kind.name == "BUFFER_MUTATION":
            buffers[str(spec.target).removeprefix("module.")] = _argument(torch, value)
        else:
            found.append(_argument(torch, value))
    used = _used(nodes, [*found, *buffers.values()])
    return Graph(arrays, rows, tuple(used), found[0], dict(zip(metrics, found[1:], strict=True)), buffers)


def _used(nodes: list[Node], wanted: list[Any]) -> list[Node]:
    """Without what nothing needs."""
    needed = referred(wanted)
    kept = []
    for node in reversed(nodes):
        if node.name in needed:
            kept.append(node)
            needed |= referred([*node.args, *node.kwargs.values()])
    return kept[::-1]


def _array(value: Any) -> np.ndarray:
    """As it trains: what a module keeps in 16 bits is float32; the trainer says what is computed in 16."""
    from tpuswarm.train.data.arrays import to_numpy

    dtypes = {"float64": np.float32, "bfloat16": np.float32, "float16": np.float32, "int64": np.int32}
    if value.device.type == "meta":
        name = str(value.dtype).removeprefix("torch.")
        return shape_alone(value.shape, dtypes.get(name, name))
    found: np.ndarray = to_numpy(value.detach())
    other = dtypes.get(str(found.dtype))
    return found.astype(other) if other else found.copy()


def _node(torch: Any, node: Any) -> Node:
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        namespace, _, name = target._schema.name.partition("::")
        op = name if namespace == "aten" else f"{namespace}.{name}"
    else:
        module = "operator" if target in vars(operator).values() else getattr(target, "__module__", "")
        op = target.__name__ if target.__name__.startswith("sym_") else f"{module}.{target.__name__}"
    stack = node.meta.get("nn_module_stack") or {}
    path = next((each[0] for each in reversed(list(stack.values()))), "")
    path = re.sub(r"^L\['self'\]\.?|^module\.?", "", re.sub(r"^L\['self'\]\.?", "", str(path)))
    kwargs = {name: _argument(torch, each) for name, each in node.kwargs.items() if name not in ("layout", "device")}
    args = tuple(_argument(torch, each) for each in node.args)
    return Node(node.name, op, args, kwargs, path, _line(node.meta.get("stack_trace") or ""))


def _argument(torch: Any, value: Any) -> Any:
    if isinstance(value, torch.fx.Node):
        return Ref(value.name)
    if isinstance(value, (list, tuple)):
        return [_argument(torch, each) for each in value]
    if isinstance(value, torch.dtype):
        return Dtype(str(value).removeprefix("torch."))
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return None  # a layout, a device or a memory format, which mean nothing to JAX
