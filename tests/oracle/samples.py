"""Samples of torch's own tests, as modules whose tensors are parameters, a batch or buffers; in torch and in JAX."""

import itertools
import warnings
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from tests.oracle.zoo import nn, torch

from tpuswarm.torch.check import QUICK
from tpuswarm.torch.export import _array, _graph, _traced_once
from tpuswarm.torch.run import check_operators, draws, run

tree_flatten, tree_unflatten = torch.utils._pytree.tree_flatten, torch.utils._pytree.tree_unflatten
PLACEMENTS = "parameter", "batch", "buffer"
MAX_SAMPLES = 200
"""Of one operator: some have thousands."""


class Sample(NamedTuple):
    """A call of one of torch's tests."""

    function: Any
    args: tuple
    kwargs: dict


def spread(samples, count=3):
    """The first, the last and some between."""
    last = len(samples) - 1
    return (
        [samples[at] for at in sorted({round(last * n / max(1, count - 1)) for n in range(count)})] if samples else []
    )


class Part(nn.Module):
    """One sample in one placement; its value is a weighted sum of all outputs."""

    def __init__(self, sample, placement, number):
        super().__init__()
        self.function, self.placement, self.number = sample.function, placement, number
        leaves, self.structure = tree_flatten((sample.args, sample.kwargs))
        self.leaves, self.batch = [], {}
        self.one = nn.Parameter(torch.ones(()))
        for at, leaf in enumerate(leaves):
            if not isinstance(leaf, torch.Tensor):
                self.leaves.append(leaf)
                continue
            leaf = leaf.detach().clone()
            if leaf.layout != torch.strided or leaf.is_quantized:
                raise NotApplicable("sparse")
            if placement == "buffer":
                self.register_buffer(f"buffer{at}", leaf)
            elif placement == "batch":
                self.batch[f"part{number}_{at}"] = leaf
            elif leaf.is_floating_point():
                self.register_parameter(f"param{at}", nn.Parameter(leaf.float()))
            self.leaves.append(Slot(at) if placement != "parameter" or leaf.is_floating_point() else leaf)
        self.weights = None

    def forward(self, batch):
        placed = []
        for leaf in self.leaves:
            if isinstance(leaf, Slot) and self.placement == "batch":
                leaf = batch[f"part{self.number}_{leaf.at}"]
                leaf = leaf * self.one if leaf.is_floating_point() else leaf.clone()
            elif isinstance(leaf, Slot):
                kind = "buffer" if self.placement == "buffer" else "param"
                leaf = getattr(self, f"{kind}{leaf.at}").clone()
            placed.append(leaf)
        args, kwargs = tree_unflatten(placed, self.structure)
        found = [each for each in tree_flatten(self.function(*args, **kwargs))[0] if isinstance(each, torch.Tensor)]
        found = [(torch.view_as_real(each.resolve_conj()) if each.is_complex() else each).float() for each in found]
        if self.weights is None:
            self._weigh(found)
        total = self.one * 0
        for each, (weights, finite) in zip(found, self.weights, strict=True):
            if finite is not None:
                total = total + ((each.isnan() * 1.0 + (each == torch.inf) * 2.0) * weights).sum()
                each = torch.where(finite, each, 0.0)
            total = total + (each * weights).sum()
        return total

    def _weigh(self, found):
        random = torch.Generator().manual_seed(0)
        self.weights, self.size = [], 0.0
        for each in found:
            each, finite = each.detach(), torch.isfinite(each.detach())
            weights = torch.rand(each.shape, generator=random) + 0.5
            self.weights.append((weights, None if finite.all() else finite))
            self.size += float((torch.where(finite, each, 0.0) * weights).abs().sum())


class Slot(NamedTuple):
    """Stands for a tensor among the arguments."""

    at: int


class NotApplicable(Exception):
    """Torch itself does not compute the sample in this placement."""


class Parts(nn.Module):
    """Several parts; the value of each is a metric."""

    def __init__(self, parts):
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.given = {"a": torch.zeros(3)}  # the first array of a batch says the number of rows
        for part in parts:
            self.given |= part.batch

    def forward(self, **batch):
        return [part(batch) for part in self.parts]


def loss(outputs, batch):
    return sum(outputs), {f"m{n}": each.detach() for n, each in enumerate(outputs)}


def in_torch(part):
    """Value and gradients. Raises NotApplicable."""
    params = dict(part.named_parameters())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            value = part(part.batch)
            found = torch.autograd.grad(value, list(params.values()), allow_unused=True)
    except Exception as error:
        raise NotApplicable(f"{type(error).__name__}: {error}") from error
    return float(value.detach()), {
        name: (torch.zeros(each.shape) if of is None else torch.zeros(each.shape) + of.detach().to_dense()).numpy()
        for (name, each), of in zip(params.items(), found, strict=True)
    }


def in_jax(parts):
    """The value of each part, all gradients, and the parts that draw random numbers. Raises InputError."""
    module = Parts(parts)
    groups = {
        "params": {name: _array(name, each) for name, each in module.named_parameters()},
        "buffers": {name: _array(name, each) for name, each in module.named_buffers()},
        "constants": {},
    }
    graph = _graph(torch, _traced_once(module, loss, list(module.given), module.given, True, shown=False), True, groups)
    check_operators(graph)
    batch = {name: jnp.asarray(_array(name, each)) for name, each in module.given.items()}
    fixed = {name: {of: jnp.asarray(each) for of, each in groups[name].items()} for name in ("buffers", "constants")}

    def step(params, batch):
        return run(graph, {"params": params, **fixed}, batch, jax.random.key(0))

    params = {name: jnp.asarray(each) for name, each in groups["params"].items()}
    found = jax.device_get(jax.jit(step).lower(params, batch).compile(QUICK)(params, batch))
    random = {int(node.module.split(".")[1]) for node in graph.nodes if draws(node)}
    return [found.metrics[f"m{n}"] for n in range(len(parts))], found.gradients, random


def compare(calls, rtol=1e-4):
    """Compare samples in their placements with torch; return how many were, and how many draw random numbers.

    calls: (name, sample, placement). Raises AssertionError, with the first name that differs, and InputError.
    """
    names, parts, theirs = [], [], []
    for name, sample, placement in calls:
        try:
            part = Part(sample, placement, len(parts))
            with torch.random.fork_rng(devices=[]):
                theirs.append(in_torch(part))
        except NotApplicable:
            continue
        parts.append(part)
        names.append(f"{name} ({placement})")
    if not parts:
        return 0, 0
    values, gradients, random = in_jax(parts)
    for n, (name, part, (value, wanted)) in enumerate(zip(names, parts, theirs, strict=True)):
        if n in random:
            continue
        least = rtol / 10 * max(part.size, 1e-2)
        np.testing.assert_allclose(values[n], value, rtol=rtol, atol=least, err_msg=f"value of {name}")
        for of, each in wanted.items():
            found = gradients.get(f"parts.{n}.{of}", np.zeros_like(each))
            largest = np.abs(each[np.isfinite(each)]).max(initial=part.size if of == "one" else 1e-2)
            np.testing.assert_allclose(
                found, each, rtol=rtol, atol=rtol / 10 * largest, err_msg=f"gradient of {of} of {name}"
            )
    return len(parts) - len(random), len(random)


@cache
def operators():
    """Torch's own tests of operators of float32."""
    from torch.testing._internal.common_methods_invocations import op_db

    found = {}
    for each in op_db:
        if each.supports_dtype(torch.float32, "cpu"):
            name = f"{each.name}.{each.variant_test_name}" if each.variant_test_name else each.name
            found[name] = each
    return found


def samples_of(name, count=None):
    """All, or some, of an operator."""
    operator = operators()[name]
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        found = [
            Sample(operator.op, (each.input, *each.args), each.kwargs)
            for each in itertools.islice(operator.sample_inputs("cpu", torch.float32), MAX_SAMPLES)
        ]
    return found if count is None else spread(found, count)


@cache
def modules():
    """Torch's own tests of modules."""
    from torch.testing._internal.common_modules import module_db

    return {each.name: each for each in module_db if torch.float32 in each.dtypes}


def samples_of_module(name, count=None):
    """All, or some: a call of a module that is built for it."""
    about = modules()[name]
    found = []
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        given = about.module_inputs_func(about, device="cpu", dtype=torch.float32, requires_grad=False, training=True)
        given = [each for each in given if each.forward_input is not None]
        for each in given if count is None else spread(given, count):
            module = about.module_cls(*each.constructor_input.args, **each.constructor_input.kwargs).float()
            found.append(Sample(module, each.forward_input.args, each.forward_input.kwargs))
    return found


class Outputs(nn.Module):
    """Puts the outputs of functions into buffers, so that a graph gives them."""

    def __init__(self, functions, outputs):
        super().__init__()
        self.functions = functions
        for name, found in outputs.items():
            for at in range(len(found)):
                self.register_buffer(f"{name}_{at}", torch.zeros(1))

    def forward(self, a, x):
        for name, function in self.functions.items():
            for at, each in enumerate(tree_flatten(function(x))[0]):
                self._buffers[f"{name}_{at}"] = each.clone()
        return a.sum()


def outputs_of(functions, x):
    """What functions give of an array in torch and here, by their number; without those that torch does not compute."""
    theirs = {}
    for number, function in enumerate(functions):
        try:
            found = tree_flatten(function(x.clone()))[0]
            theirs[f"f{number}"] = [_array("an output", each) for each in found]
        except Exception:  # noqa: BLE001  # torch has many, and what needs 64 bits is refused
            continue
    module = Outputs({name: functions[int(name[1:])] for name in theirs}, theirs)
    given = {"a": torch.zeros(3), "x": x}
    buffers = {name: _array(name, each) for name, each in module.named_buffers()}
    groups = {"params": {}, "buffers": buffers, "constants": {}}
    graph = _graph(
        torch, _traced_once(module, lambda found, batch: found, list(given), given, True, shown=False), True, groups
    )
    check_operators(graph)
    arrays = {group: {name: jnp.asarray(each) for name, each in of.items()} for group, of in groups.items()}
    batch = {name: jnp.asarray(_array(name, each)) for name, each in given.items()}
    step = jax.jit(lambda batch: run(graph, arrays, batch, None).buffers)
    found = jax.device_get(step.lower(batch).compile(QUICK)(batch))
    return {int(name[1:]): ([found[f"{name}_{at}"] for at in range(len(each))], each) for name, each in theirs.items()}
