"""Make a complete recipe from one loss function."""

import functools
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tpuswarm.config.nearest import did_you_mean
from tpuswarm.errors import InputError, NoSuchSplit
from tpuswarm.train.data.source import ArraySource, by_split, rows_of, source_of
from tpuswarm.train.entry_point import entry_point
from tpuswarm.train.losses import Loss, in_precision
from tpuswarm.train.optimizer import check_schedule, describe_rate
from tpuswarm.train.recipe import Options, Recipe, Source, check_defaults
from tpuswarm.train.supervised_program import SupervisedProgram
from tpuswarm.train.user_code import require_call


class Supervised(Recipe):
    """A recipe from one loss; supports every option.

    - init(key) → parameters, any pytree of float32 arrays.
    - loss(params, batch, key) → the mean loss of a batch (scalar), or (loss, dict of scalar metrics); key is a typed
      PRNG key, None during evaluation. Each mean may be a Weighted(sum, weight).
    - optimizer: an optax optimizer, also one that needs the loss, such as reduce_on_plateau or lbfgs; with a schedule,
      a function of (learning_rate, decay_mask) that returns one.
    - schedule: progress (0 to 1) → learning rate; or number of updates → learning rate, such as optax's schedules or
      any function whose parameter is called `step` or `count`; or epochs, if it is called `epoch` (1.5: halfway).
    - data: a mapping of arrays with a common first axis, a Source, or a mapping or function from a split's name
      (`train`, `validation`, `test`, `all`) to either; None for a missing split.
    - defaults: run settings to use when the user sets none, such as {"steps": 400, "batch": 64}.
    - cast: float32 arrays of a batch, such as pixels, that bf16 casts to bfloat16 with the parameters. All others,
      such as targets, stay as they are.
    - float32: a regular expression; parameters whose path it matches, such as norms or the last layer, stay float32
      in bf16, and so do results computed with them.
    - micro_batches: allows computing a step part by part if memory is short. The loss of a batch must then be the mean
      of the losses of its equal parts, or Weighted; a contrastive loss is neither.
    - extra(key) → mutable state, such as the running mean and variance of BatchNorm: any pytree of arrays, made with
      the key of init. The loss is then loss(params, extra, batch, key) → (loss, (dict of metrics, extra)), and gets
      the returned extra at the next step. It gets no gradient, and evaluation discards the returned extra.

    Raises InputError for arguments of another form.
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
            if callable(optimizer):  # the program refuses any other
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
            check_schedule(self._schedule)  # computes in JAX, so not before several hosts have joined
        loss = in_precision(self.loss(options), options.precision, self._cast, self._float32)
        return SupervisedProgram(
            self._init, loss, self._optimizer, self._schedule, spec, options,
            extra=self._extra, weights=self.weights, micro_batches="accumulate" in self.forms,
            frozen=self.frozen, rows_per_epoch=getattr(source_of(self, "train"), "rows_per_epoch", None),
        )  # fmt: skip

    @functools.cached_property
    def _row(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and dtypes of one row, read once: a start makes many programs, and a stream reads from its start."""
        row = rows_of(source_of(self, "train"), 0, 1)
        return {name: jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for name, x in row.items()}

    def loss(self, options: Options) -> Loss:
        """Return the loss in float32, in the form that `compile_step` has chosen."""
        return self._loss

    def describe_rate(self, steps: int, batch: int) -> str:
        """Describe the learning rate over a run; empty if it is unknown."""
        rows = getattr(source_of(self, "train"), "rows_per_epoch", None)
        return describe_rate(self._optimizer, self._schedule, steps, rows / batch if rows else None)

    def weights(self) -> Any:
        """Return initial parameters as `Program.weights` does; None if init makes them."""
        return None

    def data(self, split: str) -> Source:
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
