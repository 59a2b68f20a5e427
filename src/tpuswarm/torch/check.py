"""One batch through torch itself and through JAX: a module that would train differently here is refused."""

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import numpy as np

from tpuswarm.errors import InputError
from tpuswarm.torch.export import example, inputs_of
from tpuswarm.torch.graph import Exported
from tpuswarm.torch.ops import randoms
from tpuswarm.torch.run import Found, described, run
from tpuswarm.train.data.arrays import to_numpy
from tpuswarm.train.data.placing import in_jax_types

ROWS = 4
"""Of the batch: another number than those that were traced."""
MOST = 50_000_000
"""Parameters, above which the user has to ask for the check: it takes memory, and seconds."""
ROUNDING = 2e-3
"""Of the norm of an array; what is far smaller than the whole gradient may differ by more of its own."""
DROPOUT = "native_dropout"
QUICK: dict[str, str | bool] = {"xla_backend_optimization_level": "0", "xla_llvm_disable_expensive_passes": True}


class Step(NamedTuple):
    """What one batch gives: the loss, the gradient of each parameter, and buffers afterwards."""

    loss: float
    gradients: Mapping[str, np.ndarray]
    buffers: Mapping[str, np.ndarray]


class Skipped(Exception):
    """Why a module cannot be compared, in words."""


def check(module: Any, loss: Callable[..., Any], rows: Mapping[str, np.ndarray], exported: Exported) -> None:
    """Compare the loss, each gradient and each buffer of a batch, without dropout.

    module: on the CPU; rows: of the data. Raises InputError, naming the first that differs, and Skipped.
    """
    if drawn := next((each for each in exported.train.nodes if each.op in randoms.OPS and each.op != DROPOUT), None):
        raise Skipped(f"{described(drawn)} draws random numbers, and torch's are others")
    if (given := min(len(each) for each in rows.values())) < ROWS:
        raise Skipped(f"{given} rows are given, and {ROWS} are compared: give more rows of the data")
    batch, inputs = {name: example(name, each, ROWS) for name, each in rows.items()}, inputs_of(module, rows)
    theirs = _in_torch(module, loss, inputs, batch)
    ours = _in_jax(exported, {name: to_numpy(each) for name, each in batch.items()})
    whole = math.sqrt(sum(float(np.sum(np.square(each, dtype=np.float64))) for each in theirs.gradients.values()))
    pairs: list[tuple[str, Any, Any, float]] = [("the loss", ours.loss, theirs.loss, 1e-6)]
    pairs += [
        (f"the gradient of {name}", ours.gradients[name], each, 1e-4 * whole) for name, each in theirs.gradients.items()
    ]
    pairs += [(f"buffer {name}", each, theirs.buffers[name], 1e-6) for name, each in ours.buffers.items()]
    for what, here, there, least in pairs:
        if not _close(np.asarray(here, np.float64), np.asarray(there, np.float64), least):
            raise InputError(
                f"{type(module).__name__} would train differently here than in torch: over {ROWS} rows of the data "
                f"{what} is {_shown(here)} here and {_shown(there)} in torch; docs/torch.md says what is checked, and "
                "check=False trains it all the same"
            )


def _close(here: np.ndarray, there: np.ndarray, least: float) -> bool:
    if here.shape != there.shape or (np.isfinite(here) != np.isfinite(there)).any():
        return False
    finite = np.isfinite(there)
    difference = float(np.linalg.norm((here - there)[finite]))
    return difference <= ROUNDING * float(np.linalg.norm(there[finite])) + least


def _shown(value: Any) -> str:
    return f"{float(value):.4g}" if np.ndim(value) == 0 else f"of norm {np.linalg.norm(np.ravel(value)):.4g}"


def _in_torch(module: Any, loss: Callable[..., Any], inputs: list[str], batch: Mapping[str, Any]) -> Step:
    """What torch's own autograd gives, with a copy of the module; its random numbers stay as they are."""
    import torch

    module = copy.deepcopy(module).train()
    if narrow := next((name for name, each in module.named_parameters() if each.dtype != torch.float32), None):
        raise Skipped(f"{narrow} is not in float32, in which it trains here")
    for each in module.modules():  # their dropout is in C++, where _without_dropout sees no call
        if isinstance(each, torch.nn.RNNBase | torch.nn.MultiheadAttention):
            each.dropout = 0.0
    params = {name: each for name, each in module.named_parameters() if each.requires_grad}
    with torch.random.fork_rng(devices=[]), _without_dropout(torch), torch.enable_grad():
        found = loss(module(**{name: batch[name] for name in inputs}), dict(batch))
        value = found[0] if isinstance(found, tuple) else found
        given = [None] * len(params)
        if value.requires_grad:
            given = torch.autograd.grad(value, list(params.values()), allow_unused=True)
    gradients = {
        name: np.zeros(tuple(each.shape), np.float32) if grad is None else to_numpy(grad.detach().to_dense())
        for (name, each), grad in zip(params.items(), given, strict=True)
    }
    buffers = {name: to_numpy(each.detach()) for name, each in module.named_buffers(remove_duplicate=False)}
    return Step(float(value.detach()), gradients, buffers)


@contextmanager
def _without_dropout(torch: Any) -> Iterator[None]:
    """As if every dropout were asked for with probability 0."""
    functions = torch.nn.functional
    drops = {
        getattr(functions, name)
        for name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
    }

    class Mode(torch.overrides.TorchFunctionMode):  # type: ignore[misc]  # torch is known where a module is made
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = dict(kwargs or {})
            if function in drops:
                return function(args[0] if args else kwargs["input"], p=0.0)
            if function is functions.scaled_dot_product_attention:
                args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
                kwargs |= {"dropout_p": 0.0} if "dropout_p" in kwargs else {}
            return function(*args, **kwargs)

    with Mode():
        yield


def _in_jax(exported: Exported, batch: Mapping[str, np.ndarray]) -> Step:
    """What a step of ours would take, on the CPU, with dropout off as it is without a key."""
    params, state = exported.arrays["params"], exported.state
    others = {"constants": exported.arrays["constants"]}

    def step(params: Any, state: Any, batch: Any) -> Found:
        return run(exported.train, {"params": params, "buffers": {**exported.fixed, **state}, **others}, batch, None)

    try:
        device = jax.devices("cpu")[0]
    except RuntimeError as error:
        raise Skipped("JAX has no CPU here (JAX_PLATFORMS)") from error
    with jax.default_device(device), jax.default_matmul_precision("highest"):
        given = dict(params), dict(state), in_jax_types(batch)
        found = jax.device_get(jax.jit(step).lower(*given).compile(QUICK)(*given))
    trained = {name: each for name, each in params.items() if name not in exported.frozen}
    gradients = {name: found.gradients.get(name, np.zeros_like(each)) for name, each in trained.items()}
    return Step(float(found.loss), gradients, found.buffers)


def checked(
    module: Any, loss: Callable[..., Any], rows: Mapping[str, np.ndarray], exported: Exported, wanted: bool | None
) -> str:
    """Why it was not compared; empty where it was. wanted: None where that takes seconds. Raises InputError."""
    parameters = sum(each.size for each in exported.arrays["params"].values())
    if wanted is False:
        return "it was not to be"
    if not exported.weights:
        return "it has no weights (meta device)"
    if wanted is None and parameters > MOST:
        return f"it has {parameters / 1e6:,.0f} million parameters, and check=True compares more than {MOST / 1e6:.0f}"
    try:
        check(module, loss, rows, exported)
    except Skipped as why:
        return str(why)
    return ""
