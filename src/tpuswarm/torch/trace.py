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

import torch
from torch._decomp import core_aten_decompositions, decomposition_table
from torch._dispatch.python import enable_python_dispatcher
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.nn import functional

from tpuswarm.errors import InputError
from tpuswarm.torch.custom_ops import replacements
from tpuswarm.torch.lightning import LightningSteps
from tpuswarm.torch.ops import OPS, RANDOM

LIBRARY_PATHS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]), contextlib.__file__, "<")


class Location(NamedTuple):
    """Submodule and source line of an operation."""

    module: str = ""
    """Path of the innermost submodule."""
    source_line: str = ""
    """User code: `model.py:12`."""
    is_backward: bool = False


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
    locations: Mapping[Any, Location]
    """By node."""
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
    with _export_flags():
        recorded = make_fx(step, tracing_mode="fake", _allow_non_fake_inputs=True)(params, buffers, batch)
        locations = step.locations.by_node(recorded.graph)
        _check_as_strided(recorded.graph, locations)
        replayed_locations = SourceLocations()

        class Replay(torch.fx.Interpreter):  # type: ignore[misc]
            def run_node(self, node: Any) -> Any:
                replayed_locations.mark(locations[node])
                return super().run_node(node)

        def replay(*args: Any) -> Any:
            return Replay(recorded).run(*args, enable_io_processing=False)

        functional_step = torch.func.functionalize(replay, remove="mutations_and_views")
        tracer = make_fx(functional_step, _decompositions(), "fake", _allow_non_fake_inputs=True)
        graph = tracer(*params.values(), *buffers.values(), *batch.values())
    groups = {"params": params, "buffers": buffers, "batch": batch}
    graph_inputs = [(group, name) for group, arrays in groups.items() for name in arrays]
    return TracedStep(
        graph,
        graph_inputs,
        step.metrics,
        list(buffers),
        step.gradients,
        replayed_locations.by_node(graph.graph),
        len(next(iter(batch.values()))),
    )


@cache
def _decompositions() -> dict[Any, Callable[..., Any]]:
    """Return torch's decompositions of the operators that OPS lacks. Collecting them takes a third of a second."""
    implemented = {*OPS, *RANDOM}
    # further ones lead to ATen operators too, except torch._refs
    further = {op: f for op, f in decomposition_table.items() if f.__module__ == "torch._decomp.decompositions"}
    return {
        op: decomposition
        for op, decomposition in {**further, **core_aten_decompositions()}.items()
        if op.name().partition("::")[2].partition(".")[0] not in implemented
    }


def _check_as_strided(graph: Any, locations: Mapping[Any, Location]) -> None:
    for node in graph.nodes:
        if node.target is torch.ops.aten.as_strided.default and not node.args[0].meta["val"].is_contiguous():
            line = locations[node].source_line
            raise InputError(f"{line}: as_strided needs memory without gaps; call contiguous() first")


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
    """Set the flags of torch.export that modules ask for; turn off fused attention layers and checks of values."""
    flags = [name for name in ("_is_compiling_flag", "_is_exporting_flag") if hasattr(torch.compiler, name)]
    with contextlib.ExitStack() as stack:
        stack.enter_context(enable_python_dispatcher())
        stack.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
        torch.backends.mha.set_fastpath_enabled(False)
        distribution = torch.distributions.Distribution
        stack.callback(distribution.set_default_validate_args, distribution._validate_args)
        distribution.set_default_validate_args(False)
        for name in flags:
            stack.callback(setattr, torch.compiler, name, getattr(torch.compiler, name))
            setattr(torch.compiler, name, True)
        yield


class SourceLocations:
    """Locations of the nodes of a graph, noted while the graph is recorded."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._locations: list[Location] = []

    def mark(self, location: Location) -> None:
        """Assign the nodes that are recorded from now on to a location."""
        mode = get_proxy_mode()
        if mode is not None and (not self._locations or self._locations[-1] != location):
            self._starts.append(len(mode.tracer.graph.nodes))
            self._locations.append(location)

    def by_node(self, graph: Any) -> dict[Any, Location]:
        """Return the location of each node."""
        return {
            node: _last_before(self._starts, self._locations, position) for position, node in enumerate(graph.nodes)
        }


def _last_before(starts: list[int], locations: list[Location], position: int) -> Location:
    at = bisect.bisect_right(starts, position) - 1
    return locations[at] if at >= 0 else Location()


class _Step:
    """(params, buffers, batch) → loss, metrics, new buffers and gradients, as one flat list."""

    def __init__(self, module: Any, loss: Callable[..., Any], inputs: list[str], train: bool):
        self._module, self._loss, self._inputs, self._train = module, loss, inputs, train
        self._params = dict(module.named_parameters(remove_duplicate=False))
        self._buffers = dict(module.named_buffers(remove_duplicate=False))
        self._param_names = {id(param): name for name, param in module.named_parameters()}
        self._buffer_names = {id(buffer): name for name, buffer in module.named_buffers()}
        self._trained = {name for name, param in module.named_parameters() if train and param.requires_grad}
        self.locations = SourceLocations()
        self.metrics: list[str] = []
        self.gradients: list[str] = []
        self._module_path = [""]
        self._sequence_numbers: list[int] = []
        """Autograd's sequence numbers at each call of torch, in the order of `_forward_locations`."""
        self._forward_locations: list[Location] = []

    def __call__(self, params: dict[str, Any], buffers: dict[str, Any], batch: dict[str, Any]) -> list[Any]:
        self.locations.mark(Location())
        params = {name: param.detach().requires_grad_(name in self._trained) for name, param in params.items()}
        buffers = {name: buffer.clone() for name, buffer in buffers.items()}
        for name, param in self._params.items():
            self._owner(name)._parameters[name.rpartition(".")[2]] = params[self._param_names[id(param)]]
        for name, buffer in self._buffers.items():
            self._owner(name)._buffers[name.rpartition(".")[2]] = buffers[self._buffer_names[id(buffer)]]
        with self._watch_calls(), torch.set_grad_enabled(self._train):
            loss, metrics = call_loss(self._module, self._loss, self._inputs, batch)
        rows = len(next(iter(batch.values())))
        _check_scalar(loss, "the loss", rows)
        for name, metric in metrics.items():
            _check_scalar(metric, f"the metric {name}", rows)
        self.metrics = list(metrics)
        new_buffers = [self._owner(name)._buffers[name.rpartition(".")[2]] for name in buffers]
        gradients = self._differentiate(loss, {name: params[name] for name in params if name in self._trained})
        self.gradients = list(gradients)
        return [loss, *(metric.detach() for metric in metrics.values()), *new_buffers, *gradients.values()]

    def _owner(self, name: str) -> Any:
        return self._module.get_submodule(name.rpartition(".")[0])

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
            location = _last_before(self._sequence_numbers, self._forward_locations, node._sequence_nr())
            location = location._replace(is_backward=True)
            node.register_prehook(lambda _, location=location: self.locations.mark(location))
        self.locations.mark(Location(is_backward=True))
        gradients = torch.autograd.grad(loss, list(params.values()), allow_unused=True)
        return {name: gradient for name, gradient in zip(params, gradients, strict=True) if gradient is not None}

    @contextlib.contextmanager
    def _watch_calls(self) -> Iterator[None]:
        """Note module and line of each call of torch, and replace functions by custom operators."""
        step, replaced = self, replacements()

        class Mode(torch.overrides.TorchFunctionMode):  # type: ignore[misc]
            def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                step._note_location()
                return replaced.get(function, function)(*args, **(kwargs or {}))

        with contextlib.ExitStack() as stack:
            for name, submodule in self._module.named_modules():
                enter = submodule.register_forward_pre_hook(lambda *_, name=name: self._module_path.append(name))
                leave = submodule.register_forward_hook(lambda *_: self._leave_module(), always_call=True)
                stack.callback(enter.remove)
                stack.callback(leave.remove)
                if self._train and _averages_all_steps(submodule):
                    stack.callback(submodule.register_forward_pre_hook(_use_batch_statistics).remove)
                    stack.callback(submodule.register_forward_hook(_average_statistics).remove)
            # torch's own functions call attention below the mode
            original = functional.scaled_dot_product_attention
            stack.callback(setattr, functional, "scaled_dot_product_attention", original)
            functional.scaled_dot_product_attention = replaced[original]
            # torch looks into a mask for a faster kernel, which a trace cannot; without the hint it applies the mask
            transformer, name = torch.nn.modules.transformer, "_detect_is_causal_mask"
            stack.callback(setattr, transformer, name, getattr(transformer, name))
            setattr(transformer, name, lambda mask, is_causal=None, size=None: is_causal is True)
            stack.enter_context(Mode())
            yield

    def _leave_module(self) -> None:
        self._module_path.pop()

    def _note_location(self) -> None:
        location = Location(self._module_path[-1], find_user_line(sys._getframe(2)))
        self.locations.mark(location)
        self._sequence_numbers.append(torch.autograd._get_sequence_nr())
        self._forward_locations.append(location)


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
