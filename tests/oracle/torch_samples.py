"""Run the samples of torch's own tests in torch and in JAX, with tensors as parameters, batch or buffers."""

import itertools
import warnings
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from tests.oracle.zoo import nn, torch

from tpuswarm.torch.check import QUICK_COMPILE
from tpuswarm.torch.export import to_array, to_graph, trace_batch
from tpuswarm.torch.interpreter import check_operators, draws_random_numbers, run_graph

tree_flatten, tree_unflatten = torch.utils._pytree.tree_flatten, torch.utils._pytree.tree_unflatten
PLACEMENTS = "parameter", "batch", "buffer"
MAX_SAMPLES = 200
"""Per operator; some operators have thousands."""
THREE_ROWS = torch.zeros(3)
"""The first array of a batch gives the number of rows."""


class Sample(NamedTuple):
    function: Any
    args: tuple
    kwargs: dict


class Slot(NamedTuple):
    """Stands for a tensor among the arguments."""

    position: int


class NotApplicable(Exception):
    """torch itself does not compute the sample with this placement."""


class SampleModule(nn.Module):
    """Call one sample with one placement and return a weighted sum of all outputs."""

    def __init__(self, sample, placement, number, only_first=False):
        """only_first: differentiate the first float tensor only, as torch refuses the gradient of some targets."""
        super().__init__()
        self.function, self.placement, self.number = sample.function, placement, number
        leaves, self.structure = tree_flatten((sample.args, sample.kwargs))
        self.leaves, self.batch, self.fixed = [], {}, set()
        self.one = nn.Parameter(torch.ones(()))
        for position, leaf in enumerate(leaves):
            if not isinstance(leaf, torch.Tensor):
                self.leaves.append(leaf)
                continue
            leaf = leaf.detach().clone()
            if leaf.layout != torch.strided or leaf.is_quantized:
                raise NotApplicable("sparse")
            if only_first and any(
                isinstance(other, torch.Tensor) and other.is_floating_point() for other in leaves[:position]
            ):
                self.fixed.add(position)
            if placement == "buffer":
                self.register_buffer(f"buffer{position}", leaf)
            elif placement == "batch":
                self.batch[f"part{number}_{position}"] = leaf
            elif leaf.is_floating_point():
                is_fixed = position in self.fixed
                self.register_parameter(f"param{position}", nn.Parameter(leaf.float(), requires_grad=not is_fixed))
            self.leaves.append(Slot(position) if placement != "parameter" or leaf.is_floating_point() else leaf)
        self.weights = None

    def forward(self, batch):
        args, kwargs = tree_unflatten([self.fill(leaf, batch) for leaf in self.leaves], self.structure)
        outputs = [y for y in tree_flatten(self.function(*args, **kwargs))[0] if isinstance(y, torch.Tensor)]
        outputs = [(torch.view_as_real(y.resolve_conj()) if y.is_complex() else y).float() for y in outputs]
        if self.weights is None:
            self.draw_weights(outputs)
        total = self.one * 0
        for y, (weights, is_finite) in zip(outputs, self.weights, strict=True):
            if is_finite is not None:
                total = total + ((y.isnan() * 1.0 + (y == torch.inf) * 2.0) * weights).sum()
                y = torch.where(is_finite, y, 0.0)
            total = total + (y * weights).sum()
        return total

    def fill(self, leaf, batch):
        if not isinstance(leaf, Slot):
            return leaf
        if self.placement == "batch":
            tensor = batch[f"part{self.number}_{leaf.position}"]
            is_fixed = leaf.position in self.fixed or not tensor.is_floating_point()
            return tensor.clone() if is_fixed else tensor * self.one
        kind = "buffer" if self.placement == "buffer" else "param"
        return getattr(self, f"{kind}{leaf.position}").clone()

    def draw_weights(self, outputs):
        random = torch.Generator().manual_seed(0)
        self.weights, self.size = [], 0.0
        for y in outputs:
            y, is_finite = y.detach(), torch.isfinite(y.detach())
            weights = torch.rand(y.shape, generator=random) + 0.5
            self.weights.append((weights, None if is_finite.all() else is_finite))
            self.size += float((torch.where(is_finite, y, 0.0) * weights).abs().sum())


class SampleModules(nn.Module):
    """Several samples; the value of each is a metric."""

    def __init__(self, parts):
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.batch = {"a": THREE_ROWS}
        for part in parts:
            self.batch |= part.batch

    def forward(self, **batch):
        return [part(batch) for part in self.parts]


def sum_of_values(outputs, batch):
    return sum(outputs), {f"m{n}": value.detach() for n, value in enumerate(outputs)}


def step_in_torch(part):
    """Return value and gradients. Raise NotApplicable."""
    params = {name: param for name, param in part.named_parameters() if param.requires_grad}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            value = part(part.batch)
            gradients = torch.autograd.grad(value, list(params.values()), allow_unused=True)
    except Exception as error:
        raise NotApplicable(f"{type(error).__name__}: {error}") from error
    return float(value.detach()), {
        name: (torch.zeros(p.shape) if grad is None else torch.zeros(p.shape) + grad.detach().to_dense()).numpy()
        for (name, p), grad in zip(params.items(), gradients, strict=True)
    }


def step_in_jax(module, loss, batch, key):
    """Export, compile and run a training step; return its outputs and its graph. Raise InputError."""
    groups = {
        "params": {name: to_array(name, param) for name, param in module.named_parameters()},
        "buffers": {name: to_array(name, buffer) for name, buffer in module.named_buffers()},
        "constants": {},
    }
    step = trace_batch(module, loss, list(batch), batch, True, show_output=False)
    graph = to_graph(step, True, groups["constants"], [])
    check_operators(graph)
    fixed = jax.tree.map(jnp.asarray, {group: groups[group] for group in ("buffers", "constants")})
    args = jax.tree.map(jnp.asarray, (groups["params"], {name: to_array(name, x) for name, x in batch.items()}))

    def step(params, batch):
        return run_graph(graph, {"params": params, **fixed}, batch, key)

    return jax.device_get(jax.jit(step).lower(*args).compile(QUICK_COMPILE)(*args)), graph


def compare(calls, rtol=1e-4):
    """Compare samples with torch; return how many were compared, and how many draw random numbers.

    calls: (name, sample, placement). Raise AssertionError with the first name that differs, or InputError.
    """
    names, parts, expected = [], [], []
    for name, sample, placement in calls:
        for only_first in (False, True):
            try:
                part = SampleModule(sample, placement, len(parts), only_first)
                with torch.random.fork_rng(devices=[]):
                    expected.append(step_in_torch(part))
            except NotApplicable:
                continue
            parts.append(part)
            names.append(f"{name} ({placement})")
            break
    if not parts:
        return 0, 0
    module = SampleModules(parts)
    outputs, graph = step_in_jax(module, sum_of_values, module.batch, jax.random.key(0))
    random = {int(node.module.split(".")[1]) for node in graph.nodes if draws_random_numbers(node)}
    for n, (name, part, (value, gradients)) in enumerate(zip(names, parts, expected, strict=True)):
        if n in random:
            continue
        atol = rtol / 10 * max(part.size, 1e-2)
        np.testing.assert_allclose(outputs.metrics[f"m{n}"], value, rtol=rtol, atol=atol, err_msg=f"value of {name}")
        for param, wanted in gradients.items():
            found = outputs.gradients.get(f"parts.{n}.{param}", np.zeros_like(wanted))
            largest = np.abs(wanted[np.isfinite(wanted)]).max(initial=part.size if param == "one" else 1e-2)
            message = f"gradient of {param} of {name}"
            np.testing.assert_allclose(found, wanted, rtol=rtol, atol=rtol / 10 * largest, err_msg=message)
    return len(parts) - len(random), len(random)


def spread(samples, count):
    """Return the first sample, the last one and some between."""
    last = len(samples) - 1
    positions = sorted({round(last * n / max(1, count - 1)) for n in range(count)}) if samples else []
    return [samples[position] for position in positions]


@cache
def operators():
    """Return torch's tests of operators in float32."""
    from torch.testing._internal import common_utils
    from torch.testing._internal.common_methods_invocations import op_db

    common_utils.extract_test_fn = lambda: None  # it looks for torch's own test case on the stack, for 0.2 s
    return {
        f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name: op
        for op in op_db
        if op.supports_dtype(torch.float32, "cpu")
    }


SIGNED = ("svd", "linalg.svd")
"""Operators that return vectors whose signs are not defined."""


def _without_signs(function, sample):
    """Return the function with the outputs that torch's own tests of gradients compare: without signs."""
    return lambda *args, **kwargs: sample.output_process_fn_grad(function(*args, **kwargs))


def samples_of(name, count=None):
    """Return all samples of an operator, or `count` of them."""
    operator, most = operators()[name], 1 if count == 1 else MAX_SAMPLES  # torch makes them one by one, slowly
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        samples = [
            Sample(
                _without_signs(operator.op, sample) if name in SIGNED else operator.op,
                (sample.input, *sample.args),
                sample.kwargs,
            )
            for sample in itertools.islice(operator.sample_inputs("cpu", torch.float32), most)
        ]
    return samples if count is None else spread(samples, count)


@cache
def modules():
    """Return torch's tests of modules in float32."""
    from torch.testing._internal.common_modules import module_db

    return {info.name: info for info in module_db if torch.float32 in info.dtypes}


def samples_of_module(name):
    """Return all samples of a module, each with a module of its own."""
    info, samples = modules()[name], []
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        for given in info.module_inputs_func(
            info, device="cpu", dtype=torch.float32, requires_grad=False, training=True
        ):
            if given.forward_input is not None:
                module = info.module_cls(*given.constructor_input.args, **given.constructor_input.kwargs).float()
                samples.append(Sample(module, given.forward_input.args, given.forward_input.kwargs))
    return samples


class OutputsInBuffers(nn.Module):
    """Put the outputs of functions into buffers, so that a graph returns them."""

    def __init__(self, functions, outputs):
        super().__init__()
        self.functions = functions
        for name, arrays in outputs.items():
            for at in range(len(arrays)):
                self.register_buffer(f"{name}_{at}", torch.zeros(1))

    def forward(self, a, x):
        for name, function in self.functions.items():
            for at, y in enumerate(tree_flatten(function(x))[0]):
                self._buffers[f"{name}_{at}"] = y.clone()
        return a.sum()


def outputs_of(functions, x):
    """Return the outputs of functions of an array, here and in torch, without functions that torch refuses."""
    expected = {}
    for number, function in enumerate(functions):
        try:
            outputs = tree_flatten(function(x.clone()))[0]
            expected[f"f{number}"] = [to_array("an output", y) for y in outputs]
        except Exception:  # noqa: BLE001  # torch has many types; outputs that need 64 bits are refused too
            continue
    module = OutputsInBuffers({name: functions[int(name[1:])] for name in expected}, expected)
    found, _ = step_in_jax(module, lambda outputs, batch: outputs, {"a": THREE_ROWS, "x": x}, None)
    return {
        int(name[1:]): ([found.buffers[f"{name}_{at}"] for at in range(len(arrays))], arrays)
        for name, arrays in expected.items()
    }
