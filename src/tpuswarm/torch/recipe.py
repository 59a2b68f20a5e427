"""A PyTorch module as a recipe."""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpuswarm.errors import InputError
from tpuswarm.torch.graph import Exported, read, write
from tpuswarm.torch.run import run
from tpuswarm.train.data.arrays import to_torch
from tpuswarm.train.run.trees import load
from tpuswarm.train.supervised import Supervised, supervised

COUNTED = "num_batches_tracked"
"""BatchNorm's counter, which nothing reads."""


def save(module: Any, loss: Callable[..., Any], row: Mapping[str, Any], path: str | Path) -> None:
    """Export a module and its loss to a file, where torch is; `recipe(path, …)` needs torch no more.

    row: the data's arrays, of which one row is looked at. Raises InputError, with the module's line.
    """
    from tpuswarm.torch.export import export

    write(Path(path), export(module, loss, row))


def recipe(
    module: Any,
    loss: Callable[..., Any] | None = None,
    data: Any = None,
    optimizer: Any = None,
    schedule: Callable[[jax.Array], Any] | None = None,
    defaults: Mapping[str, Any] | None = None,
    cast: str | Collection[str] = (),
) -> Supervised:
    """A recipe from a module and a loss of torch.

    - module: an `nn.Module`, with the parameters that it has, or the path of a file that `save` has written.
    - loss(outputs, batch) → a scalar tensor, or (scalar, dict of scalar metrics); in the file already, if it is one.
    - data, optimizer, schedule, defaults, cast: as `tpuswarm.supervised` takes them; arrays of the data go to the
      arguments of `forward` that have their names, and all of them are in the loss's `batch`.

    Buffers are mutable state. Raises InputError for what cannot be exported, with the module's line.
    """
    if data is None or optimizer is None:
        raise InputError(
            f"{'data' if data is None else 'an optimizer'} is missing: recipe(module, loss, data, optimizer)"
        )
    if isinstance(module, (str, Path)):
        if loss is not None:
            raise InputError(f"{module} has its loss in it: loss=None")
        exported = read(Path(module))
    else:
        from tpuswarm.torch.export import export

        if loss is None:
            raise InputError("the loss is missing: recipe(module, loss, data, optimizer)")
        exported = export(module, loss, _row(data))
    return _made(exported, data, optimizer, schedule, defaults, cast)


def _row(data: Any) -> Mapping[str, np.ndarray]:
    """One row of the training data, whatever it is given as."""
    probe = supervised(lambda key: {}, lambda params, batch, key: 0.0, None, data)
    return {name: np.asarray(each) for name, each in probe.data("train").rows(0, 1).items()}


def _made(
    exported: Exported, data: Any, optimizer: Any, schedule: Any, defaults: Any, cast: str | Collection[str]
) -> Supervised:
    params, buffers, constants = (exported.arrays[group] for group in ("params", "buffers", "constants"))
    # A swarm's members average floats that change; what only ever has its first value needs no place in the state.
    changes = exported.train.buffers.keys()
    state = {name: array for name, array in buffers.items() if name in changes and not name.endswith(COUNTED)}
    fixed = {name: array for name, array in buffers.items() if name not in state}

    def init(key: jax.Array) -> dict[str, jax.Array]:
        return {name: jnp.asarray(array) for name, array in params.items()}

    def arrays(given: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
        return {"params": given, "buffers": {**fixed, **extra}, "constants": constants}

    def objective(given: Any, extra: Any, batch: Any, key: jax.Array | None) -> Any:
        graph = exported.evaluate if key is None else exported.train
        loss, metrics, after = run(graph, arrays(given, extra), batch, key)
        new = {name: jnp.asarray(after.get(name, old)).astype(old.dtype) for name, old in extra.items()}
        return loss, (metrics, new)

    def plain(given: Any, batch: Any, key: jax.Array | None) -> Any:
        loss, (metrics, _) = objective(given, {}, batch, key)
        return loss, metrics

    if state:
        made = supervised(
            init, objective, optimizer, data, schedule, defaults, cast,
            extra=lambda key: {name: jnp.asarray(array) for name, array in state.items()},
        )  # fmt: skip
    else:
        made = supervised(init, plain, optimizer, data, schedule, defaults, cast)
    made.name, made.exported = exported.name.lower(), exported  # type: ignore[attr-defined]
    return made


def state_dict(run: str | Path, module: str | Path | Any | None = None) -> dict[str, Any]:
    """What a run has trained, as `module.load_state_dict` takes it, where torch is.

    run: its folder. module: the module, or its exported file: for the names of tied parameters and for buffers that
    training does not change; without it `load_state_dict(…, strict=False)` takes the rest. Raises InputError.
    """
    found = load(str(run))
    state = {**found["params"], **(found.get("ema") or {})}  # the average is what one wants in the end
    state |= found.get("extra") or {}
    if module is not None:
        if isinstance(module, (str, Path)):
            exported = read(Path(module))
            others = {name: state[first] for name, first in exported.tied.items()}
            others |= {name: each for name, each in exported.arrays["buffers"].items() if name not in state}
            state |= others
        else:
            theirs = module.state_dict()
            first = {each.data_ptr(): name for name, each in reversed(list(module.named_parameters()))}
            for name, each in theirs.items():
                if name not in state:
                    state[name] = state.get(first.get(each.data_ptr(), ""), each)
            for name, each in theirs.items():
                if tuple(each.shape) != tuple(state[name].shape):
                    raise InputError(
                        f"{name} is {list(state[name].shape)} in {run}, and {list(each.shape)} in the module: it is "
                        "another module"
                    )
            state = {name: state[name] for name in theirs}
    return {name: each if _is_torch(each) else to_torch(each) for name, each in state.items()}


def _is_torch(value: Any) -> bool:
    return type(value).__module__.startswith("torch")
