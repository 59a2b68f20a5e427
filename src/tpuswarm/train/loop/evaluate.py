"""Evaluate a program's metrics, or predict, over held-out rows."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from tpuswarm.errors import InputError, first_line
from tpuswarm.train.data.feed import read_batch
from tpuswarm.train.data.source import line_of_source, reader_lock, rows_of, source_of
from tpuswarm.train.paths import by_path
from tpuswarm.train.process.terminal import echo
from tpuswarm.train.program.compiled import Placed, with_sharding
from tpuswarm.train.program.digest import is_other_program, step_digest
from tpuswarm.train.program.mesh import batch_sharding, replicated
from tpuswarm.train.program.request import Request
from tpuswarm.train.recipe import Batch, State, Weighted
from tpuswarm.train.run.loaded import LoadedRun
from tpuswarm.train.storage.folders import shown
from tpuswarm.train.user_code import blame

EVAL_BATCHES = 200
"""An evaluation during training takes at most so many batches."""


class FiniteSource(Protocol):
    """A source with a known number of rows."""

    rows_per_epoch: int

    def rows(self, start: int, count: int) -> dict[str, np.ndarray]:
        """Read rows (recipe.Source)."""
        ...


class HeldOut(NamedTuple):
    """Held-out rows, and the number that all devices evaluate at once."""

    source: FiniteSource
    batch: int


class Part(NamedTuple):
    """Rows that are evaluated at once."""

    first: int
    rows: int
    is_split: bool
    """Whether the rows are split over the devices; otherwise each device has all rows."""


def parts(rows: int, batch: int, devices: int) -> Iterator[Part]:
    """Yield all rows as whole batches, then the rest in parts that give no device more rows than a batch does.

    The parts have at most four sizes, and so need four compilations.
    """
    end = rows - rows % batch
    for first in range(0, end, batch):
        yield Part(first, batch, True)
    even = (rows - end) // devices * devices
    if even:
        yield Part(end, even, True)
    most = batch // devices
    for first in range(end + even, rows, most):
        yield Part(first, min(most, rows - first), False)


def trace_evaluation(placed: Placed, name: str, held: HeldOut, max_batches: int | None = EVAL_BATCHES) -> list[str]:
    """Trace the evaluation at each size without compiling; return the names of its metrics.

    Raise InputError for rows that differ from those of a step, and if the program fails at one of the sizes.
    """
    _require_training_layout(placed, name, held.source)
    split, whole = batch_sharding(placed.mesh), replicated(placed.mesh)
    chosen = islice(parts(held.source.rows_per_epoch, held.batch, placed.mesh.size), max_batches)
    names: list[str] = []
    fails = placed.program.failures[1].format(name)
    for part in dict.fromkeys(part._replace(first=0) for part in chosen):
        rows = with_sharding(dict(placed.program.batch_spec(part.rows)), split if part.is_split else whole)
        failure = f"{fails} over a batch of {part.rows} rows (--eval-batch)"
        if part.rows < held.batch:
            failure = (
                f"{fails} over {part.rows} rows, left of {held.source.rows_per_epoch:,} held-out ones by batches of "
                f"{held.batch}: hold out a multiple, choose another --eval-batch, or have it take any number of rows"
            )
        with blame(failure):
            names = list(placed.evaluate.trace(placed.state, rows).out_info)  # type: ignore[attr-defined]
    return names


def _require_training_layout(placed: Placed, name: str, source: FiniteSource) -> None:
    """Raise InputError, naming an array, if rows differ from a step's in names, shapes or dtypes."""
    with blame(f"the validation data of {name} failed"):
        rows = rows_of(source, 0, 1)
    found, expected = (
        {key: f"{np.dtype(array.dtype)}{list(array.shape[1:])}" for key, array in arrays.items()}
        for arrays in (rows, placed.program.batch_spec(1))
    )
    for key in sorted(found.keys() | expected.keys()):
        if found.get(key) != expected.get(key):
            raise InputError(
                f"a row of the validation data of {name} has {found.get(key, 'no')} {key}, and one of its training "
                f"data {expected.get(key, 'none')}: both need the same names, shapes and dtypes{line_of_source(source)}"
            )


def read_part(placed: Placed, source: FiniteSource, part: Part) -> Batch:
    """Return the rows of a part on the devices; raise InputError if a stream ended before its rows_per_epoch."""
    sharding = batch_sharding(placed.mesh) if part.is_split else replicated(placed.mesh)
    rows = read_batch(source, placed.program.batch_spec(part.rows), sharding, part.first)
    if (ended := getattr(source, "ended_after", None)) is not None:
        raise InputError(
            f"the stream ended after {ended:,} rows, and its rows_per_epoch is {source.rows_per_epoch:,}: an "
            f"evaluation would count rows twice; give rows_per_epoch={ended}"
        )
    return rows


def evaluate(
    placed: Placed,
    state: State,
    source: FiniteSource,
    batch: int,
    max_batches: int | None = None,
    should_leave: Callable[[], bool] = lambda: False,
    show_progress: Callable[[str], None] = lambda text: None,
    should_leave_feed: Callable[[], bool] = lambda: False,
    dispatching: Callable[[Part], AbstractContextManager[object]] = nullcontext,
) -> tuple[dict[str, float], int] | None:
    """Return the means of the metrics over the rows of the first epoch, and their number; None if told to leave.

    All rows count alike, except in a Weighted metric, which is omitted if no row counts. batch: rows at once, divisible
    by the devices; should_leave_feed: whether this host stops waiting for another thread that reads;
    dispatching: held while a part is dispatched.
    """
    chosen = list(islice(parts(source.rows_per_epoch, batch, placed.mesh.size), max_batches))
    results: list[Any] = []
    for index, part in enumerate(chosen):
        if should_leave():
            return None
        with reader_lock(source, should_leave_feed) as has_lock:  # the feed may be reading slowly
            if not has_lock:
                return None
            rows = read_part(placed, source, part)
        with dispatching(part):
            results.append(placed.evaluate(state, rows))
        if index >= 2:
            jax.block_until_ready(results[index - 2])  # at most two batches wait on the devices
            show_progress(f"{index - 1:,} of {len(chosen):,} batches")
    values, counts = jax.device_get(results), [part.rows for part in chosen]
    means = {name: _mean([value[name] for value in values], counts) for name in values[0]}
    return {name: mean for name, mean in means.items() if mean is not None}, sum(counts)


def evaluate_run(
    loaded: LoadedRun,
    split: str,
    batch: int | None = None,
    show_progress: Callable[[str], None] = lambda text: None,
) -> tuple[dict[str, float], int]:
    """Evaluate all rows of a split; batch: None uses that of the run's evaluations.

    Raise InputError for a split without an end, and NoSuchSplit.
    """
    held = _held_out(loaded, split, batch)
    if _has_another_program(loaded):
        echo(
            f"the loss, optimizer or schedule of {loaded.recipe.name} has changed since {shown(loaded.folder)} was "
            "trained; it is evaluated with the new one",
            err=True,
        )
    trace_evaluation(loaded.placed, loaded.recipe.name, held, None)
    found = evaluate(loaded.placed, loaded.state, *held, show_progress=show_progress)
    assert found is not None
    return found


def _has_another_program(loaded: LoadedRun) -> bool:
    if not (recorded := loaded.config.get("program")):
        return False
    train, platform = loaded.config["train"], loaded.config["chosen"]["platform"]
    names = ("batch", "precision", "clip", "freeze", "decay", "ema")
    request = Request(**{name: train.get(name) for name in names})
    return is_other_program(recorded, step_digest(loaded.recipe, request, platform))


def predict_run(loaded: LoadedRun, function: Callable[..., Any], split: str, batch: int | None = None) -> Any:
    """Return the results of a user's function for all rows of a split, in the data's order (Trainer.predict).

    Raise InputError as in `evaluate_run`, and if the function fails or returns another number of rows.
    """
    source, batch = _held_out(loaded, split, batch)
    row_numbers = _row_numbers(source)
    placed, results = loaded.placed, list[Any]()
    _require_training_layout(placed, loaded.recipe.name, source)
    call = placed.predict(function)
    for part in parts(source.rows_per_epoch, batch, placed.mesh.size):
        rows = read_part(placed, source, part)
        fails = f"the function fails over a batch of {part.rows} rows"
        try:
            with blame(fails):
                results.append(jax.device_get(call(loaded.state, rows)))
            arrays = by_path(jax.tree.map(np.asarray, results[-1]))
        except TypeError as error:  # a library's error, or a result without arrays
            raise InputError(f"{fails}: {first_line(error)}") from error
        for path, array in arrays.items():
            if array.shape[:1] != (part.rows,):
                raise _wrong_first_axis(path, array.shape, part.rows)
        if len(results) == 1:
            _require_row_axis(call, loaded.state, placed.program.batch_spec(part.rows + 1), part.rows)
    order = None if row_numbers is None else np.argsort(row_numbers(0, source.rows_per_epoch))

    def concatenate(*arrays: np.ndarray) -> np.ndarray:
        rows = np.concatenate(arrays)
        return rows if order is None else rows[order]

    return jax.tree.map(concatenate, *results)


def _require_row_axis(call: Callable[..., Any], state: State, spec: Mapping[str, Any], before: int) -> None:
    """Raise InputError if an array's first axis does not grow with one more row, as in a sum over rows."""
    try:
        shapes = jax.eval_shape(call, state, dict(spec))
    except Exception:  # noqa: BLE001  # the function may accept one size only
        return
    for path, array in by_path(shapes).items():
        if array.shape[0] == before:
            raise _wrong_first_axis(path, array.shape, before + 1)


def _wrong_first_axis(path: str, shape: Sequence[int], rows: int) -> InputError:
    array = f"{path or 'an array'} of shape {tuple(shape)}"
    return InputError(f"the function gives {array} for {rows} rows: its first axis has to be those")


def _row_numbers(source: Any) -> Callable[[int, int], np.ndarray] | None:
    """Return `source.row_numbers`; raise InputError if a subclass overrides only `rows`."""
    classes = type(source).__mro__
    rows_owner, numbers_owner = (
        next((index for index, cls in enumerate(classes) if name in vars(cls)), len(classes))
        for name in ("rows", "row_numbers")
    )
    if rows_owner < numbers_owner < len(classes):
        raise InputError(
            f"{type(source).__name__} has rows of its own and row_numbers of {classes[numbers_owner].__name__}: give "
            "it row_numbers(start, count), which rows of the data they are, so that predictions come in the data's "
            "order"
        )
    return getattr(source, "row_numbers", None)


def _held_out(loaded: LoadedRun, split: str, batch: int | None) -> HeldOut:
    with blame(f"the data of {loaded.recipe.name} failed"):
        source: Any = source_of(loaded.recipe, split)
    if getattr(source, "rows_per_epoch", None) is None:
        raise InputError(f"the data of {loaded.recipe.name} has no rows_per_epoch, so evaluation would never end")
    devices = loaded.placed.mesh.size
    if batch is None:
        micro_batch = loaded.config["train"]["batch"] // loaded.config.get("chosen", {}).get("micro_batches", 1)
        batch = loaded.config.get("may_change", {}).get("eval_batch") or micro_batch
    return HeldOut(source, -(-batch // devices) * devices)


def _mean(values: Sequence[Any], counts: Sequence[int]) -> float | None:
    """Return the mean of a metric from its values for all parts; None if no row counts."""
    if isinstance(values[0], Weighted):
        total, weight = np.sum(np.asarray(values, np.float64), axis=0)
        return None if weight == 0 else float(total / weight)
    return float(np.average(np.asarray(values, np.float64), weights=counts))
