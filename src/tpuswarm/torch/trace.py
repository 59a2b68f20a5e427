"""Trace one step of a module: the forward pass, the loss, and the backward pass of torch's autograd. Needs torch.

`make_fx` records ATen operators below autograd, so gradients are torch's own. A second pass removes in-place writes and
views from the recorded graph.
"""

import bisect
import contextlib
import copy
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from traceback import walk_tb
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch._decomp import core_aten_decompositions, decomposition_table
from torch._dispatch.python import enable_python_dispatcher
from torch.fx import traceback
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional
from torch.nn.utils import stateless

from tpuswarm.errors import InputError
from tpuswarm.torch.custom_ops import replacements
from tpuswarm.torch.lightning import LightningSteps
from tpuswarm.torch.ops import OPS, RANDOM

REFERENCES = {
    "linalg_vector_norm", "elu", "hardtanh", "leaky_relu", "log_normal", "cauchy", "geometric",
}  # fmt: skip
"""Operators with a decomposition into ATen's in torch._refs, where most lead to other operators."""
LIBRARY_PATHS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]), contextlib.__file__, "<")


class Location(NamedTuple):
    """Submodule and source line of an operation."""

    module: str = ""
    """Path of the innermost submodule."""
    source_line: str = ""
    """User code: `model.py:12`."""
    is_backward: bool = False


NOWHERE = Location()


class TracedStep(NamedTuple):
    """A recorded step."""

    graph: Any
    """A torch.fx.GraphModule. Outputs: the loss, metrics, new buffers, gradients."""
    inputs: list[tuple[Any, str]]
    """Group, or "batch", and name of each input."""
    metrics: list[str]
    buffers: list[str]
    gradients: list[str]
    """Parameters that have a gradient."""
    rows: int
    """Of the batch."""


def trace(
    module: Any, loss: Callable[..., Any], inputs: list[str], batch: Mapping[str, Any], train: bool
) -> TracedStep:  # fmt: skip
    """Record a step on a batch of tensors, also without data (meta); in evaluation (`train=False`) without gradients.

    Raise InputError for a loss that is not a scalar. Errors of torch pass through.
    """
    module = copy_module(module).train(train)  # a forward pass may set attributes
    fake_mode = torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True)
    params = {name: _off_meta(param.detach(), fake_mode) for name, param in module.named_parameters()}
    buffers = {name: _off_meta(buffer, fake_mode) for name, buffer in module.named_buffers()}
    batch = {name: _off_meta(array, fake_mode) for name, array in batch.items()}
    step = _Step(module, loss, inputs, train)
    with _export_flags(), traceback.preserve_node_meta():
        recorded = make_fx(step, tracing_mode="fake", _allow_non_fake_inputs=True)(params, buffers, batch)
        _check_as_strided(recorded.graph)

        def replay(*args: Any) -> Any:  # copies the locations
            return torch.fx.Interpreter(recorded).run(*args, enable_io_processing=False)

        functional_step = torch.func.functionalize(replay, remove="mutations_and_views")
        tracer = make_fx(functional_step, _decompositions(), "fake", _allow_non_fake_inputs=True)
        graph = tracer(*params.values(), *buffers.values(), *batch.values())
    groups = {"params": params, "buffers": buffers, "batch": batch}
    graph_inputs = [(group, name) for group, arrays in groups.items() for name in arrays]
    rows = len(next(iter(batch.values())))
    return TracedStep(graph, graph_inputs, step.metrics, list(buffers), step.gradients, rows)


@cache
def _decompositions() -> dict[Any, Callable[..., Any]]:
    """Return torch's decompositions of the operators that OPS lacks. Collecting them takes a third of a second."""
    core, found = core_aten_decompositions(), {}
    for op, decomposition in {**decomposition_table, **core}.items():
        name = op.name().partition("::")[2].partition(".")[0]
        leads_to_aten = op in core or name in REFERENCES or decomposition.__module__ == "torch._decomp.decompositions"
        if leads_to_aten and name not in OPS and name not in RANDOM:
            found[op] = decomposition
    return found


def _check_as_strided(graph: Any) -> None:
    for node in graph.nodes:
        if node.target is torch.ops.aten.as_strided.default and not node.args[0].meta["val"].is_contiguous():
            raise InputError(
                f"{location_of(node).source_line}: as_strided needs memory without gaps; call contiguous() first"
            )


def copy_module(module: Any) -> Any:
    """Copy a module, but not its parameters and buffers. Raise InputError if it cannot be copied."""
    tensors = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    try:
        return copy.deepcopy(module, tensors)
    except Exception as error:  # attributes may raise anything
        raise InputError(f"{type(module).__name__} cannot be copied: {type(error).__name__}: {error}") from error


def _off_meta(tensor: Any, fake_mode: Any) -> Any:
    if not tensor.is_meta:  # for meta tensors autograd lacks some operators
        return tensor
    with fake_mode:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)


@contextlib.contextmanager
def _export_flags() -> Iterator[None]:
    """Set the flags of torch.export that modules ask for; turn off what a trace cannot follow."""
    attention = functional.scaled_dot_product_attention
    with (
        enable_python_dispatcher(),
        patch.multiple(torch.compiler, create=True, _is_compiling_flag=True, _is_exporting_flag=True),
        patch.object(torch.backends.mha, "_is_fastpath_enabled", False),  # fused layers
        patch.object(torch.distributions.Distribution, "_validate_args", False),
        patch.object(functional, attention.__name__, replacements()[attention]),  # torch's own functions call it
        # torch looks into a mask for a faster kernel; without the hint it applies the mask
        patch.object(torch.nn.modules.transformer, "_detect_is_causal_mask", _is_hinted),
    ):
        yield


def _is_hinted(mask: Any, is_causal: bool | None = None, size: int | None = None) -> bool:
    return is_causal is True


def location_of(node: Any) -> Location:
    """Return the location of a node of a traced graph."""
    location: Location = node.meta.get("custom", {}).get("location", NOWHERE)
    return location


def _set_location(location: Location) -> None:
    """Assign the nodes that are recorded from now on to a location."""
    traceback.get_current_meta()["custom"] = {"location": location}


class _Step(torch.overrides.TorchFunctionMode):  # type: ignore[misc]
    """(params, buffers, batch) → loss, metrics, new buffers and gradients, as one flat list.

    As a mode it notes module and line of each call of torch, and replaces functions by custom operators.
    """

    def __init__(self, module: Any, loss: Callable[..., Any], inputs: list[str], train: bool):
        """module: a copy of its own."""
        super().__init__()
        self._module, self._loss, self._inputs, self._train = module, loss, inputs, train
        self._trained = {name for name, param in module.named_parameters() if train and param.requires_grad}
        self.metrics: list[str] = []
        self.gradients: list[str] = []
        self._module_path = [""]
        self._sequence_numbers: list[int] = []
        """Autograd's sequence numbers at each call of torch, in the order of `_locations`."""
        self._locations: list[Location] = []
        for name, submodule in module.named_modules():
            submodule.register_forward_pre_hook(lambda *_, name=name: self._module_path.append(name))
            submodule.register_forward_hook(lambda *_: self._leave_module(), always_call=True)
            if train and _averages_all_steps(submodule):
                submodule.register_forward_pre_hook(_use_batch_statistics)
                submodule.register_forward_hook(_average_statistics)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        location = Location(self._module_path[-1], find_user_line(sys._getframe(1)))
        _set_location(location)
        self._sequence_numbers.append(torch.autograd._get_sequence_nr())
        self._locations.append(location)
        return replacements().get(function, function)(*args, **(kwargs or {}))

    def _leave_module(self) -> None:
        self._module_path.pop()

    def __call__(self, params: dict[str, Any], buffers: dict[str, Any], batch: dict[str, Any]) -> list[Any]:
        _set_location(NOWHERE)
        params = {name: param.detach().requires_grad_(name in self._trained) for name, param in params.items()}
        arrays = params | {name: buffer.clone() for name, buffer in buffers.items()}
        trained = {name: param for name, param in params.items() if name in self._trained}
        with stateless._reparametrize_module(self._module, arrays, tie_weights=True):  # leaves new buffers in `arrays`
            with self, torch.set_grad_enabled(self._train):
                loss, metrics = call_loss(self._module, self._loss, self._inputs, batch)
            rows = len(next(iter(batch.values())))
            for name, value in {"the loss": loss, **{f"the metric {name}": x for name, x in metrics.items()}}.items():
                _check_scalar(value, name, rows)
            gradients = self._differentiate(loss, trained)  # may run parts of the module again (checkpoint)
        self.metrics, self.gradients = list(metrics), list(gradients)
        new_buffers = [arrays[name] for name in buffers]
        return [loss, *(metric.detach() for metric in metrics.values()), *new_buffers, *gradients.values()]

    def _differentiate(self, loss: Any, params: dict[str, Any]) -> dict[str, Any]:
        """Return torch's gradients; mark their operators with the location of the forward pass."""
        if not loss.requires_grad:
            return {}
        queue, seen = [loss.grad_fn], {None}
        while queue:
            node = queue.pop()
            if node in seen:
                continue
            seen.add(node)
            queue += [other for other, _ in node.next_functions]
            call = bisect.bisect_right(self._sequence_numbers, node._sequence_nr()) - 1
            location = (self._locations[call] if call >= 0 else NOWHERE)._replace(is_backward=True)
            node.register_prehook(lambda _, location=location: _set_location(location))
        _set_location(NOWHERE._replace(is_backward=True))
        gradients = torch.autograd.grad(loss, list(params.values()), allow_unused=True)
        return {name: gradient for name, gradient in zip(params, gradients, strict=True) if gradient is not None}


def call_loss(
    module: Any, loss: Callable[..., Any], inputs: list[str], batch: Mapping[str, Any]
) -> tuple[Any, dict[str, Any]]:  # fmt: skip
    """Return the loss of a batch, and its metrics."""
    is_lightning = isinstance(loss, LightningSteps)
    outputs = module if is_lightning else module(**{name: batch[name] for name in inputs})
    result = loss(outputs, dict(batch))
    return result if isinstance(result, tuple) else (result, {})


def _averages_all_steps(norm: Any) -> bool:
    # BatchNorm(momentum=None): its statistics are means over all steps
    return getattr(norm, "momentum", 0) is None and getattr(norm, "running_mean", None) is not None


def _use_batch_statistics(norm: Any, _: Any) -> None:
    norm.momentum, norm.previous = 1.0, (norm.running_mean.clone(), norm.running_var.clone())


def _average_statistics(norm: Any, *_: Any) -> None:
    norm.momentum = None
    for name, previous in zip(("running_mean", "running_var"), norm.previous, strict=True):
        norm._buffers[name] = previous + (norm._buffers[name] - previous) / norm.num_batches_tracked


def _check_scalar(value: Any, name: str, rows: int) -> None:
    if not isinstance(value, torch.Tensor) or value.dim():
        got = type(value).__name__
        if isinstance(value, torch.Tensor):
            first, *others = value.shape
            got = f"[{', '.join(['rows' if first == rows else str(first), *map(str, others)])}]"
        raise InputError(f"{name} is {got}; return a scalar tensor, the mean over the batch")


def find_user_line(frame: Any) -> str:
    """Return the innermost line of user code in a frame's callers: `model.py:12`."""
    while frame is not None and not _is_user_code(frame):
        frame = frame.f_back
    return _format_line(frame, frame.f_lineno) if frame is not None else ""


def traceback_line(error: Exception) -> str:
    """Return the innermost line of user code in an error's traceback: `model.py:12`."""
    frames = [(frame, line) for frame, line in walk_tb(error.__traceback__) if _is_user_code(frame)]
    return _format_line(*frames[-1]) if frames else ""


def _is_user_code(frame: Any) -> bool:
    return not frame.f_code.co_filename.startswith(LIBRARY_PATHS)


def _format_line(frame: Any, line: int) -> str:
    return f"{Path(frame.f_code.co_filename).name}:{line}"
