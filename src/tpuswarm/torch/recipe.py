"""Make a recipe from a PyTorch module, and give trained parameters back to torch."""

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpuswarm.errors import InputError
from tpuswarm.torch.graph import ExportedModule, Graph, read, write
from tpuswarm.torch.interpreter import check_operators, run_graph
from tpuswarm.train.data.arrays import to_torch
from tpuswarm.train.data.source import rows_of
from tpuswarm.train.entry_point import entry_point
from tpuswarm.train.losses import Loss
from tpuswarm.train.recipe import Options, Source, is_lightning
from tpuswarm.train.run.trees import load
from tpuswarm.train.supervised import Supervised, supervised
from tpuswarm.train.supervised_program import SupervisedProgram

CHECKED_ROWS = 4
"""Rows of the data that are compared with torch; an export traces other numbers, so its formulas are compared too."""
GraphOfRows = Callable[[bool, int], tuple[Graph, Mapping[str, np.ndarray]]]
"""(train, rows) → graph and its constants."""


@entry_point
def save(
    module: Any, loss: Callable[..., Any] | None, row: Mapping[str, Any], path: str | Path, check: bool | None = None
) -> None:
    """Export a module and its loss to a file that `recipe(path, …)` trains without torch.

    loss: None for a LightningModule; row: arrays of the data, with at least four rows for the comparison with torch;
    check: see `recipe`.
    Raise InputError with the module's line.
    """
    if loss is None and is_lightning(module):
        loss = _needs_torch("lightning").steps_of(module)
    exported = _needs_torch("export").export(module, loss, row)
    check_indices(exported, row)
    _needs_torch("check").check_module(module, loss, row, exported, check)
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
    """Return a recipe for a PyTorch module and its loss.

    - module: an `nn.Module`, trained from its current parameters, or the path of a file that `save` has written.
    - loss(outputs, batch) → a scalar tensor, or (scalar, dict of scalar metrics); None for a file, which contains it,
      and for a LightningModule, whose `training_step`, `validation_step` and `configure_optimizers` are used.
    - data, optimizer, schedule, defaults, cast, micro_batches: as in `tpuswarm.supervised`. Arrays of the data are
      passed to the arguments of `forward` with the same names; the loss, or `training_step`, gets all as `batch`.
    - check: compare loss, gradients and buffers with torch before training, and refuse a module that differs. None
      compares modules with at most 50 million parameters.

    Buffers are mutable state. Raise InputError with the module's line if the module cannot be exported.
    """
    is_converted = loss is None and is_lightning(module)
    if data is None or (optimizer is None and not is_converted):
        missing = "data" if data is None else "an optimizer"
        raise InputError(f"{missing} is missing; call recipe(module, loss, data, optimizer)")
    frozen: Collection[str] = ()
    if is_converted:
        lightning = _needs_torch("lightning")
        loss = lightning.steps_of(module)
        if optimizer is None:
            optimizer, found_schedule, decay, frozen = lightning.optimizer_of(module)
            schedule = schedule or found_schedule
            defaults = {**({} if decay is None else {"decay": decay}), **(defaults or {})}
    options = optimizer, data, schedule, defaults, cast, micro_batches
    if isinstance(module, (str, Path)):
        if loss is not None:
            raise InputError(f"{module} contains its loss; leave loss out")
        exported = read(Path(module))
        check_operators(exported.train, exported.evaluate, advice="export the module again with this tpuswarm, or ")
        return ModuleRecipe(exported, *options)
    if loss is None:
        raise InputError("the loss is missing; call recipe(module, loss, data, optimizer)")
    any_recipe = supervised(lambda key: {}, lambda params, batch, key: 0.0, None, data)
    rows = rows_of(any_recipe.data("train"), 0, CHECKED_ROWS)
    exported, graph_of_rows = _needs_torch("export").export_by_rows(module, loss, rows, CHECKED_ROWS)
    check_indices(exported, rows)
    check_module = partial(_needs_torch("check").check_module, module, loss, rows, exported, check)
    found = ModuleRecipe(exported, *options, graph_of_rows, check_module)
    found.frozen = (*exported.frozen, *frozen)
    return found


def check_indices(exported: ExportedModule, arrays: Mapping[str, Any]) -> None:
    """Raise InputError if arrays of the data hold indices outside the tables of a module."""
    for limit in exported.train.index_limits:
        if limit.array in arrays:
            limit.check(np.asarray(arrays[limit.array]))


def _needs_torch(name: str) -> Any:
    """Return a module of this package that imports torch."""
    try:
        return import_module(f"tpuswarm.torch.{name}")
    except ImportError as error:
        raise InputError(
            "exporting a module needs torch (pip install 'tpuswarm[torch]'); training the exported file does not"
        ) from error


class ModuleRecipe(Supervised):
    """A recipe for an exported module."""

    def __init__(
        self, exported: ExportedModule, optimizer: Any, data: Any, schedule: Any, defaults: Any,
        cast: str | Collection[str], micro_batches: bool, graph_of_rows: GraphOfRows | None = None,
        check: Callable[[], None] = lambda: None,
    ):  # fmt: skip
        """graph_of_rows: None for a file, which has graphs for any number of rows.

        check: called before the first program is made, because several hosts must start before JAX computes.
        """
        self.exported, self._check = exported, check
        self._graph_of_rows = graph_of_rows or self._graph_of_file
        self._checked_splits: set[str] = set()
        self._state, self._constant_buffers = exported.state, exported.constant_buffers

        def init(key: jax.Array) -> dict[str, jax.Array]:
            return {name: jnp.asarray(param) for name, param in exported.arrays["params"].items()}

        def extra(key: jax.Array) -> dict[str, jax.Array]:
            return {name: jnp.asarray(buffer) for name, buffer in self._state.items()}

        super().__init__(
            init, self.loss(Options()), optimizer, data, schedule, defaults, cast, micro_batches,
            extra if self._state else None,
        )  # fmt: skip
        self.frozen = exported.frozen
        if any(node.op == "tpuswarm.attention" for node in exported.train.nodes):
            self.forms = ("remat", *self.forms)
        self.name = exported.name.lower()

    def data(self, split: str) -> Source:
        """Return the rows of a split. Raise InputError if arrays in memory hold indices outside their table."""
        source, arrays = super().data(split), self._data(split)
        if isinstance(arrays, Mapping) and split not in self._checked_splits:
            self._checked_splits.add(split)
            check_indices(self.exported, {name: x for name, x in arrays.items() if not isinstance(x, np.memmap)})
        return source

    def program(self, options: Options) -> SupervisedProgram:
        """Return the program; compare the module with torch before the first one."""
        check, self._check = self._check, lambda: None
        check()
        return super().program(options)

    def loss(self, options: Options) -> Loss:
        """Return the traced loss, whose derivative is the traced backward pass."""

        def step(params: Any, extra: Any, batch: Any, key: jax.Array | None) -> tuple[Any, dict[str, jax.Array]]:
            graph, constants = self._graph_of_rows(key is not None, len(next(iter(batch.values()))))
            arrays = {"params": params, "buffers": {**self._constant_buffers, **extra}, "constants": constants}
            outputs = run_graph(graph, arrays, batch, key, options)
            new = {name: jnp.asarray(outputs.buffers.get(name, old)).astype(old.dtype) for name, old in extra.items()}
            gradients = {
                name: outputs.gradients.get(name, jnp.zeros_like(param)).astype(param.dtype)
                for name, param in params.items()
            }
            return (outputs.loss, (outputs.metrics, new)), gradients

        def backward(gradients: Any, cotangents: Any) -> Any:
            return {name: gradient * cotangents[0] for name, gradient in gradients.items()}, None, None, None

        @jax.custom_vjp
        def loss_with_state(params: Any, extra: Any, batch: Any, key: jax.Array | None) -> Any:
            return step(params, extra, batch, key)[0]

        def stateless_loss(params: Any, batch: Any, key: jax.Array | None) -> Any:
            loss, (metrics, _) = loss_with_state(params, {}, batch, key)
            return loss, metrics

        loss_with_state.defvjp(step, backward)
        return loss_with_state if self._state else stateless_loss

    def _graph_of_file(self, train: bool, rows: int) -> tuple[Graph, Mapping[str, np.ndarray]]:
        return self.exported.train if train else self.exported.evaluate, self.exported.arrays["constants"]

    def weights(self) -> Any:
        """Return the module's parameters and buffers. Raise InputError if it was exported without weights."""
        if not self.exported.has_weights:
            raise InputError(
                f"{self.exported.name} was exported from the meta device without weights and can only be planned; "
                "export it on the CPU to train it"
            )
        params = dict(self.exported.arrays["params"])
        if not self._state:
            return params
        is_float = {name: np.issubdtype(buffer.dtype, np.floating) for name, buffer in self._state.items()}
        return {
            "extra": {name: buffer if is_float[name] else None for name, buffer in self._state.items()},
            "params": params,
        }


@entry_point
def state_dict(run: str | Path, module: str | Path | Any | None = None) -> dict[str, Any]:
    """Return the trained parameters and buffers of a run for `module.load_state_dict`. Needs torch.

    run: a run's folder; module: the module or its exported file, for names of tied parameters and buffers that do not
    change. Without it use `load_state_dict(…, strict=False)`. Raise InputError if the run trained another module.
    """
    loaded = load(str(run))
    state = {**loaded.get("params", {}), **(loaded.get("ema") or {}), **(loaded.get("extra") or {})}
    if module is not None:
        arrays, aliases = _arrays_and_aliases(module)
        for names in aliases:
            trained = next((state[name] for name in names if name in state), None)
            if trained is None:
                raise InputError(f"{run} has no parameter {names[0]}; it trained another module")
            state |= dict.fromkeys(names, trained)
        state = {name: state.get(name, array) for name, array in arrays.items()}
        for name, array in arrays.items():
            if tuple(array.shape) != tuple(state[name].shape):
                raise InputError(
                    f"{name} is {list(state[name].shape)} in {run} and {list(array.shape)} in the module; the run "
                    "trained another module"
                )
    is_torch = {name: type(value).__module__.startswith("torch") for name, value in state.items()}
    return {name: value if is_torch[name] else to_torch(value) for name, value in state.items()}


def _arrays_and_aliases(module: str | Path | Any) -> tuple[dict[str, Any], list[list[str]]]:
    """Return all arrays of a module by name, and the names of each parameter."""
    if isinstance(module, (str, Path)):
        exported = read(Path(module))
        params, tied = exported.arrays["params"], exported.tied
        aliases = [[name, *(other for other, holder in tied.items() if holder == name)] for name in params]
        return {**params, **exported.arrays["buffers"], **{other: params[tied[other]] for other in tied}}, aliases
    names = defaultdict[int, list[str]](list)
    for name, param in module.named_parameters(remove_duplicate=False):
        names[id(param)].append(name)
    return dict(module.state_dict()), list(names.values())
