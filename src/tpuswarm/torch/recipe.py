"""A PyTorch module as a recipe."""

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpuswarm.errors import InputError
from tpuswarm.torch.graph import Exported, read, write
from tpuswarm.torch.run import check_operators, run
from tpuswarm.train.data.arrays import to_torch
from tpuswarm.train.data.source import rows_of
from tpuswarm.train.entry_point import entry_point
from tpuswarm.train.losses import Loss
from tpuswarm.train.process.terminal import say
from tpuswarm.train.recipe import Options
from tpuswarm.train.run.trees import load
from tpuswarm.train.supervised import Supervised, SupervisedProgram, supervised


@entry_point
def save(
    module: Any, loss: Callable[..., Any], row: Mapping[str, Any], path: str | Path, check: bool | None = None
) -> None:
    """Export a module and its loss to a file, where torch is; `recipe(path, …)` needs torch no more.

    row: the data's arrays, one row or more, of which four are compared; check: as of `recipe`. Raises InputError, with
    the module's line.
    """
    from tpuswarm.torch.check import checked
    from tpuswarm.torch.export import export

    exported = export(module, loss, row)
    _tell(exported, checked(module, loss, row, exported, check), check)
    write(Path(path), exported)


@entry_point
def recipe(
    module: Any,
    loss: Callable[..., Any] | None = None,
    data: Any = None,
    optimizer: Any = None,
    schedule: Callable[[jax.Array], Any] | None = None,
    defaults: Mapping[str, Any] | None = None,
    cast: str | Collection[str] = (),
    micro_batches: bool = False,
    check: bool | None = None,
) -> Supervised:
    """A recipe from a module and a loss of torch.

    - module: an `nn.Module`, with the parameters that it has, or the path of a file that `save` has written.
    - loss(outputs, batch) → a scalar tensor, or (scalar, dict of scalar metrics); in the file already, if it is one.
    - data, optimizer, schedule, defaults, cast, micro_batches: as `tpuswarm.supervised` takes them; arrays of the data
      go to the arguments of `forward` that have their names, and all of them are in the loss's `batch`.

    - check: before it trains, rows of the data go through torch's own loss and backward, and through ours; a module
      whose loss, gradients or buffers differ is refused. None: where it has at most 50 million parameters.

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
        check_operators(exported.train, exported.evaluate)
    else:
        from tpuswarm.torch.export import export

        if loss is None:
            raise InputError("the loss is missing: recipe(module, loss, data, optimizer)")
        rows = _rows(data)
        exported = export(module, loss, rows)

        def compare() -> None:
            from tpuswarm.torch.check import checked

            _tell(exported, checked(module, loss, rows, exported, check), check)

        return ModuleRecipe(exported, optimizer, data, schedule, defaults, cast, micro_batches, compare)
    return ModuleRecipe(exported, optimizer, data, schedule, defaults, cast, micro_batches)


def _tell(exported: Exported, why: str, check: bool | None) -> None:
    """Say that a module was not compared with torch, unless nobody wanted that."""
    if why and check is not False:
        say(f"{exported.name} was not compared with torch itself: {why}", err=True)


def _rows(data: Any) -> Mapping[str, np.ndarray]:
    """A few rows of the training data, whatever it is given as."""
    probe = supervised(lambda key: {}, lambda params, batch, key: 0.0, None, data)
    return rows_of(probe.data("train"), 0, SHOWN)


SHOWN = 4
"""Rows that are read to see what the data is, and to compare."""


class ModuleRecipe(Supervised):
    """What `recipe` returns."""

    def __init__(
        self, exported: Exported, optimizer: Any, data: Any, schedule: Any, defaults: Any,
        cast: str | Collection[str], micro_batches: bool, compare: Callable[[], None] = lambda: None,
    ):  # fmt: skip
        """compare: called before the first program is made, not earlier: several hosts start before JAX computes."""
        self.exported, self._compare = exported, compare
        self._state, self._fixed = exported.state, exported.fixed
        extra = partial(_arrays, self._state) if self._state else None
        init = partial(_arrays, exported.arrays["params"])
        super().__init__(
            init, self.loss(Options()), optimizer, data, schedule, defaults, cast, micro_batches, extra, None
        )
        self.frozen = exported.frozen
        if any(node.op == "tpuswarm.attention" for node in exported.train.nodes):  # on a TPU v2 or v3 always
            self.forms = ("remat", *self.forms)
        self.name = exported.name.lower()

    def program(self, options: Options) -> SupervisedProgram:
        """The program; the module has been compared with torch by then."""
        compare, self._compare = self._compare, lambda: None
        compare()
        return super().program(options)

    def loss(self, options: Options) -> Loss:
        """The traced step, in the form of attention and with the recomputation that `compile_step` has chosen.

        Its derivative is the backward pass that was traced with it.
        """
        exported, constants = self.exported, self.exported.arrays["constants"]

        def step(params: Any, extra: Any, batch: Any, key: jax.Array | None) -> tuple[Any, dict[str, jax.Array]]:
            graph = exported.evaluate if key is None else exported.train
            arrays = {"params": params, "buffers": {**self._fixed, **extra}, "constants": constants}
            found = run(graph, arrays, batch, key, options)
            new = {name: jnp.asarray(found.buffers.get(name, old)).astype(old.dtype) for name, old in extra.items()}
            return (found.loss, (found.metrics, new)), found.gradients

        @jax.custom_vjp
        def training(params: Any, extra: Any, batch: Any, key: jax.Array) -> Any:
            return step(params, extra, batch, key)[0]

        def forward(params: Any, extra: Any, batch: Any, key: jax.Array) -> tuple[Any, Any]:
            found, gradients = step(params, extra, batch, key)
            given = {name: gradients.get(name, jnp.zeros_like(each)) for name, each in params.items()}
            return found, {name: each.astype(params[name].dtype) for name, each in given.items()}

        def backward(gradients: Any, slopes: Any) -> Any:
            return {name: each * slopes[0] for name, each in gradients.items()}, None, None, None

        training.defvjp(forward, backward)

        def with_state(params: Any, extra: Any, batch: Any, key: jax.Array | None) -> Any:
            return training(params, extra, batch, key) if key is not None else step(params, extra, batch, None)[0]

        def without(params: Any, batch: Any, key: jax.Array | None) -> Any:
            loss, (metrics, _) = with_state(params, {}, batch, key)
            return loss, metrics

        return with_state if self._state else without

    def weights(self) -> Any:
        """The parameters and buffers of the module. Raises InputError for one that had none."""
        if not self.exported.weights:
            raise InputError(
                f"{self.exported.name} was exported from the meta device, without weights: it can be planned, and to "
                "train it has to be exported on the CPU"
            )
        floats = {name: each if np.issubdtype(each.dtype, np.floating) else None for name, each in self._state.items()}
        params = dict(self.exported.arrays["params"])
        return {"extra": floats, "params": params} if self._state else params


def _arrays(given: Mapping[str, np.ndarray], key: jax.Array) -> dict[str, jax.Array]:
    return {name: jnp.asarray(array) for name, array in given.items()}


@entry_point
def state_dict(run: str | Path, module: str | Path | Any | None = None) -> dict[str, Any]:
    """What a run has trained, as `module.load_state_dict` takes it, where torch is.

    run: its folder. module: the module, or its exported file: for the names of tied parameters and for buffers that
    training does not change; without it `load_state_dict(…, strict=False)` takes the rest. Raises InputError.
    """
    found = load(str(run))
    state = {**found.get("params", {}), **(found.get("ema") or {})}  # the average is what one wants in the end
    state |= found.get("extra") or {}
    if module is not None:
        theirs, same = _names(module)
        for names in same:
            state |= dict.fromkeys(names, _trained(names, state, run))
        state = {name: state.get(name, each) for name, each in theirs.items()}
        for name, each in theirs.items():
            if tuple(each.shape) != tuple(state[name].shape):
                raise InputError(
                    f"{name} is {list(state[name].shape)} in {run}, and {list(each.shape)} in the module: it is "
                    "another module"
                )
    return {name: each if _is_torch(each) else to_torch(each) for name, each in state.items()}


def _names(module: str | Path | Any) -> tuple[dict[str, Any], list[list[str]]]:
    """All that a module, or its exported file, has of its own by name, and the names of each parameter."""
    if isinstance(module, (str, Path)):
        exported = read(Path(module))
        params, tied = exported.arrays["params"], exported.tied
        same = [[name, *(other for other, first in tied.items() if first == name)] for name in params]
        return {**params, **exported.arrays["buffers"], **{other: params[tied[other]] for other in tied}}, same
    found = defaultdict[int, list[str]](list)
    for name, each in module.named_parameters(remove_duplicate=False):
        found[id(each)].append(name)
    return dict(module.state_dict()), list(found.values())


def _trained(names: Sequence[str], state: Mapping[str, Any], run: str | Path) -> Any:
    """Of a parameter by any of its names; InputError where the run has none."""
    found = next((state[name] for name in names if name in state), None)
    if found is None:
        raise InputError(f"{run} has no parameter {names[0]}: it trained another module")
    return found


def _is_torch(value: Any) -> bool:
    return type(value).__module__.startswith("torch")
