"""Hooks: the user's functions that a run calls between its steps."""

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
from tpuswarm.train.paths import by_path
from tpuswarm.train.recipe import Recipe, State
from tpuswarm.train.run.best import Best
from tpuswarm.train.user_code import blame, line_of, require_call


class Step(NamedTuple):
    """A row of metrics.jsonl and a state, for hooks and for the user's loop.

    The row of an update has step, tokens, loss, …; the row of an evaluation has step and eval_loss. In a loop the
    devices run ahead: `state` belongs to the row's step or to the next one. It is valid until the next step is
    requested.
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
    ReduceOnPlateau can use them. Other values are ignored, with a note.

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
    """Counts evaluations without improvement.

    metric: `eval_loss`, or `eval_accuracy:max` if the highest is best; least: a smaller step is no improvement. A
    process that resumes the run starts to count again.
    """

    def __init__(self, metric: str = "eval_loss", patience: int = 3, least: float = 0.0):
        check_number(patience, "patience", least=1)
        check_number(least, "least", least=0)
        self._metric, self._patience, self._least = metric, patience, least
        self.reset()

    def reset(self) -> None:
        self._best, self._without_improvement = Best(self._metric), 0

    def require_metric(self, names: Collection[str]) -> None:
        """Raise InputError if the metric is not among the names."""
        self._best.require(names)

    def is_exhausted(self, step: Step) -> bool:
        """Count an evaluation; return whether it is the last of `patience` without improvement."""
        self._best.require(step.row)
        if not self._best.has(step.row):
            return False
        is_better = self._best.update(step.row, self._least)
        self._without_improvement = 0 if is_better else self._without_improvement + 1
        return self._without_improvement == self._patience


@entry_point
class EarlyStopping(Patience):
    """`Every("evaluation", EarlyStopping())` ends the run after `patience` evaluations without a better value."""

    def __call__(self, step: Step) -> Stop | None:
        """Count one evaluation."""
        if not self.is_exhausted(step):
            return None
        return Stop(f"{self._metric} was no better in {self._patience} evaluations than at step {self._best.step}")


@entry_point
class ReduceOnPlateau(Patience):
    """`Every("evaluation", ReduceOnPlateau())`: multiplies the rate by `factor` when EarlyStopping would stop.

    Then it counts again, from the best value so far.
    """

    def __init__(self, metric: str = "eval_loss", factor: float = 0.1, patience: int = 3, least: float = 0.0):
        super().__init__(metric, patience, least)
        check_number(factor, "factor", above=0, most=1)
        self._factor = factor

    def __call__(self, step: Step) -> ScaleLearningRate | None:
        """Count one evaluation."""
        if not self.is_exhausted(step):
            return None
        self._without_improvement = 0
        return ScaleLearningRate(self._factor)


class Hooks:
    """The hooks of a run, and their last calls."""

    def __init__(self, hooks: Iterable[Every], more: Iterable[Every] = ()):
        """Raise InputError for a hook without Every, with a wrong interval, or that does not take a Step."""
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
                hook.call.reset()
        self._hooks = [(_interval(hook.every), hook.call) for hook in hooks]
        self._call_times = [time.monotonic()] * len(self._hooks)
        self._call_steps = [-1] * len(self._hooks)

    def require_metrics(self, names: Collection[str]) -> None:
        """Raise InputError if a hook reads a metric that is not among the names."""
        for _, call in self._hooks:
            if isinstance(call, Patience):
                call.require_metric(names)

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
        return [
            index
            for index, ((interval, _), last) in enumerate(zip(self._hooks, self._call_times, strict=True))
            if interval is not None and interval.due(step, now - last)
        ]

    def with_evaluation_hooks(self, due: Sequence[int] = ()) -> list[int]:
        """Return the indices `due` and the indices of the hooks of evaluations."""
        return [index for index, (interval, _) in enumerate(self._hooks) if interval is None or index in due]

    def due_at_end(self, step: int, is_evaluated: bool) -> list[int]:
        """Return the indices of the hooks that have not seen the last row of a run.

        is_evaluated: the row has changed since the hooks of this step were called.
        """
        return [index for index, last in enumerate(self._call_steps) if is_evaluated or last != step]

    def counts_evaluations(self, index: int) -> bool:
        """Return whether a hook counts evaluations. It is called last, since it reads the numbers of other hooks."""
        return isinstance(self._hooks[index][1], Patience)

    def call(self, index: int, row: Mapping[str, Any], state: State) -> Any:
        """Call a hook; return a figure as a picture, and numbers under their names in rows.

        Raise InputError with the hook's line if it fails or returns something unusable.
        """
        interval, function = self._hooks[index]
        self._call_times[index], self._call_steps[index] = time.monotonic(), row["step"]
        state_copy = copy_containers(state)
        with blame(f"a hook failed at step {row['step']}", every_error=True):
            returned = function(Step(dict(row), state_copy))
        require_unchanged(state_copy, state)
        self._call_times[index] = time.monotonic()
        try:
            result = _convert_result(returned)
            return _name_columns(result, interval is None) if isinstance(result, Mapping) else result
        except InputError as error:
            raise InputError(f"{error}{line_of(function)}") from None
        except Exception as error:  # from any library that made the value
            raise InputError(
                f"a hook returned a {type(returned).__name__} that cannot be used: {first_line(error)}"
                f"{line_of(function)}"
            ) from error

    def ignored(self, index: int, result: Any) -> str:
        """Return a sentence about a hook's result that nothing uses; empty for any other."""
        is_used = result is None or isinstance(result, str | Mapping | Stop | ScaleLearningRate)
        if is_used or len(getattr(result, "shape", ())) == 3:
            return ""
        return (
            f"a hook returned a {type(result).__name__}, which is ignored: return a text, a picture, a dict of "
            f"numbers, a Stop or a ScaleLearningRate{line_of(self._hooks[index][1])}"
        )


def merge_numbers(numbers: dict[str, Any], returned: Any, columns: Collection[str]) -> None:
    """Add a hook's numbers to the numbers of other hooks; raise InputError for a duplicate name."""
    for name, value in returned.items() if isinstance(returned, Mapping) else ():
        if name in numbers or name in columns:
            owner = "another hook's" if name in numbers else "a column of rows already"
            raise InputError(f"a hook returned a number called {name}, which is {owner}: rename it")
        numbers[name] = value


def _name_columns(numbers: Mapping[str, Any], is_evaluation: bool) -> dict[str, Any]:
    if is_evaluation:
        return {f"eval_{name.removeprefix('eval_')}": value for name, value in numbers.items()}
    if wrong := next((name for name in numbers if name.startswith("eval_")), None):
        raise InputError(f'a hook returned {wrong}: numbers of evaluations are for hooks of Every("{EVALUATION}", …)')
    return dict(numbers)


def recipe_hooks(recipe: Recipe) -> list[Every]:
    require_call(recipe.hooks, "hooks")
    with blame(f"hooks of {recipe.name} fails"):
        hooks = recipe.hooks()
    if isinstance(hooks, Every) or not isinstance(hooks, list | tuple):
        raise InputError(f"hooks of {recipe.name} returns a {type(hooks).__name__}, not a list of Every")
    return list(hooks)


def copy_containers(state: State) -> State:
    """Copy the dicts and lists of a state, not its arrays: user code may change its copy without effect."""
    return jax.tree.map(lambda leaf: leaf, state)


def require_unchanged(copied: State, state: State) -> None:
    """Raise InputError, naming an array, if user code has replaced arrays in its copy of a state."""
    leaves = jax.tree.leaves(copied), jax.tree.leaves(state)
    if len(leaves[0]) == len(leaves[1]) and all(map(operator.is_, *leaves)):
        return
    now, before = by_path(copied), by_path(state)
    for path in sorted(now.keys() | before.keys()):
        if now.get(path) is not before.get(path):
            raise InputError(
                f"a hook or a loop must not change the state, and it replaced {path}: to change the learning rate, "
                "return ScaleLearningRate(factor) or use ReduceOnPlateau"
            )


def _convert_result(returned: Any) -> Any:
    """Convert a hook's result: a figure to a picture, numbers to floats, or to None if they are not finite.

    Raise InputError for a three-dimensional array that is no picture, a bad factor, or a dict with other values.
    """
    if isinstance(returned, ScaleLearningRate):
        check_number(returned.factor, "the factor of ScaleLearningRate", above=0)
    if isinstance(returned, Mapping):
        return {name: _to_number(name, value) for name, value in returned.items()}
    if hasattr(returned, "savefig"):
        return to_picture(returned)
    shape: tuple[int, ...] = getattr(returned, "shape", ())
    dtype = getattr(returned, "dtype", None)
    if len(shape) == 3 and not (dtype == np.uint8 and shape[2] == 3 and math.prod(shape)):
        raise InputError(f"a hook returned {dtype} {shape}: a picture is uint8 (height, width, 3)")
    return returned


def _to_number(name: Any, value: Any) -> float | None:
    array = np.asarray(value)
    if not isinstance(name, str) or array.shape or array.dtype.kind not in "biufV":  # V: bfloat16
        raise InputError(f"a hook returned a dict with {name!r}: {value!r}; in a dict of a hook are names and numbers")
    number = float(array)
    return number if math.isfinite(number) else None


def _interval(every: int | str) -> Interval | None:
    return None if every == EVALUATION else parse_every(every, "a hook's every")
