"""Hooks: a user's functions that a run calls between its steps."""

import math
import operator
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from tpuswarm.config.units import Interval, check_number, parse_every
from tpuswarm.errors import InputError, first_line
from tpuswarm.train.entry_point import entry_point
from tpuswarm.train.look.pictures import to_picture
from tpuswarm.train.optional import HasHooks
from tpuswarm.train.paths import by_path
from tpuswarm.train.recipe import Recipe, State
from tpuswarm.train.run.best import Best
from tpuswarm.train.user_code import blame, line_of, require_call


class Step(NamedTuple):
    """A row of metrics.jsonl and a state: a training loop yields it, and hooks get it.

    The row of an update has step, tokens, loss, …; that of an evaluation has step and eval_loss. In a loop the devices
    run ahead: `state` is of the row's step or of the next one. It is valid until the next step is requested.
    """

    row: dict[str, Any]
    state: State


EVALUATION = "evaluation"


class Stop(NamedTuple):
    """A hook returns it to finish the run at this step."""

    reason: str


class Every(NamedTuple):
    """`call(step)` every so many steps (100), after so much time ("5m") or each "evaluation", and at the run's end.

    The function may return a Stop, a ScaleLearningRate, a text for the report and the screen, a picture (uint8 of shape
    (height, width, 3), or a matplotlib Figure) for the run's folder and TensorBoard, or a dict of numbers, which become
    a row of metrics.jsonl. Numbers of an "evaluation" go into its row, under `eval_NAME`; keep_best, EarlyStopping and
    ReduceOnPlateau can use them. Other values are ignored.

    Its Step has the row of the newest update, with the metrics of the newest evaluation, and the state after that
    update, which is valid until the function returns. On several hosts each calls it.
    """

    every: int | str
    call: Callable[[Step], Any]


class ScaleLearningRate(NamedTuple):
    """A hook returns it to multiply the learning rate from this step on, also in a resumed run.

    For recipes of `supervised`. An optimizer that was made with its learning rate gets its updates multiplied.
    """

    factor: float


class Patience:
    """Counts evaluations without a better figure.

    metric: `eval_loss`, or `eval_accuracy:max` where the highest is best; least: a smaller step is no improvement. A
    process that resumes the run counts anew.
    """

    def __init__(self, metric: str = "eval_loss", patience: int = 3, least: float = 0.0):
        check_number(patience, "patience", least=1)
        check_number(least, "least", least=0)
        self._metric, self._patience, self._least = metric, patience, least
        self.begin()

    def begin(self) -> None:
        """Count anew, as for each run that it is a hook of."""
        self._best, self._waited = Best(self._metric), 0

    def require(self, names: Collection[str]) -> None:
        """Raise InputError where the metric is not among these, the figures of a run."""
        self._best.require(names)

    def ran_out(self, step: Step) -> bool:
        """Whether an evaluation is the last of `patience` without a better figure; InputError where it lacks it."""
        self._best.require(step.row)
        if not self._best.has(step.row):
            return False
        self._waited = 0 if self._best.better(step.row, self._least) else self._waited + 1
        return self._waited == self._patience


@entry_point
class EarlyStopping(Patience):
    """`Every("evaluation", EarlyStopping())` ends the run after `patience` evaluations without a better value."""

    def __call__(self, step: Step) -> Stop | None:
        """Look at one evaluation."""
        if not self.ran_out(step):
            return None
        return Stop(f"{self._metric} was no better in {self._patience} evaluations than at step {self._best.step}")


@entry_point
class ReduceOnPlateau(Patience):
    """`Every("evaluation", ReduceOnPlateau())`: multiplies the rate by `factor` where EarlyStopping would stop.

    It then counts anew, from the best figure so far.
    """

    def __init__(self, metric: str = "eval_loss", factor: float = 0.1, patience: int = 3, least: float = 0.0):
        super().__init__(metric, patience, least)
        check_number(factor, "factor", above=0, most=1)
        self._factor = factor

    def __call__(self, step: Step) -> ScaleLearningRate | None:
        """Look at one evaluation."""
        if not self.ran_out(step):
            return None
        self._waited = 0
        return ScaleLearningRate(self._factor)


class Hooks:
    """The hooks of a run, and when each was called last."""

    def __init__(self, hooks: Iterable[Every], more: Iterable[Every] = ()):
        """InputError for a hook that is no Every, has a wrong interval, or cannot be called with a Step."""
        if isinstance(hooks, Every):
            raise InputError("hooks are given as a list, [Every(100, function)]")
        hooks = [*hooks, *more]
        for hook in hooks:
            if not isinstance(hook, Every):
                raise InputError(f"hooks are given as [Every(100, function)], not as a {type(hook).__name__}")
            require_call(hook.call, "hook", "step")
            if isinstance(hook.call, Patience):
                if hook.every != EVALUATION:
                    name = type(hook.call).__name__
                    raise InputError(
                        f'{name} counts evaluations: give it as Every("{EVALUATION}", {name}()), not as '
                        f"Every({hook.every!r}, …); eval_every says how often they are"
                    )
                hook.call.begin()
        self._hooks = [(_interval(hook.every), hook.call) for hook in hooks]
        self._called = [time.monotonic()] * len(self._hooks)
        self._called_at = [-1] * len(self._hooks)
        """Step of each one's last call."""

    def require(self, names: Collection[str]) -> None:
        """Raise InputError if a hook reads a metric that is not among `names`."""
        for _, call in self._hooks:
            if isinstance(call, Patience):
                call.require(names)

    @property
    def can_add_metrics(self) -> bool:
        """Whether a hook of evaluations may return more metrics."""
        return any(interval is None and not isinstance(call, Patience) for interval, call in self._hooks)

    @property
    def scale_learning_rate(self) -> bool:
        """Whether a hook is a ReduceOnPlateau."""
        return any(isinstance(call, ReduceOnPlateau) for _, call in self._hooks)

    def due(self, step: int) -> list[int]:
        """Return the indices of the hooks that are due at a step."""
        now = time.monotonic()
        last = enumerate(zip(self._hooks, self._called, strict=True))
        return [index for index, ((interval, _), at) in last if interval is not None and interval.due(step, now - at)]

    def evaluated(self, due: Sequence[int] = ()) -> list[int]:
        """Return the indices `due` and those of the hooks of evaluations."""
        return [index for index, (interval, _) in enumerate(self._hooks) if interval is None or index in due]

    def last(self, step: int, evaluated: bool) -> list[int]:
        """Return the indices of the hooks to call at the end of a run: all that have not seen its last row.

        evaluated: the row has changed since the hooks of this step were called.
        """
        return [index for index, at in enumerate(self._called_at) if evaluated or at != step]

    def counts(self, index: int) -> bool:
        """Whether a hook counts evaluations. Such hooks are called last, since they read the numbers of others."""
        return isinstance(self._hooks[index][1], Patience)

    def call(self, index: int, row: Mapping[str, Any], state: State) -> Any:
        """Call a hook; return a figure as a picture, and numbers under the names that they have in rows.

        InputError with the hook's line if it fails or returns something unusable.
        """
        interval, function = self._hooks[index]
        given = copy_containers(state)
        with blame(f"a hook failed at step {row['step']}"):
            returned = function(Step(dict(row), given))
        require_unchanged(given, state)
        self._called[index], self._called_at[index] = time.monotonic(), row["step"]
        try:
            found = _required(returned)
            return _in_rows(found, interval is None) if isinstance(found, Mapping) else found
        except InputError as error:
            raise InputError(f"{error}{line_of(function)}") from None
        except Exception as error:  # from whatever library made the value
            raise InputError(
                f"a hook returned a {type(returned).__name__} that cannot be used: {first_line(error)}"
                f"{line_of(function)}"
            ) from error


def add_numbers(numbers: dict[str, Any], returned: Any, names: Collection[str]) -> None:
    """Add a hook's numbers to those of other hooks; InputError for a name that is taken."""
    for name, value in returned.items() if isinstance(returned, Mapping) else ():
        if name in numbers or name in names:
            whose = "another hook's" if name in numbers else "a column of rows already"
            raise InputError(f"a hook returned a number called {name}, which is {whose}: rename it")
        numbers[name] = value


def _in_rows(numbers: Mapping[str, Any], of_evaluation: bool) -> dict[str, Any]:
    """Numbers of a hook under the names that they have in rows."""
    if of_evaluation:
        return {f"eval_{name.removeprefix('eval_')}": value for name, value in numbers.items()}
    if wrong := next((name for name in numbers if name.startswith("eval_")), None):
        raise InputError(f'a hook returned {wrong}: numbers of evaluations are for hooks of Every("{EVALUATION}", …)')
    return dict(numbers)


def hooks_of(recipe: Recipe) -> list[Every]:
    """The hooks that a recipe brings."""
    if not isinstance(recipe, HasHooks):
        return []
    require_call(recipe.hooks, "hooks")
    with blame(f"hooks of {recipe.name} fails"):
        found = recipe.hooks()
    if isinstance(found, Every) or not isinstance(found, list | tuple):
        raise InputError(f"hooks of {recipe.name} returns a {type(found).__name__}, not a list of Every")
    return list(found)


def copy_containers(state: State) -> State:
    """Copy the dicts and lists of a state, not its arrays: user code may change its copy without effect."""
    return jax.tree.map(lambda leaf: leaf, state)


def require_unchanged(given: State, state: State) -> None:
    """Raise InputError, naming the first, where the user's code has replaced arrays in its copy of a state."""
    leaves = jax.tree.leaves(given), jax.tree.leaves(state)
    if len(leaves[0]) == len(leaves[1]) and all(map(operator.is_, *leaves)):
        return
    now, before = by_path(given), by_path(state)
    for path in sorted(now.keys() | before.keys()):
        if now.get(path) is not before.get(path):
            raise InputError(
                f"a hook or a loop must not change the state, and it replaced {path}: to change the learning rate, "
                "return ScaleLearningRate(factor) or use ReduceOnPlateau"
            )


def _required(returned: Any) -> Any:
    """Convert what a hook returned: a figure to a picture, numbers to floats, or to None if they are not finite.

    InputError for a three-dimensional array that is no picture, a bad factor, or a dict with anything but numbers.
    """
    if isinstance(returned, ScaleLearningRate):
        check_number(returned.factor, "the factor of ScaleLearningRate", above=0)
    if isinstance(returned, Mapping):
        return {name: _number(name, value) for name, value in returned.items()}
    if hasattr(returned, "savefig"):
        return to_picture(returned)
    shape: tuple[int, ...] = getattr(returned, "shape", ())
    dtype = getattr(returned, "dtype", None)
    if len(shape) == 3 and not (dtype == np.uint8 and shape[2] == 3 and math.prod(shape)):
        raise InputError(f"a hook returned {dtype} {shape}: a picture is uint8 (height, width, 3)")
    return returned


def _number(name: Any, value: Any) -> float | None:
    array = np.asarray(value)
    if not isinstance(name, str) or array.shape or array.dtype.kind not in "biufV":  # V: bfloat16
        raise InputError(f"a hook returned a dict with {name!r}: {value!r}; in a dict of a hook are names and numbers")
    number = float(array)
    return number if math.isfinite(number) else None


def _interval(every: int | str) -> Interval | None:
    """Return the interval of a hook; None for a hook of evaluations."""
    return None if every == EVALUATION else parse_every(every, "a hook's every")
