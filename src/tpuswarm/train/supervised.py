"""A complete recipe from one loss function; supports every option."""

import functools
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tpuswarm.config.limits import check
from tpuswarm.config.nearest import did_you_mean
from tpuswarm.errors import InputError
from tpuswarm.train import paths
from tpuswarm.train.recipe import (
    Batch,
    Clock,
    Exchange,
    Metrics,
    Options,
    Parameter,
    Program,
    Recipe,
    Source,
)
from tpuswarm.train.source import ArraySource

Loss = Callable[[Any, Batch, jax.Array | None], Any]
"""`loss(params, batch, key) -> scalar` or `-> (scalar, metrics)`: means over the batch; no key in evaluation."""

RESERVED = ("step", "tokens", "loss", "lr", "grad_norm", "tokens_per_s", "wait_s", "wall_s", "member", "version")
"""Columns of metrics.jsonl; a loss's own metrics cannot use these names."""

NUMERIC = (jax.Array, np.ndarray, np.generic, float, int)
"""What a loss or a metric may be, before its shape is looked at."""

DEFAULTS = ("steps", "batch", "accumulate", "clip", "freeze", "decay", "ema")
"""Run settings for which a recipe may set defaults."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Parameters in their own dtypes (float32 masters); optimizer state and moving average of the trained ones only."""

    params: Any
    opt: Any
    ema: Any


class SupervisedProgram(Program):
    """Gradient descent on one loss.

    optimizer: an optax transformation, or, with `schedule`, a function of (learning_rate, decay_mask) that returns one;
    schedule: progress (float32 scalar, 0 to 1) → learning rate. `loss` already computes in `options.precision`.
    """

    def __init__(
        self,
        init: Callable[[jax.Array], Any],
        loss: Loss,
        optimizer: Any,
        schedule: Callable[[jax.Array], Any] | None,
        batch_spec: Callable[[int], Mapping[str, jax.ShapeDtypeStruct]],
        options: Options,
        *,
        tokens_per_row: int = 1,
        tied: Mapping[str, str] | None = None,
    ):
        self._init, self._loss, self._optimizer, self._schedule = init, loss, optimizer, schedule
        self.scheduled = schedule is not None
        self._batch_spec, self._options, self._tied = batch_spec, options, tied or {}
        self.tokens_per_row = tokens_per_row
        check({"ema": options.ema, "clip": options.clip})
        ready = isinstance(optimizer, optax.GradientTransformation)
        if ready == (schedule is not None) or not (ready or callable(optimizer)):
            raise InputError(
                "optimizer is a ready optax transformation such as optax.adam(1e-3), or, with a schedule, a function "
                f"of (learning_rate, decay_mask) that returns one; got {optimizer!r} and schedule {schedule!r}"
            )
        if options.decay is not None and schedule is None:
            raise InputError("decay needs an optimizer(learning_rate, decay_mask) with a schedule, not a ready one")

    def init(self, key: jax.Array, shared: Any = None) -> TrainState:
        """Fresh parameters, or `shared` ones; optimizer state and moving average begin with them."""
        params = self._init(key) if shared is None else shared
        for path, leaf in zip(paths.leaf_paths(params), jax.tree.leaves(params), strict=True):
            if not jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
                raise InputError(f"parameter {path} is {jnp.result_type(leaf)}: parameters are floating-point arrays")
        trained = paths.keep(params, self._trained(params))
        return TrainState(
            params=params,
            opt=self._transformation(0.0, params).init(trained),
            ema=jax.tree.map(jnp.copy, trained) if self._options.ema is not None else None,
        )

    def step(self, state: TrainState, batch: Batch, clock: Clock) -> tuple[TrainState, Metrics]:
        """Gradient, clipping, optimizer, moving average."""
        params = state.params
        trained = paths.keep(params, self._trained(params))
        loss, extra, grads = self._gradient(params, trained, batch, jax.random.fold_in(clock.key, clock.step))
        norm = optax.tree.norm(grads)
        if self._options.clip is not None:
            scale = jnp.minimum(1.0, self._options.clip / jnp.maximum(norm, 1e-30))
            grads = jax.tree.map(lambda grad: grad * scale.astype(grad.dtype), grads)
        metrics = {"loss": loss, "grad_norm": norm}
        rate: Any = None
        if self._schedule is not None:
            rate = jnp.asarray(self._schedule(jnp.asarray(clock.progress)), jnp.float32)
            metrics["lr"] = rate
        with jax.numpy_dtype_promotion("standard"):  # optax's updates do not pass the strict rules
            updates, opt = self._transformation(rate, params).update(grads, state.opt, trained)
            trained = optax.apply_updates(trained, updates)
        ema = state.ema
        if self._options.ema is not None:
            decay = self._options.ema
            ema = jax.tree.map(lambda old, new: (old * decay + new * (1 - decay)).astype(old.dtype), ema, trained)
        return TrainState(paths.overlay(params, trained), opt, ema), {**extra, **metrics}

    def evaluate(self, state: TrainState, batch: Batch) -> Metrics:
        """Loss and metrics of the moving average where there is one, else of the parameters."""
        loss, extra = self._loss_and_metrics(inference_params(state), batch, None)
        return {**extra, "loss": loss}

    def batch_spec(self, size: int) -> Mapping[str, jax.ShapeDtypeStruct]:
        """Shapes and dtypes of a batch of `size` rows."""
        return self._batch_spec(size)

    def exchange(self) -> Exchange:
        """A swarm shares the parameters."""
        return Exchange(lambda state: state.params, lambda state, params: TrainState(params, state.opt, state.ema))

    def parameters(self, state: TrainState) -> list[Parameter]:
        """Path, frozen, decayed, tied of each parameter."""
        trained = jax.tree.leaves(self._trained(state.params))
        decayed = jax.tree.leaves(self._decayed(state.params))
        names = paths.leaf_paths(state.params)
        return [
            Parameter(name, not train, train and decay, self._tied.get(name, ""))
            for name, train, decay in zip(names, trained, decayed, strict=True)
        ]

    def _trained(self, params: Any) -> Any:
        frozen = paths.mask(params, self._options.freeze, "freeze")
        if self._options.freeze is not None and all(jax.tree.leaves(frozen)):
            raise InputError(f"freeze {self._options.freeze!r} matches every parameter: nothing is left to train")
        return jax.tree.map(lambda each: not each, frozen)

    def _decayed(self, params: Any) -> Any:
        return paths.mask(params, self._options.decay, "decay")

    def _transformation(self, rate: Any, params: Any) -> optax.GradientTransformation:
        if self._schedule is None:
            return self._optimizer
        return self._optimizer(rate, paths.keep(self._decayed(params), self._trained(params)))

    def _loss_and_metrics(self, params: Any, batch: Batch, key: jax.Array | None) -> tuple[jax.Array, Metrics]:
        out = self._loss(params, batch, key)
        pair = isinstance(out, tuple) and len(out) == 2 and isinstance(out[1], Mapping)
        loss, metrics = out if pair else (out, {})
        for name, value in {"the loss": loss, **metrics}.items():
            if not isinstance(value, NUMERIC):
                raise InputError(
                    f"{name} is a {type(value).__name__}: a loss returns a scalar, or (scalar, dict of scalar metrics)"
                )
            if jnp.shape(value) != ():
                raise InputError(
                    f"{name} has shape {jnp.shape(value)}, it must be a scalar: take its mean over the batch"
                )
            if name in RESERVED:
                raise InputError(f"a metric cannot be called {name}: the trainer writes one of that name")
        return jnp.asarray(loss, jnp.float32), metrics

    def _gradient(self, params: Any, trained: Any, batch: Batch, key: jax.Array) -> tuple[jax.Array, Metrics, Any]:
        """Loss, metrics and gradient of the mean over the batch, micro-batch by micro-batch."""

        def loss(trained: Any, batch: Batch, key: jax.Array) -> tuple[jax.Array, Metrics]:
            return self._loss_and_metrics(paths.overlay(params, trained), batch, key)

        gradient = jax.value_and_grad(loss, has_aux=True)
        count = self._options.accumulate
        if count == 1:
            (mean, metrics), grads = gradient(trained, batch, key)
            return mean, metrics, grads

        def micro(index: jax.Array, batch: Batch) -> Any:
            (value, metrics), grads = gradient(trained, batch, jax.random.fold_in(key, index))
            return value, metrics, grads

        def add(total: Any, indexed: Any) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, micro(*indexed)), None

        # Micro-batch a takes every count-th row from a on: each device then keeps rows that it already holds.
        micros = jax.tree.map(lambda x: x.reshape(-1, count, *x.shape[1:]).swapaxes(0, 1), dict(batch))
        shapes = jax.eval_shape(micro, jnp.int32(0), jax.tree.map(lambda x: x[0], micros))
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        total, _ = jax.lax.scan(add, zeros, (jnp.arange(count), micros))
        return jax.tree.map(lambda x: x / jnp.asarray(count, x.dtype), total)


def inference_params(state: TrainState) -> Any:
    """The parameters to evaluate and sample with: the moving average where there is one."""
    return state.params if state.ema is None else paths.overlay(state.params, state.ema)


def in_precision(loss: Loss, precision: str, cast: Collection[str] = ()) -> Loss:
    """`loss` computed in `precision` over float32 parameters; of a batch, the arrays named in `cast` go with them."""
    if precision == "f32":
        return loss
    if precision == "highest":

        def full(params: Any, batch: Batch, key: jax.Array | None) -> Any:
            with jax.default_matmul_precision("highest"):
                return loss(params, batch, key)

        return full

    def half(leaf: Any) -> Any:
        return leaf.astype(jnp.bfloat16) if leaf.dtype == jnp.float32 else leaf

    def halved(params: Any, batch: Batch, key: jax.Array | None) -> Any:
        rows = {name: half(array) if name in cast else array for name, array in batch.items()}
        try:
            return loss(jax.tree.map(half, params), rows, key)
        except TypeError as error:
            whole = [name for name, array in rows.items() if array.dtype == jnp.float32]
            if whole and "bfloat16" in str(error):  # as lax.conv says, which does not promote
                error.args = (f"{error}; {' and '.join(whole)} of the batch stay float32 without cast={whole}",)
            raise

    return halved


class Supervised(Recipe):
    """What `supervised` returns."""

    forms = ("accumulate",)

    def __init__(
        self,
        init: Any,
        loss: Loss,
        optimizer: Any,
        data: Any,
        schedule: Any,
        defaults: Mapping[str, Any] | None,
        cast: str | Collection[str],
    ):
        self.defaults = dict(defaults or {})
        for name in self.defaults:
            if name not in DEFAULTS:
                raise InputError(f"defaults takes no {name}; {did_you_mean(name, DEFAULTS)}")
        self._init, self._loss, self._optimizer, self._schedule = init, loss, optimizer, schedule
        self._cast = (cast,) if isinstance(cast, str) else tuple(cast)
        self._data = functools.cache(data if callable(data) else {"train": data}.get)
        module = sys.modules.get(getattr(loss, "__module__", ""))
        self.name = Path(getattr(module, "__file__", None) or "recipe").stem

    def program(self, options: Options) -> SupervisedProgram:
        """The program; supports every option."""
        row = {name: np.asarray(array) for name, array in self.data("train").rows(0, 1).items()}

        def spec(size: int) -> dict[str, jax.ShapeDtypeStruct]:
            return {name: jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype) for name, x in row.items()}

        for name in self._cast:
            if name not in row:
                raise InputError(f"cast names {name}, which the data has not; {did_you_mean(name, list(row))}")
            if row[name].dtype != np.float32:
                raise InputError(f"cast names {name}, which is {row[name].dtype}: only float32 inputs are cast")
        loss = in_precision(self._loss, options.precision, self._cast)
        return SupervisedProgram(self._init, loss, self._optimizer, self._schedule, spec, options)

    def data(self, split: str) -> Source:
        """The rows of one split."""
        data = self._data(split)
        if data is None:
            raise InputError(f"{self.name} has no {split} data; give data as a function of the split")
        return ArraySource(data) if isinstance(data, Mapping) else data


def supervised(
    init: Callable[[jax.Array], Any],
    loss: Loss,
    optimizer: Any,
    data: Any,
    schedule: Callable[[jax.Array], Any] | None = None,
    defaults: Mapping[str, Any] | None = None,
    cast: str | Collection[str] = (),
) -> Supervised:
    """A recipe from one loss.

    - init(key) → parameters, any pytree of float32 arrays.
    - loss(params, batch, key) → the mean loss of a batch (scalar), or (loss, dict of scalar metrics); key is a typed
      PRNG key, None during evaluation.
    - optimizer: an optax transformation; with `schedule(progress) → learning rate`, a function of
      (learning_rate, decay_mask) that returns one.
    - data: a mapping of arrays with a common first axis, a Source, or a function from a split's name to either (None
      where there is no such split).
    - defaults: settings of a run when the user names none, such as {"steps": 400, "batch": 64}.
    - cast: float32 arrays of a batch that are cast to bfloat16 with the parameters where the precision is bf16, such as
      the pixels of a picture; all others, targets among them, reach the loss as they are.
    """
    return Supervised(init, loss, optimizer, data, schedule, defaults, cast)
