"""A PyTorch module and its loss, traced into plain data. Needs torch, as trace.py and whole.py do."""

import io
import logging
import operator
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from typing import Any

import numpy as np

from tpuswarm.errors import InputError, first_line
from tpuswarm.torch.graph import Dtype, Exported, Graph, Group, Node, Ref, referred, shape_alone
from tpuswarm.torch.masks import plain_masks
from tpuswarm.torch.rows import SIZES, merged
from tpuswarm.torch.run import check_operators, described, draws
from tpuswarm.torch.trace import Place, Traced, trace, users_line
from tpuswarm.train.process.terminal import say

LEAST = (2, 6)
"""The first torch whose tracer does what we ask for."""
SAME = ("clone", "detach", "alias", "lift_fresh_copy")
"""What gives its argument."""
MEANINGLESS = ("layout", "device", "pin_memory", "memory_format", "generator", "non_blocking")
"""Arguments of operators, for JAX."""
LARGEST = 2**31
"""Of whole numbers: JAX has 32 bits for torch's 64."""


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
    batches = [{name: example(name, each[:1], rows) for name, each in row.items()} for rows in SIZES]
    groups: dict[Group, dict[str, np.ndarray]] = {
        "params": {name: _array(name, each) for name, each in module.named_parameters()},
        "buffers": {name: _array(name, each) for name, each in module.named_buffers()},
        "constants": {},
    }
    graphs = [
        merged([_graph(torch, traced, train, groups) for traced in _traced(module, loss, inputs, batches, train)])
        for train in (True, False)
    ]
    check_operators(*graphs)
    floats = {name: each for name, each in groups["params"].items() if not np.issubdtype(each.dtype, np.floating)}
    if floats:
        raise InputError(f"parameter {next(iter(floats))} is {floats[next(iter(floats))].dtype}: not a float")
    if drawn := next((each for each in graphs[1].nodes if draws(each)), None):
        raise InputError(f"{described(drawn)} draws random numbers in evaluation too: draw them in training alone")
    integers = tuple(name for name, each in batches[0].items() if not each.is_floating_point())
    trained = {name for name, each in module.named_parameters() if each.requires_grad}
    if lost := sorted(trained - graphs[0].gradients.keys()):
        more = f" and {len(lost) - 3} more" if len(lost) > 3 else ""
        say(f"no gradient reaches {', '.join(lost[:3])}{more}: they stay as they are, as in torch", err=True)
    frozen = tuple(name for name in groups["params"] if name not in graphs[0].gradients)
    return Exported(
        type(module).__name__, groups, _tied(module), graphs[0], graphs[1], integers, frozen, device != "meta"
    )


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


def example(name: str, array: np.ndarray, rows: int) -> Any:
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
    module: Any, loss: Callable[..., Any], inputs: list[str], batches: Sequence[Mapping[str, Any]], train: bool
) -> Iterator[Traced]:  # fmt: skip
    """As `trace`, for each batch; what the module prints and warns of is shown for the first in training."""
    for number, batch in enumerate(batches):
        yield _traced_once(module, loss, inputs, batch, train, shown=train and number == 0)


def _traced_once(
    module: Any, loss: Callable[..., Any], inputs: list[str], batch: Mapping[str, Any], train: bool, shown: bool
) -> Traced:  # fmt: skip
    try:
        with _quietly(shown):
            return trace(module, loss, inputs, batch, train)
    except InputError:
        raise
    except Exception as error:  # torch raises many types, for what a program does that no graph can
        raise InputError(_why(error)) from error


@contextmanager
def _quietly(shown: bool) -> Iterator[None]:
    """Without what torch says of itself, and without the graphs that it prints where it fails: `_why` says the line."""
    disabled, held = logging.root.manager.disable, io.StringIO()
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stderr(held), nullcontext() if shown else redirect_stdout(held):
            warnings.filterwarnings("error", ".*autograd kernel was not registered")  # its gradients would be lost
            yield
    finally:
        logging.disable(disabled)
    if shown:
        sys.stderr.write(held.getvalue())  # what the module itself warns of, where it can be traced


def _why(error: Exception) -> str:
    """In one sentence, with the line of the user's that it is about."""
    text, kind, last = str(error), type(error).__name__, error.__traceback__
    line = ""
    while last is not None:
        line, last = users_line(last.tb_frame, last.tb_lineno) or line, last.tb_next
    if kind == "DynamicOutputShapeException":
        what = (
            "a mask as an index gives a shape that depends on the data, which no compiled program has: use torch.where "
            "or a sum with weights"
        )
    elif kind.startswith("DataDependent") or "data-dependent" in text or "unbacked" in text:
        what = "what it does depends on values of the data, and a compiled program has one flow: use torch.where"
    else:
        what = f"torch cannot trace it: {first_line(error)[:300]}"
    return f"{line + ': ' if line else ''}{what}"


def _tied(module: Any) -> dict[str, str]:
    """Other names of parameters, by the first one of each."""
    first: dict[int, str] = {}
    found = {}
    for name, each in module.named_parameters(remove_duplicate=False):
        if first.setdefault(id(each), name) != name:
            found[name] = first[id(each)]
    return found


def _graph(torch: Any, traced: Traced, train: bool, groups: dict[Group, dict[str, np.ndarray]]) -> Graph:
    """In plain data; constants are put into their group."""
    module, places, prefix = traced.graph, traced.places, "train." if train else "evaluate."
    given = [each for each in module.graph.nodes if each.op == "placeholder"]
    arrays: dict[str, tuple[Group, str]] = {}
    own: list[tuple[Group, str]] = [("params", name) for name in traced.params]
    own += [("buffers", name) for name in traced.buffers]
    arrays |= {node.name: which for node, which in zip(given, own, strict=False)}
    rows = {node.name: name for node, name in zip(given[len(own) :], traced.batch, strict=True)}
    plain_masks(torch, module)
    same: dict[str, Ref] = {}
    nodes = []
    for each in module.graph.nodes:
        if each.op == "get_attr":
            name = f"{prefix}{each.target}"
            arrays[each.name] = ("constants", name)
            constant = _constant(getattr(module, each.target), name)
            if not np.array_equal(
                groups["constants"].setdefault(name, constant), constant, equal_nan=constant.dtype.kind == "f"
            ):
                raise InputError(
                    f"{places[each].line}: a constant depends on the number of rows: make it with torch.arange or full"
                )
        if each.op != "call_function":
            continue
        node = _node(torch, each, places[each], same)
        if node.op == "copy_":
            _refuse_writing(node, arrays, rows)
        if node.op in SAME:
            same[node.name] = node.args[0]
            continue
        nodes.append(node)
    outputs = [_argument(each, same) for each in next(iter(reversed(module.graph.nodes))).args[0]]
    loss, *outputs = outputs
    metrics = dict(zip(traced.metrics, outputs, strict=False))
    outputs = outputs[len(metrics) :]
    buffers = {
        name: each
        for name, each in zip(traced.buffers, outputs, strict=False)
        if arrays.get(each.name) != ("buffers", name)
    }
    gradients = dict(zip(traced.gradients, outputs[len(traced.buffers) :], strict=True))
    nodes = _used(nodes, [loss, *metrics.values(), *buffers.values(), *gradients.values()])
    backward = {each.name for each in module.graph.nodes if places[each].backward}
    forward = next((number for number, node in enumerate(nodes) if node.name in backward), len(nodes))
    return Graph(arrays, rows, tuple(nodes), loss, metrics, buffers, gradients, forward)


def _constant(value: Any, name: str) -> np.ndarray:
    if value.requires_grad:
        raise InputError(
            "the loss uses a parameter that is not the module's: make it part of the module, so that it is trained"
        )
    return _array(name, value)


def _refuse_writing(node: Node, arrays: Mapping[str, tuple[Group, str]], rows: Mapping[str, str]) -> None:
    written = node.args[0].name
    if written in rows:
        raise InputError(
            f"the module or its loss writes into its input {rows[written]}: copy it first (x = x.clone()), the batch "
            "is not its own"
        )
    raise InputError(f"the module writes into {arrays[written][1]}: use a buffer for what it observes")


def _used(nodes: list[Node], wanted: list[Any]) -> list[Node]:
    """Without what nothing needs."""
    needed = referred(wanted)
    kept = []
    for node in reversed(nodes):
        if node.name in needed:
            kept.append(node)
            needed |= referred([*node.args, *node.kwargs.values()])
    return kept[::-1]


def _array(name: str, value: Any) -> np.ndarray:
    """As it trains: what a module keeps in 16 bits is float32; the trainer says what is computed in 16."""
    from tpuswarm.train.data.arrays import to_numpy

    dtypes: dict[str, Any] = {
        "float64": np.float32, "bfloat16": np.float32, "float16": np.float32, "int64": np.int32,
        "complex128": np.complex64,
    }  # fmt: skip
    if value.device.type == "meta":
        kind = str(value.dtype).removeprefix("torch.")
        return shape_alone(value.shape, dtypes.get(kind, kind))
    found: np.ndarray = to_numpy(value.detach())
    if found.dtype == np.int64 and found.size and max(-int(found.min()), int(found.max())) >= LARGEST:
        raise InputError(f"{name} holds {int(np.abs(found).max())}, and JAX has whole numbers of 32 bits")
    other = dtypes.get(str(found.dtype))
    return found.astype(other) if other else found.copy()


def _node(torch: Any, node: Any, place: Place, same: Mapping[str, Ref]) -> Node:
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        namespace, _, name = target._schema.name.partition("::")
        op = name if namespace == "aten" else f"{namespace}.{name}"
        if op.endswith("_copy") and op not in ("_to_copy", "lift_fresh_copy"):
            op = op.removesuffix("_copy")  # a view that may not be one
    else:
        op = "getitem" if target is operator.getitem else f"{getattr(target, '__module__', '')}.{target.__name__}"
    args = tuple(_argument(each, same) for each in node.args)
    kwargs = {name: _argument(each, same) for name, each in node.kwargs.items() if name not in MEANINGLESS}
    found = Node(node.name, op, args, kwargs, place.module, place.line)
    if not op.startswith("slice") and (large := _too_large([*args, *kwargs.values()])):
        raise InputError(f"{described(found)} takes the number {large}, and JAX has whole numbers of 32 bits")
    return found


def _too_large(value: Any) -> int:
    if isinstance(value, list):
        return next(filter(None, map(_too_large, value)), 0)
    return value if isinstance(value, int) and abs(value) >= LARGEST else 0


def _argument(value: Any, same: Mapping[str, Ref]) -> Any:
    import torch

    if isinstance(value, torch.fx.Node):
        return same.get(value.name, Ref(value.name))
    if isinstance(value, (list, tuple)):
        return [_argument(each, same) for each in value]
    if isinstance(value, torch.dtype):
        return Dtype(str(value).removeprefix("torch."))
    if value is None or isinstance(value, (bool, int, float, complex, str)):
        return value
    return None  # a layout, a device or a memory format, which mean nothing to JAX
