"""A complete recipe from one loss function; supports every option."""

import functools
import math
import sys
from collections.abc import Callable, Collection, Mapping
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tpuswarm.config.limits import check_settings
from tpuswarm.config.nearest import did_you_mean
from tpuswarm.errors import InputError, NoSuchSplit
from tpuswarm.train import paths
from tpuswarm.train.data.source import ArraySource, by_split, rows_of, source_of
from tpuswarm.train.entry_point import entry_point
from tpuswarm.train.losses import (
    COUNTS,
    Loss,
    Terms,
    counts,
    in_precision,
    mean_gradient,
    means,
    objective,
    terms,
    terms_and_extra,
)
from tpuswarm.train.micro_batches import added_up, added_up_by_device
from tpuswarm.train.optimizer import alone_because, as_transformation, init_state, params_to_use, update
from tpuswarm.train.optional import check_defaults
from tpuswarm.train.program.rounding import sums_in_float32
from tpuswarm.train.recipe import (
    Average,
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
from tpuswarm.train.schedule import check_schedule, in_steps
from tpuswarm.train.trained import refuse_statistics, usual_decay
from tpuswarm.train.user_code import blame, line_of, require_call


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Parameters in their own dtypes (float32 masters); optimizer state and moving average of the trained ones only."""

    params: Any
    opt: Any
    ema: Any
    extra: ClassVar[Any] = None
    """Mutable state of the loss: see StateWithExtra. Where there is none a checkpoint has no such key."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StateWithExtra(TrainState):
    """Of a loss with mutable state."""

    extra: Any  # type: ignore[misc]  # a field here alone


class SupervisedProgram(Program):
    """Gradient descent on one loss.

    optimizer: an optax transformation, or, with `schedule`, a function of (learning_rate, decay_mask) that returns one;
    schedule: progress (float32 scalar, 0 to 1), or number of updates (see `in_steps`) → learning rate. `loss` already
    computes in `options.precision`; micro_batches: the loss of a batch is the mean of those of its equal parts, or
    Weighted.
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
    ):
        """frozen: paths of parameters that are never trained, whatever `options.freeze` says."""
        self._frozen = frozenset(frozen)
        self._extra, self._weights, self._micro_batches = extra, weights, micro_batches
        self._init, self._loss, self._optimizer, self._schedule = init, loss, optimizer, schedule
        self.has_schedule, self.has_step_schedule = schedule is not None, schedule is not None and in_steps(schedule)
        self.scheduled = self.has_schedule and not self.has_step_schedule
        """Whether a step depends on its share of the run, which then has a length."""
        self._batch_spec, self._options, self._tied = batch_spec, options, tied or {}
        self.tokens_per_row = tokens_per_row
        check_settings({"ema": options.ema, "clip": options.clip})
        ready = as_transformation(optimizer) is not None
        if ready == (schedule is not None) or not (ready or callable(optimizer)):
            got = "a ready one" if ready else f"a {type(optimizer).__name__}"
            raise InputError(
                "optimizer is a ready optax transformation such as optax.adam(1e-3), or, with a schedule, a function "
                f"of (learning_rate, decay_mask) that returns one; got {got} and {'a' if schedule else 'no'} schedule"
            )
        if options.decay is not None and schedule is None:
            raise InputError("decay needs an optimizer(learning_rate, decay_mask) with a schedule, not a ready one")

    def at(self, schedule: Callable[[jax.Array], Any]) -> "SupervisedProgram":
        """The same program with another schedule, for one that has a schedule."""
        other = copy(self)
        other._schedule, other.has_step_schedule = schedule, False
        return other

    def init(self, key: jax.Array, shared: Any = None) -> TrainState:
        """Fresh parameters, or `shared` ones; optimizer state and moving average begin with them."""
        extra = self._extra(key) if self._extra else None
        if shared is None:
            params = self._init(key)
        else:
            params, statistics = (shared, None) if extra is None else (shared["params"], shared["extra"])
            extra = paths.overlay(extra, statistics) if statistics is not None else extra
        for path, leaf in zip(paths.leaf_paths(params), jax.tree.leaves(params), strict=True):
            found = paths.array_type(leaf)
            if found is None or not jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
                raise InputError(
                    f"parameter {path} is {found or f'a {type(leaf).__name__}'}: parameters are floating-point arrays"
                    f"{line_of(self._init)}"
                )
        trained = paths.keep(params, self._trained(params))
        refuse_statistics(trained, line_of(self._init))
        opt = init_state(self._transformation(0.0, params), trained)
        return _state(params, opt, jax.tree.map(_average, trained) if self._options.ema is not None else None, extra)

    def alone_because(self, state: TrainState) -> str:
        """Why the optimizer is for one member of a swarm alone, and the way out; empty where it is not."""
        return alone_because(state.opt)

    def weights(self) -> Any:
        """The parameters that a recipe holds already, in the form of `exchange().get`."""
        return self._weights() if self._weights else None

    def step(self, state: TrainState, batch: Batch, clock: Clock) -> tuple[TrainState, Metrics]:
        """Gradient, clipping, optimizer, moving average; nothing changes if no row counts (COUNTS is then 0)."""
        params = state.params
        trained = paths.keep(params, self._trained(params))
        total, count, grads, extra = self._gradient(params, trained, state.extra, batch, clock.key)
        metrics, any_counts = means(total, count), counts(total)
        grads, metrics["grad_norm"] = self._clip(mean_gradient(grads, total, count))
        rate: Any = None
        if self._schedule is not None:
            position = clock.step if self.has_step_schedule else clock.progress
            with blame("the schedule fails"):
                rate = jnp.asarray(self._schedule(jnp.asarray(position)), jnp.float32)
            rate = rate * clock.lr_scale
            metrics["lr"] = rate

        def value(trained: Any, obj_fn: Any = None, grad_fn: Any = None) -> jax.Array:
            """The loss of the whole batch at once, for optimizers that ask for it.

            optax's line searches require that it takes, as here, the extra arguments that are not theirs.
            """
            return means(self._terms(paths.overlay(params, trained), state.extra, batch, clock.key)[0], 1)["loss"]

        extra_args = {
            "value": metrics["loss"],
            "grad": grads,
            "value_fn": value,
            "obj_fn": value,
            "grad_fn": lambda params, *_: self._clip(jax.grad(value)(params))[0],
        }
        scale = clock.lr_scale if self._schedule is None else None  # of an optimizer with a rate of its own
        trained, opt = update(self._transformation(rate, params), grads, state.opt, trained, extra_args, scale)
        ema = state.ema
        if self._options.ema is not None:
            decay = self._options.ema
            averaged = params_to_use(opt, trained)
            ema = jax.tree.map(lambda old, new: old * decay + new.astype(old.dtype) * (1 - decay), ema, averaged)
        after = _state(paths.overlay(params, trained), opt, ema, extra)
        if any_counts is not None:
            metrics[COUNTS] = any_counts.astype(jnp.float32)
            after = jax.tree.map(lambda new, old: jax.lax.select(any_counts, new, old), after, state)
        return after, metrics

    def batch_gradient(self, state: TrainState, batch: Batch, key: jax.Array) -> Any:
        """The gradient by the trained parameters of a batch that is computed at once: float arrays by their paths."""
        trained = paths.keep(state.params, self._trained(state.params))

        def loss(trained: Any) -> jax.Array:
            return objective(self._terms(paths.overlay(state.params, trained), state.extra, batch, key)[0])

        return sums_in_float32(jax.grad(loss))(trained)

    def evaluate(self, state: TrainState, batch: Batch) -> Metrics:
        """Loss and metrics of the parameters for inference."""
        return self._terms(inference_params(state), state.extra, batch, None)[0]

    def predict(self, function: Callable[..., Any], state: TrainState, batch: Batch) -> Any:
        """`function(params, batch)`, or `function(params, extra, batch)`, of the parameters for inference."""
        extra = {} if self._extra is None else {"extra": state.extra}
        require_call(function, "function", "params", *extra, "batch")
        return function(inference_params(state), *extra.values(), batch)

    def batch_spec(self, size: int) -> Mapping[str, jax.ShapeDtypeStruct]:
        """Shapes and dtypes of a batch of `size` rows."""
        return self._batch_spec(size)

    def exchange(self) -> Exchange:
        """A swarm shares the parameters, and what is floating-point in the mutable state."""
        if self._extra is None:
            average = self._ema(lambda shared: shared)
            return Exchange(lambda state: state.params, lambda state, params: replace(state, params=params), average)

        def put(state: StateWithExtra, shared: Any) -> TrainState:
            return replace(state, params=shared["params"], extra=paths.overlay(state.extra, shared["extra"]))

        average = self._ema(lambda shared: shared["params"])
        return Exchange(lambda state: {"extra": _floats(state.extra), "params": state.params}, put, average)

    def parameters(self, state: TrainState) -> list[Parameter]:
        """Path, frozen, decayed, tied of each parameter."""
        trained = jax.tree.leaves(self._trained(state.params))
        decayed = jax.tree.leaves(self._decayed(state.params))
        names = paths.leaf_paths(state.params)
        statistics = [
            Parameter(f"extra/{name}", False, False, "", statistic=True)
            for name in paths.leaf_paths(_floats(state.extra))
        ]
        return statistics + [
            Parameter(name, not train, train and decay, self._tied.get(name, ""))
            for name, train, decay in zip(names, trained, decayed, strict=True)
        ]

    def _ema(self, params_of: Callable[[Any], Any]) -> Average | None:
        """The moving average, with what takes the parameters from what is shared."""
        decay = self._options.ema
        if decay is None:
            return None

        def put(state: TrainState, shared: Any) -> TrainState:
            params = params_of(shared)
            return replace(state, ema=jax.tree.map(_average, paths.keep(params, self._trained(params))))

        return Average(put, lambda batch: batch * math.log(0.5) / math.log(decay))

    def _trained(self, params: Any) -> Any:
        matched = paths.mask(params, self._options.freeze, "freeze")
        names = jax.tree.unflatten(jax.tree.structure(params), paths.leaf_paths(params))
        trained = jax.tree.map(lambda each, name: not each and name not in self._frozen, matched, names)
        if not any(jax.tree.leaves(trained)):
            of = " that its recipe trains" if self._frozen else ""
            raise InputError(f"freeze {self._options.freeze!r} matches every parameter{of}: nothing is left to train")
        return trained

    def _decayed(self, params: Any) -> Any:
        if self._options.decay is None and self.has_schedule:
            return usual_decay(params)
        return paths.mask(params, self._options.decay, "decay")

    def _transformation(self, rate: Any, params: Any) -> optax.GradientTransformation:
        made = self._optimizer
        if self._schedule is not None:
            decay_mask = paths.keep(self._decayed(params), self._trained(params))
            with blame("optimizer(learning_rate, decay_mask) fails"):
                made = made(rate, decay_mask)
        if (optimizer := as_transformation(made)) is None:
            raise InputError(
                f"optimizer(learning_rate, decay_mask) returned a {type(made).__name__}: return an optax "
                f"transformation{line_of(self._optimizer)}"
            )
        return optimizer

    def _clip(self, grads: Any) -> tuple[Any, jax.Array]:
        """Return a gradient as optax takes it, no longer than `clip`, and its norm before."""
        grads = jax.tree.map(jnp.conj, grads)  # JAX conjugates those of complex parameters
        norm = optax.tree.norm(grads)
        if self._options.clip is not None:
            scale = jnp.minimum(1.0, self._options.clip / jnp.maximum(norm, 1e-30))
            grads = jax.tree.map(lambda grad: grad * scale.astype(grad.dtype), grads)
        return grads, norm

    def _terms(self, params: Any, extra: Any, batch: Batch, key: jax.Array | None) -> tuple[Terms, Any]:
        """Loss and metrics, and the mutable state after the batch."""
        if self._extra is None:
            return terms(self._loss(params, batch, key)), None
        return terms_and_extra(self._loss(params, extra, batch, key), extra)

    def _gradient(
        self, params: Any, trained: Any, extra: Any, batch: Batch, key: jax.Array
    ) -> tuple[Terms, int, Any, Any]:
        """Sums over micro-batches of loss and metrics, their number, the gradient's sum, mutable state after it."""

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
            grads, total = added_up_by_device(gradient, count, trained, params, batch, key)
            count *= devices
        else:
            (grads, total), extra = added_up(gradient, count, trained, params, extra, batch, key)
        return total, count, grads, extra


def _floats(extra: Any) -> Any:
    """The floating-point leaves of mutable state: averages, which can be merged; not counters and keys."""
    return paths.keep(extra, jax.tree.map(lambda leaf: jnp.issubdtype(leaf.dtype, jnp.inexact), extra))


def _state(params: Any, opt: Any, ema: Any, extra: Any) -> TrainState:
    return TrainState(params, opt, ema) if extra is None else StateWithExtra(params, opt, ema, extra)


def inference_params(state: TrainState) -> Any:
    """The parameters to evaluate and sample with: the moving average, or those that the optimizer means for it."""
    averaged = params_to_use(state.opt, state.params) if state.ema is None else paths.overlay(state.params, state.ema)
    return jax.tree.map(lambda leaf, like: leaf.astype(like.dtype), averaged, state.params)


def _average(leaf: jax.Array) -> jax.Array:
    """Where a moving average begins: a copy, in at least float32, for small steps are lost in fewer bits."""
    return jnp.array(leaf, jnp.float32 if leaf.dtype.itemsize < 4 else leaf.dtype)


class Supervised(Recipe):
    """A recipe from one loss.

    - init(key) → parameters, any pytree of float32 arrays.
    - loss(params, batch, key) → the mean loss of a batch (scalar), or (loss, dict of scalar metrics); key is a typed
      PRNG key, None during evaluation. In the place of any mean it may return Weighted(sum, weight).
    - optimizer: an optax optimizer, those that need the loss too, such as reduce_on_plateau and lbfgs; with a schedule,
      a function of (learning_rate, decay_mask) that returns one.
    - schedule: progress (0 to 1) → learning rate; or one of optax's, or any function whose parameter is called `step`
      or `count`: number of updates → learning rate.
    - data: a mapping of arrays with a common first axis, a Source, or a mapping or function from a split's name
      (`train`, `validation`, `all`) to either (None where there is no such split).
    - defaults: settings of a run when the user names none, such as {"steps": 400, "batch": 64}.
    - cast: float32 arrays of a batch that are cast to bfloat16 with the parameters where the precision is bf16, such as
      the pixels of a picture; all others, targets among them, reach the loss as they are.
    - float32: a regular expression; parameters whose path it matches, such as those of norms or of the last layer, are
      not cast where the precision is bf16, and what is computed with them is float32.
    - micro_batches: the loss of a batch is the mean of the losses of its equal parts, or Weighted: where memory is
      short, a step may be computed part by part. A contrastive loss, or a masked mean that is not Weighted, is not so.
    - extra(key) → mutable state, such as the running mean and variance of BatchNorm: any pytree of arrays, made with
      the key that init gets. The loss is then loss(params, extra, batch, key) → (loss, (dict of metrics, extra)): what
      it returns is what it gets at the next step. No gradient goes into it; what an evaluation returns is not kept.
    """

    def __init__(
        self,
        init: Callable[[jax.Array], Any],
        loss: Loss,
        optimizer: Any,
        data: Any,
        schedule: Callable[[jax.Array], Any] | None = None,
        defaults: Mapping[str, Any] | None = None,
        cast: str | Collection[str] = (),
        micro_batches: bool = False,
        extra: Callable[[jax.Array], Any] | None = None,
        float32: str | None = None,
    ):
        require_call(init, "init", "key")
        require_call(loss, "loss", "params", *(("extra",) if extra else ()), "batch", "key")
        if extra is not None:
            require_call(extra, "extra", "key")
        if schedule is not None:
            require_call(schedule, "schedule", "progress")
            if callable(optimizer):  # what is neither this nor an optax transformation is refused with both in words
                require_call(optimizer, "optimizer", "learning_rate", "decay_mask")
        self._extra, self._float32, self._has_checked_schedule = extra, float32, False
        self.frozen: Collection[str] = ()
        """Paths of parameters that are never trained."""
        self.forms = ("accumulate",) if micro_batches else ()
        check_defaults({} if defaults is None else defaults, "defaults")
        self.defaults = dict(defaults or {})
        self._init, self._loss, self._optimizer, self._schedule = init, loss, optimizer, schedule
        self._cast = (cast,) if isinstance(cast, str) else tuple(cast)
        self._data = functools.cache(by_split(data))
        module = sys.modules.get(getattr(loss, "__module__", ""))
        self.name = Path(getattr(module, "__file__", None) or "recipe").stem

    def program(self, options: Options) -> SupervisedProgram:
        """The program; supports every option."""
        row = self._row

        def spec(size: int) -> dict[str, jax.ShapeDtypeStruct]:
            return {name: jax.ShapeDtypeStruct((size, *x.shape), x.dtype) for name, x in row.items()}

        for name in self._cast:
            if name not in row:
                raise InputError(f"cast names {name}, which the data has not; {did_you_mean(name, list(row))}")
            if row[name].dtype != np.float32:
                raise InputError(f"cast names {name}, which is {row[name].dtype}: only float32 inputs are cast")
        if self._schedule is not None and not self._has_checked_schedule:
            self._has_checked_schedule = True
            check_schedule(self._schedule)  # not before: a run over several hosts has to start before JAX computes
        loss = in_precision(self.loss(options), options.precision, self._cast, self._float32)
        return SupervisedProgram(
            self._init, loss, self._optimizer, self._schedule, spec, options,
            extra=self._extra, weights=self.weights, micro_batches="accumulate" in self.forms,
            frozen=self.frozen,
        )  # fmt: skip

    @functools.cached_property
    def _row(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and dtypes of one row, which is read once: a start makes many programs, and a stream begins anew."""
        row = rows_of(source_of(self, "train"), 0, 1)
        return {name: jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for name, x in row.items()}

    def loss(self, options: Options) -> Loss:
        """The loss in the form that `compile_step` has chosen; in float32, for its precision is seen to elsewhere."""
        return self._loss

    def weights(self) -> Any:
        """Parameters that are there already, as `Program.weights` gives them; None: init makes them."""
        return None

    def data(self, split: str) -> Source:
        """The rows of one split."""
        data = self._data(split)
        if data is None:
            raise NoSuchSplit(f"{self.name} has no {split} data; give data as a function of the split")
        if isinstance(data, Mapping):
            try:
                return ArraySource(data)
            except InputError as error:
                raise InputError(f"the {split} data of {self.name}: {error}") from error
        if not callable(getattr(data, "rows", None)):
            raise InputError(
                f"the {split} data of {self.name} is a {type(data).__name__}: give a dict of arrays with a common "
                "first axis, or a Source, an object with rows(start, count); IndexedSource and StreamSource make one "
                "of a dataset and of a DataLoader"
            )
        return data


supervised = entry_point(Supervised, "supervised")
