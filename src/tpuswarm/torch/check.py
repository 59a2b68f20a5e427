"""Compare one step of an exported module with torch and refuse a module that would train differently. Needs torch."""

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import torch
from torch.nn import functional

from tpuswarm.errors import InputError, first_line
from tpuswarm.torch.export import input_names, to_batch
from tpuswarm.torch.graph import ExportedModule
from tpuswarm.torch.interpreter import StepOutputs, run_graph
from tpuswarm.torch.ops import RANDOM
from tpuswarm.torch.recipe import CHECKED_ROWS
from tpuswarm.torch.trace import call_loss, traceback_line
from tpuswarm.train.data.arrays import to_numpy
from tpuswarm.train.data.placing import narrow_rows
from tpuswarm.train.process.terminal import echo

MAX_CHECKED_PARAMETERS = 50_000_000
"""Larger modules are checked only on request, because the check takes memory and time."""
MAX_RELATIVE_ERROR = 2e-3
QUICK_COMPILE: dict[str, str | bool] = {
    "xla_backend_optimization_level": "0", "xla_llvm_disable_expensive_passes": True
}  # fmt: skip


class NotComparable(Exception):
    """Why a module cannot be compared with torch."""


def check_module(
    module: Any, loss: Callable[..., Any], rows: Mapping[str, np.ndarray], exported: ExportedModule, check: bool | None
) -> None:  # fmt: skip
    """Compare a module with torch, or print why not.

    rows: of the data; check: False to skip, True to compare a module of any size. Raise InputError if it differs.
    """
    if check is False:
        return
    parameters = sum(param.size for param in exported.arrays["params"].values())
    try:
        if not exported.has_weights:
            raise NotComparable("it has no weights (meta device)")
        if check is None and parameters > MAX_CHECKED_PARAMETERS:
            raise NotComparable(f"it has {parameters / 1e6:,.0f} million parameters; check=True compares it")
        compare_with_torch(module, loss, rows, exported)
    except NotComparable as reason:
        echo(f"{exported.name} was not compared with torch: {reason}.", err=True)


def compare_with_torch(
    module: Any, loss: Callable[..., Any], rows: Mapping[str, np.ndarray], exported: ExportedModule
) -> None:  # fmt: skip
    """Compare the loss, the gradients and the buffers of a step without dropout.

    Raise InputError with the first difference, or NotComparable.
    """
    for node in exported.train.nodes:
        if node.op in RANDOM and node.op != "native_dropout":
            raise NotComparable(f"{node} draws random numbers, which differ from torch's")
    if (given := min(len(array) for array in rows.values())) < CHECKED_ROWS:
        raise NotComparable(f"it needs {CHECKED_ROWS} rows of the data and got {given}")
    batch = {name: to_batch(name, array, CHECKED_ROWS) for name, array in rows.items()}
    try:
        value, gradients, buffers = _step_in_torch(module, loss, input_names(module, loss, rows), batch)
    except NotComparable:
        raise
    except Exception as error:  # torch raises many types
        line = traceback_line(error)
        raise InputError(
            f"{line and line + ': '}torch fails over {CHECKED_ROWS} rows of the data: {first_line(error)[:300]}"
        ) from error
    ours = _step_in_jax(exported, {name: to_numpy(array) for name, array in batch.items()})
    norm = math.sqrt(sum(float(np.sum(np.square(gradient, dtype=np.float64))) for gradient in gradients.values()))
    comparisons: list[tuple[str, Any, Any, float]] = [
        ("the loss", ours.loss, value, 1e-6),
        *(
            (f"the gradient of {name}", ours.gradients.get(name, np.zeros_like(gradient)), gradient, 1e-4 * norm)
            for name, gradient in gradients.items()
        ),
        *((f"buffer {name}", buffer, buffers[name], 1e-6) for name, buffer in ours.buffers.items()),
    ]
    for name, here, there, tolerance in comparisons:
        if not _is_close(np.asarray(here, np.float64), np.asarray(there, np.float64), tolerance):
            raise InputError(
                f"{type(module).__name__} would train differently than in torch: over {CHECKED_ROWS} rows of the data "
                f"{name} is {_format(here)} here and {_format(there)} in torch; see docs/torch.md, or train it anyway "
                "with check=False"
            )


def _is_close(here: np.ndarray, there: np.ndarray, tolerance: float) -> bool:
    if here.shape != there.shape or (np.isfinite(here) != np.isfinite(there)).any():
        return False
    is_finite = np.isfinite(there)
    difference, size = (float(np.linalg.norm(array[is_finite])) for array in (here - there, there))
    return difference <= MAX_RELATIVE_ERROR * size + tolerance


def _format(value: Any) -> str:
    return f"{float(value):.4g}" if np.ndim(value) == 0 else f"of norm {np.linalg.norm(np.ravel(value)):.4g}"


def _step_in_torch(
    module: Any, loss: Callable[..., Any], inputs: list[str], batch: Mapping[str, Any]
) -> tuple[float, dict[str, np.ndarray], dict[str, np.ndarray]]:  # fmt: skip
    """Return the loss, the gradients and the buffers of a copy; the state of torch's random numbers is kept."""
    module = copy.deepcopy(module).train()
    if other := next((name for name, param in module.named_parameters() if param.dtype != torch.float32), None):
        raise NotComparable(f"{other} is not in float32, in which it trains here")
    for submodule in module.modules():  # their dropout is in C++, out of reach of _NoDropout
        if isinstance(submodule, torch.nn.RNNBase | torch.nn.MultiheadAttention):
            submodule.dropout = 0.0
    params = {name: param for name, param in module.named_parameters() if param.requires_grad}
    with torch.random.fork_rng(devices=[]), _NoDropout(), torch.enable_grad():
        value, _ = call_loss(module, loss, inputs, batch)
        found = [None] * len(params)
        if value.requires_grad:
            found = torch.autograd.grad(value, list(params.values()), allow_unused=True)
    gradients = {
        name: np.zeros(tuple(param.shape), np.float32) if grad is None else to_numpy(grad.detach().to_dense())
        for (name, param), grad in zip(params.items(), found, strict=True)
    }
    buffers = {name: to_numpy(buffer.detach()) for name, buffer in module.named_buffers(remove_duplicate=False)}
    return float(value.detach()), gradients, buffers


class _NoDropout(torch.overrides.TorchFunctionMode):  # type: ignore[misc]
    """Leave out every dropout."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if "dropout" in getattr(function, "__name__", ""):
            return args[0] if args else kwargs["input"]
        if function is functional.scaled_dot_product_attention:
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            kwargs |= {"dropout_p": 0.0} if "dropout_p" in kwargs else {}
        return function(*args, **kwargs)


def _step_in_jax(exported: ExportedModule, batch: Mapping[str, np.ndarray]) -> StepOutputs:
    """Run a step on the CPU; without a key dropout is off."""
    params, state = exported.arrays["params"], exported.state

    def step(params: Any, state: Any, batch: Any) -> StepOutputs:
        buffers, constants = {**exported.constant_buffers, **state}, exported.arrays["constants"]
        return run_graph(exported.train, {"params": params, "buffers": buffers, "constants": constants}, batch, None)

    try:
        device = jax.devices("cpu")[0]
    except RuntimeError as error:
        raise NotComparable("JAX has no CPU here (JAX_PLATFORMS)") from error
    with jax.default_device(device), jax.default_matmul_precision("highest"):
        args = dict(params), dict(state), narrow_rows(batch)
        outputs: StepOutputs = jax.device_get(jax.jit(step).lower(*args).compile(QUICK_COMPILE)(*args))
    return outputs
