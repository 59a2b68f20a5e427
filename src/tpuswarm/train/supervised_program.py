"""Compute the steps of `supervised`: gradient descent on one loss."""

import math
from collections.abc import Callable, Collection, Mapping
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax

from tpuswarm.config.limits import check_settings
from tpuswarm.errors import InputError
from tpuswarm.train import paths
from tpuswarm.train.losses import (
    HAS_COUNTED_ROWS,
    Loss,
    Terms,
    has_counted_rows,
    mean_gradient,
    mean_terms,
    objective,
    sum_micro_batches,
    sum_micro_batches_by_device,
    terms,
    terms_and_extra,
)
from tpuswarm.train.optimizer import (
    as_transformation,
    default_decay_mask,
    init_state,
    params_to_use,
    refuse_statistics,
    schedule_unit,
    swarm_obstacle,
    update,
)
from tpuswarm.train.program.rounding import sums_in_float32
from tpuswarm.train.recipe import Average, Batch, Clock, Exchange, Metrics, Options, Parameter, Program
from tpuswarm.train.user_code import blame, line_of, require_call


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Parameters in their own dtypes; optimizer state and moving average of the trained ones only."""

    params: Any
    opt: Any
    ema: Any
    extra: ClassVar[Any] = None
    """Mutable state of the loss, a field in StateWithExtra alone, so that other checkpoints have no such key."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StateWithExtra(TrainState):
    """The state of a loss with mutable state."""

    extra: Any  # type: ignore[misc]


class SupervisedProgram(Program):
    """Gradient descent on one loss.

    - optimizer: an optax transformation, or with `schedule` a function of (learning_rate, decay_mask) that returns one.
    - schedule: progress (float32 scalar, 0 to 1), number of updates or epochs (see `schedule_unit`) → learning rate.
    - loss: already computes in `options.precision`.
    - micro_batches: the loss of a batch is the mean of the losses of its equal parts, or Weighted.
    - frozen: paths of parameters that are never trained, whatever `options.freeze` says.
    - base: likewise, and a swarm does not exchange them (Recipe.base_model).
    """

    failures = "the loss of {} fails", "the evaluation of {} fails (its key is None)"

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
        extra: Callable[[jax.Array], Any] | None = None,
        weights: Callable[[], Any] | None = None,
        micro_batches: bool = False,
        frozen: Collection[str] = (),
        base: Collection[str] = (),
        rows_per_epoch: int | None = None,
    ):
        self._frozen, self._base = frozenset([*frozen, *base]), frozenset(base)
        self._extra, self._weights, self._micro_batches = extra, weights, micro_batches
        self._init, self._loss, self._optimizer, self._schedule = init, loss, optimizer, schedule
        self._unit, self._rows_per_epoch = schedule_unit(schedule) if schedule else None, rows_per_epoch or 0
        self.has_schedule, self.has_step_schedule = schedule is not None, self._unit in ("step", "epoch")
        if self._unit == "epoch" and not rows_per_epoch:
            raise InputError("the schedule counts epochs, but the training data has no rows_per_epoch")
        self.has_progress_schedule = self.has_schedule and not self.has_step_schedule
        """Whether a step depends on the run's progress, so that the run needs a length."""
        self._batch_spec, self._options, self._tied = batch_spec, options, tied or {}
        self.tokens_per_row = tokens_per_row
        check_settings({"ema": options.ema, "clip": options.clip})
        is_ready = as_transformation(optimizer) is not None
        if is_ready == (schedule is not None) or not (is_ready or callable(optimizer)):
            got = "a ready one" if is_ready else f"a {type(optimizer).__name__}"
            raise InputError(
                "optimizer is a ready optax transformation such as optax.adam(1e-3), or, with a schedule, a function "
                f"of (learning_rate, decay_mask) that returns one; got {got} and {'a' if schedule else 'no'} schedule"
            )
        if options.decay is not None and schedule is None:
            raise InputError("decay needs an optimizer(learning_rate, decay_mask) with a schedule, not a ready one")

    def at(self, schedule: Callable[[jax.Array], Any]) -> "SupervisedProgram":
        """Return the same program with another schedule of progress."""
        other = copy(self)
        other._schedule, other._unit, other.has_step_schedule = schedule, "progress", False
        return other

    def init(self, key: jax.Array, shared: Any = None) -> TrainState:
        """Return a state with fresh or `shared` parameters; optimizer state and moving average begin with them."""
        extra = self._extra(key) if self._extra else None
        if shared is None:
            params = self._init(key)
        else:
            params, statistics = (shared, None) if extra is None else (shared["params"], shared["extra"])
            extra = paths.overlay(extra, statistics) if statistics is not None else extra
        for path, leaf in zip(paths.leaf_paths(params), jax.tree.leaves(params), strict=True):
            found = paths.array_type(leaf)
            is_float = found is not None and jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)
            if not is_float and path not in self._base:  # a base may be quantized
                raise InputError(
                    f"parameter {path} is {found or f'a {type(leaf).__name__}'}: parameters are floating-point arrays"
                    f"{line_of(self._init)}"
                )
        trained = paths.select(params, self._trained(params))
        refuse_statistics(trained, line_of(self._init))
        opt = init_state(self._transformation(0.0, params), trained)
        return _state(params, opt, jax.tree.map(_average, trained) if self._options.ema is not None else None, extra)

    def swarm_obstacle(self, state: TrainState) -> str:
        return swarm_obstacle(self._transformation(0.0, state.params), state.opt)

    def weights(self) -> Any:
        return self._weights() if self._weights else None

    def step(self, state: TrainState, batch: Batch, clock: Clock) -> tuple[TrainState, Metrics]:
        """Return the next state and metrics; if no row counts, the state stays and HAS_COUNTED_ROWS is 0."""
        params = state.params
        trained = paths.select(params, self._trained(params))
        total, count, grads, extra = self._gradient(params, trained, state.extra, batch, clock.key)
        metrics, has_counted = mean_terms(total, count), has_counted_rows(total)
        grads, metrics["grad_norm"] = self._clip(mean_gradient(grads, total, count))
        rate: Any = None
        if self._schedule is not None:
            position: Any = clock.step if self.has_step_schedule else clock.progress
            if self._unit == "epoch":
                position = _epochs(position, self._rows_per_epoch / len(jax.tree.leaves(batch)[0]))
            with blame("the schedule fails"):
                rate = jnp.asarray(self._schedule(jnp.asarray(position)), jnp.float32)
            rate = rate * clock.lr_scale
            metrics["lr"] = rate

        def value(trained: Any, obj_fn: Any = None, grad_fn: Any = None) -> jax.Array:
            """Return the loss of the whole batch; optax's line searches pass other optimizers' arguments, too."""
            return mean_terms(self._terms(paths.overlay(params, trained), state.extra, batch, clock.key)[0], 1)["loss"]

        extra_args = {
            "value": metrics["loss"],
            "grad": grads,
            "value_fn": value,
            "obj_fn": value,
            "grad_fn": lambda params, *_: self._clip(jax.grad(value)(params))[0],
        }
        scale = clock.lr_scale if self._schedule is None else None  # for an optimizer with its own rate
        trained, opt = update(self._transformation(rate, params), grads, state.opt, trained, extra_args, scale)
        ema = state.ema
        if self._options.ema is not None:
            decay = self._options.ema
            averaged = params_to_use(opt, trained)
            ema = jax.tree.map(lambda old, new: old * decay + new.astype(old.dtype) * (1 - decay), ema, averaged)
        after = _state(paths.overlay(params, trained), opt, ema, extra)
        if has_counted is not None:
            metrics[HAS_COUNTED_ROWS] = has_counted.astype(jnp.float32)
            after = jax.tree.map(lambda new, old: jax.lax.select(has_counted, new, old), after, state)
        return after, metrics

    def batch_gradient(self, state: TrainState, batch: Batch, key: jax.Array) -> Any:
        """Return the gradient of a batch, computed at once: a tree like the trained parameters."""
        trained = paths.select(state.params, self._trained(state.params))

        def loss(trained: Any) -> jax.Array:
            return objective(self._terms(paths.overlay(state.params, trained), state.extra, batch, key)[0])

        return sums_in_float32(jax.grad(loss))(trained)

    def evaluate(self, state: TrainState, batch: Batch) -> Metrics:
        """Return loss and metrics of the parameters for inference."""
        return self._terms(inference_params(state), state.extra, batch, None)[0]

    def predict(self, function: Callable[..., Any], state: TrainState, batch: Batch) -> Any:
        """Call `function(params, batch)`, or `function(params, extra, batch)`, with the parameters for inference."""
        extra = {} if self._extra is None else {"extra": state.extra}
        require_call(function, "function", "params", *extra, "batch")
        return function(inference_params(state), *extra.values(), batch)

    def batch_spec(self, size: int) -> Mapping[str, jax.ShapeDtypeStruct]:
        return self._batch_spec(size)

    def exchange(self) -> Exchange:
        """Share the parameters and the floating-point part of the mutable state."""
        if self._extra is None:
            average = self._ema(lambda shared: shared)
            return Exchange(lambda state: state.params, lambda state, params: replace(state, params=params), average)

        def put(state: StateWithExtra, shared: Any) -> TrainState:
            return replace(state, params=shared["params"], extra=paths.overlay(state.extra, shared["extra"]))

        average = self._ema(lambda shared: shared["params"])
        return Exchange(lambda state: {"extra": _floats(state.extra), "params": state.params}, put, average)

    def parameters(self, state: TrainState) -> list[Parameter]:
        """Describe each parameter, and each floating-point leaf of the mutable state."""
        trained = jax.tree.leaves(self._trained(state.params))
        decayed = jax.tree.leaves(self._decayed(state.params))
        names = paths.leaf_paths(state.params)
        statistics = [
            Parameter(f"extra/{name}", False, False, "", statistic=True)
            for name in paths.leaf_paths(_floats(state.extra))
        ]
        return statistics + [
            Parameter(name, not train, train and decay, self._tied.get(name, ""), base=name in self._base)
            for name, train, decay in zip(names, trained, decayed, strict=True)
        ]

    def _ema(self, params_of: Callable[[Any], Any]) -> Average | None:
        """Return the moving average; params_of returns the parameters of a shared tree."""
        decay = self._options.ema
        if decay is None:
            return None

        def put(state: TrainState, shared: Any) -> TrainState:
            params = params_of(shared)
            return replace(state, ema=jax.tree.map(_average, paths.select(params, self._trained(params))))

        return Average(put, lambda batch: batch * math.log(0.5) / math.log(decay))

    def _trained(self, params: Any) -> Any:
        matched = paths.mask(params, self._options.freeze, "freeze")
        names = jax.tree.unflatten(jax.tree.structure(params), paths.leaf_paths(params))
        trained = jax.tree.map(lambda is_frozen, name: not is_frozen and name not in self._frozen, matched, names)
        if not any(jax.tree.leaves(trained)):
            kind = "trainable parameter" if self._frozen else "parameter"
            raise InputError(f"freeze {self._options.freeze!r} matches every {kind}: nothing is left to train")
        return trained

    def _decayed(self, params: Any) -> Any:
        if self._options.decay is None and self.has_schedule:
            return default_decay_mask(params)
        return paths.mask(params, self._options.decay, "decay")

    def _transformation(self, rate: Any, params: Any) -> optax.GradientTransformation:
        optimizer = self._optimizer
        if self._schedule is not None:
            decay_mask = paths.select(self._decayed(params), self._trained(params))
            with blame("optimizer(learning_rate, decay_mask) fails"):
                optimizer = optimizer(rate, decay_mask)
        if (transformation := as_transformation(optimizer)) is None:
            raise InputError(
                f"optimizer(learning_rate, decay_mask) returned a {type(optimizer).__name__}: return an optax "
                f"transformation{line_of(self._optimizer)}"
            )
        return transformation

    def _clip(self, grads: Any) -> tuple[Any, jax.Array]:
        """Return a gradient in optax's convention, its norm limited to `clip`, and its norm before."""
        grads = jax.tree.map(jnp.conj, grads)  # JAX's gradient by a complex parameter is conjugated
        norm = optax.tree.norm(grads)
        if self._options.clip is not None:
            scale = jnp.minimum(1.0, self._options.clip / jnp.maximum(norm, 1e-30))
            grads = jax.tree.map(lambda grad: grad * scale.astype(grad.dtype), grads)
        return grads, norm

    def _terms(self, params: Any, extra: Any, batch: Batch, key: jax.Array | None) -> tuple[Terms, Any]:
        if self._extra is None:
            return terms(self._loss(params, batch, key)), None
        return terms_and_extra(self._loss(params, extra, batch, key), extra)

    def _gradient(
        self, params: Any, trained: Any, extra: Any, batch: Batch, key: jax.Array
    ) -> tuple[Terms, int, Any, Any]:
        """Return over all micro-batches: sum of the terms, their number, sum of the gradients, mutable state after."""

        def loss(
            trained: Any, params: Any, extra: Any, batch: Batch, key: jax.Array
        ) -> tuple[jax.Array, tuple[Terms, Any]]:
            found, after = self._terms(paths.overlay(params, trained), extra, batch, key)
            return objective(found), (found, after)

        gradient = sums_in_float32(jax.grad(loss, has_aux=True))
        count, devices = self._options.accumulate, jax.sharding.get_abstract_mesh().size
        if count == 1:
            grads, (total, extra) = gradient(trained, params, extra, batch, key)
        elif self._micro_batches and extra is None and self._options.shard == "replicate" and devices > 1:
            grads, total = sum_micro_batches_by_device(gradient, count, trained, params, batch, key)
            count *= devices
        else:
            (grads, total), extra = sum_micro_batches(gradient, count, trained, params, extra, batch, key)
        return total, count, grads, extra


def _floats(extra: Any) -> Any:
    """Return the averages in mutable state, which a swarm can merge; counters and keys are no floats."""
    return paths.select(extra, jax.tree.map(lambda leaf: jnp.issubdtype(leaf.dtype, jnp.inexact), extra))


def _epochs(step: Any, steps_per_epoch: float) -> jax.Array:
    """Return step / steps_per_epoch, exact where an epoch begins: XLA would multiply by a rounded reciprocal."""
    epochs = jnp.asarray(step / steps_per_epoch)
    whole = jnp.round(epochs)
    return jnp.where(whole * steps_per_epoch == step, whole, epochs)


def _state(params: Any, opt: Any, ema: Any, extra: Any) -> TrainState:
    return TrainState(params, opt, ema) if extra is None else StateWithExtra(params, opt, ema, extra)


def inference_params(state: TrainState) -> Any:
    """Return the parameters to evaluate and sample with: the moving average, or the optimizer's choice."""
    averaged = params_to_use(state.opt, state.params) if state.ema is None else paths.overlay(state.params, state.ema)
    return jax.tree.map(lambda leaf, like: leaf.astype(like.dtype), averaged, state.params)


def _average(leaf: jax.Array) -> jax.Array:
    """Return a first moving average: a copy in at least float32, since fewer bits lose small steps."""
    return jnp.array(leaf, jnp.float32 if leaf.dtype.itemsize < 4 else leaf.dtype)
