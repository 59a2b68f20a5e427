"""A complete recipe from one loss function; supports every option."""

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
from tpuswarm.train.losses import (
    Loss,
    in_precision,
)
from tpuswarm.train.optional import check_defaults
from tpuswarm.train.recipe import (
    Options,
    Recipe,
    Source,
)
from tpuswarm.train.schedule import check_schedule
from tpuswarm.train.supervised_program import SupervisedProgram
from tpuswarm.train.user_code import require_call


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
