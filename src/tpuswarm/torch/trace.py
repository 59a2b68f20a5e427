"""One step of a module, as torch itself computes it: forward pass, and the backward pass of torch's autograd.

Needs torch. `make_fx` records ATen operators below autograd, so that a gradient is what torch says it is, whatever
stops it or replaces it. A second pass takes writing in place and views out of the recorded graph.
"""

import bisect
import contextlib
import copy
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tpuswarm.errors import InputError
from tpuswarm.torch.ops import OPS, RANDOM
from tpuswarm.torch.whole import replacements

FORMS = {*OPS, *RANDOM}
"""What torch does not take apart, because JAX has a form of it."""


class Place(NamedTuple):
    """Where an operator comes from."""

    module: str = ""
    """The path of the innermost module."""
    line: str = ""
    """Of the user's source: `model.py:12`."""
    backward: bool = False


class Traced(NamedTuple):
    """A recorded step."""

    graph: Any
    """A torch.fx.GraphModule. Inputs: parameters, buffers, batch; outputs: loss, metrics, buffers, gradients."""
    params: list[str]
    buffers: list[str]
    batch: list[str]
    metrics: list[str]
    gradients: list[str]
    """The parameters that have a gradient."""
    places: Mapping[Any, Place]
    """By node."""


def trace(
    module: Any, loss: Callable[..., Any], inputs: list[str], batch: Mapping[str, Any], train: bool
) -> Traced:  # fmt: skip
    """Record a step on a batch of torch's tensors; without train, an evaluation, which has no gradients.

    Raises InputError for a loss that is no scalar, and whatever torch raises.
    """
    import torch
    from torch._decomp import core_aten_decompositions
    from torch.fx.experimental.proxy_tensor import make_fx

    module = _copied(module).train(train)
    fake = torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True)
    params = {name: _present(torch, each.detach(), fake) for name, each in module.named_parameters()}
    buffers = {name: _present(torch, each, fake) for name, each in module.named_buffers()}
    step = _Step(torch, module, loss, inputs, train)
    with _tracing(torch):
        first = make_fx(step, tracing_mode="fake", _allow_non_fake_inputs=True)(params, buffers, dict(batch))
        places = step.places.by_node(first.graph)
        _require_no_gaps(torch, first.graph, places)
        again = _Again(torch, first, places)
        table = {op: way for op, way in core_aten_decompositions().items() if _name(op) not in FORMS}
        second = make_fx(
            torch.func.functionalize(again.run, remove="mutations_and_views"),
            table,
            "fake",
            _allow_non_fake_inputs=True,
        )(*params.values(), *buffers.values(), *batch.values())
    known = again.places.by_node(second.graph)
    return Traced(second, list(params), list(buffers), list(batch), step.metrics, step.gradients, known)


def _require_no_gaps(torch: Any, graph: Any, places: Mapping[Any, Place]) -> None:
    """A view by steps in memory has a meaning here only where memory is as the shape says."""
    for node in graph.nodes:
        if node.target is torch.ops.aten.as_strided.default and not node.args[0].meta["val"].is_contiguous():
            raise InputError(f"{places[node].line}: as_strided reads memory that has gaps: call contiguous() first")


def _copied(module: Any) -> Any:
    """Another module of the same tensors: what a forward pass keeps in attributes does not get into the user's."""
    tensors = {id(each): each for each in (*module.parameters(), *module.buffers())}
    try:
        return copy.deepcopy(module, tensors)
    except Exception as error:  # whatever a module holds
        raise InputError(f"{type(module).__name__} cannot be copied: {type(error).__name__}: {error}") from error


def _present(torch: Any, tensor: Any, fake: Any) -> Any:
    """For one of the meta device a fake one of the CPU: of the former torch's autograd does not know every operator."""
    if not tensor.is_meta:
        return tensor
    with fake:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)


@contextlib.contextmanager
def _tracing(torch: Any) -> Iterator[None]:
    """As torch.export says it to those who ask, and without kernels that take a layer as a whole."""
    from torch._dispatch.python import enable_python_dispatcher

    flags = [name for name in ("_is_compiling_flag", "_is_exporting_flag") if hasattr(torch.compiler, name)]
    before = {name: getattr(torch.compiler, name) for name in flags}
    fast = torch.backends.mha.get_fastpath_enabled()
    with contextlib.ExitStack() as ends:
        ends.enter_context(enable_python_dispatcher())
        ends.callback(torch.backends.mha.set_fastpath_enabled, fast)
        torch.backends.mha.set_fastpath_enabled(False)
        for name in flags:
            ends.callback(setattr, torch.compiler, name, before[name])
            setattr(torch.compiler, name, True)
        yield


class _Places:
    """Notes where the operators of a graph come from while they are recorded, as intervals of the graph's nodes."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._places: list[Place] = []

    def mark(self, place: Place) -> None:
        """What is recorded from now on comes from here."""
        from torch.fx.experimental.proxy_tensor import get_proxy_mode

        mode = get_proxy_mode()
        if mode is not None and (not self._places or self._places[-1] != place):
            self._starts.append(len(mode.tracer.graph.nodes))
            self._places.append(place)

    def by_node(self, graph: Any) -> dict[Any, Place]:
        """Of each node."""
        found = {}
        for number, node in enumerate(graph.nodes):
            at = bisect.bisect_right(self._starts, number) - 1
            found[node] = self._places[at] if at >= 0 else Place()
        return found


class _Step:
    """(params, buffers, batch) → loss, metrics, buffers afterwards, gradients; all flat, in this order."""

    def __init__(self, torch: Any, module: Any, loss: Callable[..., Any], inputs: list[str], train: bool):
        self._torch, self._module, self._loss, self._inputs, self._train = torch, module, loss, inputs, train
        self._names = {name: each for name, each in module.named_parameters(remove_duplicate=False)}
        self._trained = {id(each): each.requires_grad for each in self._names.values()}
        self._first = {id(each): name for name, each in module.named_parameters()}
        self._same_buffers = list(module.named_buffers(remove_duplicate=False))
        self._first_buffers = {id(each): name for name, each in module.named_buffers()}
        self.places = _Places()
        self.metrics: list[str] = []
        self.gradients: list[str] = []
        self._path = [""]
        self._numbers: list[int] = []
        """Numbers of autograd's nodes, ascending, and the place where those from there on were made."""
        self._made: list[Place] = []

    def __call__(self, params: dict[str, Any], buffers: dict[str, Any], batch: dict[str, Any]) -> list[Any]:
        torch, module = self._torch, self._module
        self.places.mark(Place())
        trained = {self._first[key] for key, wanted in self._trained.items() if wanted and self._train}
        params = {name: each.detach().requires_grad_(name in trained) for name, each in params.items()}
        buffers = {name: each.clone() for name, each in buffers.items()}
        for name, each in self._names.items():
            self._holder(name)._parameters[name.rpartition(".")[2]] = params[self._first[id(each)]]
        for name, each in self._same_buffers:
            self._holder(name)._buffers[name.rpartition(".")[2]] = buffers[self._first_buffers[id(each)]]
        with self._watched(), torch.set_grad_enabled(self._train):
            found = self._loss(module(**{name: batch[name] for name in self._inputs}), dict(batch))
            value, extra = found if isinstance(found, tuple) else (found, {})
        rows = len(next(iter(batch.values())))
        _require_scalar(torch, value, "the loss", rows)
        for name, each in extra.items():
            _require_scalar(torch, each, f"the metric {name}", rows)
        self.metrics = list(extra)
        after = [self._holder(name)._buffers[name.rpartition(".")[2]] for name in buffers]
        gradients = self._differentiated(value, {name: params[name] for name in params if name in trained})
        self.gradients = [name for name, each in gradients.items() if each is not None]
        return [
            value,
            *(each.detach() for each in extra.values()),
            *after,
            *(gradients[name] for name in self.gradients),
        ]

    def _holder(self, name: str) -> Any:
        return self._module.get_submodule(name.rpartition(".")[0])

    def _differentiated(self, value: Any, params: dict[str, Any]) -> dict[str, Any]:
        """Torch's gradients, with the place in the forward pass of each operator."""
        if not value.requires_grad:
            return {}
        waiting, seen = [value.grad_fn], set()
        while waiting:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            waiting += [other for other, _ in node.next_functions]
            at = bisect.bisect_right(self._numbers, node._sequence_nr()) - 1
            place = (self._made[at] if at >= 0 else Place())._replace(backward=True)
            node.register_prehook(lambda _, place=place: self.places.mark(place))
        self.places.mark(Place(backward=True))
        found = self._torch.autograd.grad(value, list(params.values()), allow_unused=True)
        return dict(zip(params, found, strict=True))

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """Whatever is called in torch meanwhile is noted with its module and line, or replaced by a whole operator."""
        torch, step, instead = self._torch, self, replacements()

        class Mode(torch.overrides.TorchFunctionMode):  # type: ignore[misc, name-defined]  # torch is known where a module is made
            def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                step._note()
                return instead.get(function, function)(*args, **(kwargs or {}))

        with contextlib.ExitStack() as ends:
            for name, each in self._module.named_modules():
                before = each.register_forward_pre_hook(lambda *_, name=name: self._enter(name))
                behind = each.register_forward_hook(lambda *_: self._leave(), always_call=True)
                ends.callback(before.remove)
                ends.callback(behind.remove)
                if (
                    self._train
                    and getattr(each, "momentum", 0) is None
                    and getattr(each, "running_mean", None) is not None
                ):
                    ends.callback(each.register_forward_pre_hook(_begin_mean).remove)
                    ends.callback(each.register_forward_hook(_end_mean).remove)
            functional, name = torch.nn.functional, "scaled_dot_product_attention"  # its own functions see no mode
            ends.callback(setattr, functional, name, getattr(functional, name))
            setattr(functional, name, instead[getattr(functional, name)])
            ends.enter_context(Mode())
            yield

    def _enter(self, name: str) -> None:
        self._path.append(name)

    def _leave(self) -> None:
        self._path.pop()

    def _note(self) -> None:
        place = Place(self._path[-1], users_line(sys._getframe(2)))
        self.places.mark(place)
        self._numbers.append(self._torch.autograd._get_sequence_nr())
        self._made.append(place)


def _begin_mean(norm: Any, _: Any) -> None:
    """Of a BatchNorm without momentum, whose statistics are means over all steps: for now those of this step."""
    norm.momentum, norm.before = 1.0, (norm.running_mean.clone(), norm.running_var.clone())


def _end_mean(norm: Any, *_: Any) -> None:
    norm.momentum = None
    for name, before in zip(("running_mean", "running_var"), norm.before, strict=True):
        norm._buffers[name] = before + (norm._buffers[name] - before) / norm.num_batches_tracked


class _Again:
    """Runs a recorded graph, to be recorded again."""

    def __init__(self, torch: Any, module: Any, places: Mapping[Any, Place]):
        marks = self.places = _Places()

        class Interpreter(torch.fx.Interpreter):  # type: ignore[misc]
            def run_node(self, node: Any) -> Any:
                marks.mark(places[node])
                return super().run_node(node)

        self._interpreter = Interpreter(module)

    def run(self, *args: Any) -> Any:
        """The outputs of the graph, of its inputs."""
        return self._interpreter.run(*args, enable_io_processing=False)


def _name(op: Any) -> str:
    """Of an operator, without its overload."""
    name: str = op.name().partition("::")[2]
    return name.partition(".")[0]


def _require_scalar(torch: Any, value: Any, what: str, rows: int) -> None:
    if not isinstance(value, torch.Tensor) or value.dim():
        found = type(value).__name__
        if isinstance(value, torch.Tensor):
            found = f"[{', '.join('rows' if size == rows else str(size) for size in value.shape)}]"
        raise InputError(f"{what} is {found}: it has to be a scalar tensor, a mean over the batch")


def users_line(frame: Any, line: int | None = None) -> str:
    """A frame's line where it is neither torch's nor ours; without a line, that of the innermost such caller."""
    import torch

    others = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]), contextlib.__file__, "<")
    while frame is not None and frame.f_code.co_filename.startswith(others):
        if line is not None:
            return ""
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{line or frame.f_lineno}" if frame is not None else ""
