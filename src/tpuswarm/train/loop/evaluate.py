"""The mean of a program's metrics over held-out rows."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from tpuswarm.errors import InputError, first_line
from tpuswarm.train.data.feed import read_batch
from tpuswarm.train.data.source import reader_lock, rows_of, source_of
from tpuswarm.train.paths import by_path
from tpuswarm.train.process.terminal import echo
from tpuswarm.train.program.compiled import Placed, with_sharding
from tpuswarm.train.program.digest import is_another, step_digest
from tpuswarm.train.program.mesh import batch_sharding, replicated
from tpuswarm.train.program.request import Request
from tpuswarm.train.recipe import State, Weighted
from tpuswarm.train.run.loaded import LoadedRun
from tpuswarm.train.storage.folders import shown
from tpuswarm.train.user_code import blame

EVAL_BATCHES = 200
"""An evaluation during training takes at most this many batches of the held-out rows."""


class FiniteSource(Protocol):
    """A source that says how many rows an epoch has."""

    rows_per_epoch: int

    def rows(self, start: int, count: int) -> dict[str, np.ndarray]:
        """See recipe.Source."""
        ...


class HeldOut(NamedTuple):
    """Held-out rows, and the number that all devices evaluate at once."""

    source: FiniteSource
    batch: int


class Part(NamedTuple):
    """Rows that are evaluated at once."""

    first: int
    rows: int
    split: bool
    """Whether the rows are split over the devices; otherwise each device has all of them."""


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


def rehearse(placed: Placed, name: str, held: HeldOut, most_batches: int | None = EVAL_BATCHES) -> list[str]:
    """Trace the evaluation at each size that it will have, without compiling; return the names of its metrics.

    InputError for rows that differ from those of a step, and if the program fails at one of the sizes.
    """
    _require_same(placed, name, held.source)
    split, whole = batch_sharding(placed.mesh), replicated(placed.mesh)
    every = islice(parts(held.source.rows_per_epoch, held.batch, placed.mesh.size), most_batches)
    names: list[str] = []
    fails = placed.program.failures[1].format(name)
    for part in dict.fromkeys(part._replace(first=0) for part in every):
        rows = with_sharding(dict(placed.program.batch_spec(part.rows)), split if part.split else whole)
        what = f"{fails} over a batch of {part.rows} rows (--eval-batch)"
        if part.rows < held.batch:
            what = (
                f"{fails} over {part.rows} rows, left of {held.source.rows_per_epoch:,} held-out ones by batches of "
                f"{held.batch}: hold out a multiple, choose another --eval-batch, or have it take any number of rows"
            )
        with blame(what):
            names = list(placed.evaluate.trace(placed.state, rows).out_info)  # type: ignore[attr-defined]
    return names


def _require_whole(source: FiniteSource) -> None:
    """Raise InputError for a stream that has begun anew before its rows_per_epoch."""
    if (ended := getattr(source, "ended_after", None)) is not None:
        raise InputError(
            f"the stream ended after {ended:,} rows, and its rows_per_epoch is {source.rows_per_epoch:,}: an "
            f"evaluation would count rows twice; give rows_per_epoch={ended}"
        )


def _require_same(placed: Placed, name: str, source: FiniteSource) -> None:
    """Raise InputError, naming the first that differs, for rows of other names, shapes or dtypes than a step takes."""
    with blame(f"the validation data of {name} failed"):
        rows = rows_of(source, 0, 1)
    there, here = (
        {key: f"{np.dtype(each.dtype)}{list(each.shape[1:])}" for key, each in found.items()}
        for found in (rows, placed.program.batch_spec(1))
    )
    for key in sorted(there.keys() | here.keys()):
        if there.get(key) != here.get(key):
            raise InputError(
                f"a row of the validation data of {name} has {there.get(key, 'no')} {key}, and one of its training "
                f"data {here.get(key, 'none')}: both need the same names, shapes and dtypes"
            )


def evaluate(
    placed: Placed,
    state: State,
    source: FiniteSource,
    batch: int,
    most_batches: int | None = None,
    leave: Callable[[], bool] = lambda: False,
    far: Callable[[str], None] = lambda text: None,
    leaves_feed: Callable[[], bool] = lambda: False,
) -> tuple[dict[str, float], int] | None:
    """Return the means of the metrics over the rows of the first epoch, and their number; None if told to leave.

    Every row counts the same, except in a Weighted metric, which is left out if no row counts. batch: rows at once,
    divisible by the devices; far: is told the progress; leaves_feed: whether this host stops waiting for another thread
    that reads.
    """
    every = list(islice(parts(source.rows_per_epoch, batch, placed.mesh.size), most_batches))
    split, whole = batch_sharding(placed.mesh), replicated(placed.mesh)
    found: list[Any] = []
    for index, part in enumerate(every):
        if leave():
            return None
        spec = placed.program.batch_spec(part.rows)
        with reader_lock(leaves_feed) as is_alone:  # the feed may be in the middle of a slow read
            if not is_alone:
                return None
            rows = read_batch(source, spec, split if part.split else whole, part.first)
        _require_whole(source)
        found.append(placed.evaluate(state, rows))
        if index >= 2:
            jax.block_until_ready(found[index - 2])  # at most two batches wait on the devices
            far(f"{index - 1:,} of {len(every):,} batches")
    values, counts = jax.device_get(found), [part.rows for part in every]
    means = {name: _mean([value[name] for value in values], counts) for name in values[0]}
    return {name: mean for name, mean in means.items() if mean is not None}, sum(counts)


def evaluate_run(
    loaded: LoadedRun, split: str, batch: int | None = None, far: Callable[[str], None] = lambda text: None
) -> tuple[dict[str, float], int]:
    """Evaluate all rows of a split; batch: None is that of the run's own evaluations.

    InputError for a split without an end, and NoSuchSplit.
    """
    held = _held_out(loaded, split, batch)
    if _has_another_program(loaded):
        echo(
            f"the loss, optimizer or schedule of {loaded.recipe.name} has changed since {shown(loaded.folder)} was "
            "trained; it is evaluated with the new one",
            err=True,
        )
    rehearse(loaded.placed, loaded.recipe.name, held, None)
    found = evaluate(loaded.placed, loaded.state, *held, far=far)
    assert found is not None
    return found


def _has_another_program(loaded: LoadedRun) -> bool:
    if not (recorded := loaded.config.get("program")):
        return False
    train, platform = loaded.config["train"], loaded.config["chosen"]["platform"]
    names = ("batch", "precision", "clip", "freeze", "decay", "ema")
    request = Request(**{name: train.get(name) for name in names})
    return is_another(recorded, step_digest(loaded.recipe, request, platform))


def predict_run(loaded: LoadedRun, function: Callable[..., Any], split: str, batch: int | None = None) -> Any:
    """Return what a user's function gives for all rows of a split, see `Trainer.predict`.

    InputError as in `evaluate_run`, and if the function fails or gives another number of rows.
    """
    source, batch = _held_out(loaded, split, batch)
    numbers = _row_numbers(source)
    placed, found = loaded.placed, list[Any]()
    _require_same(placed, loaded.recipe.name, source)
    call, split_over, whole = placed.predict(function), batch_sharding(placed.mesh), replicated(placed.mesh)
    for part in parts(source.rows_per_epoch, batch, placed.mesh.size):
        spec = placed.program.batch_spec(part.rows)
        rows = read_batch(source, spec, split_over if part.split else whole, part.first)
        _require_whole(source)
        fails = f"the function fails over a batch of {part.rows} rows"
        try:
            with blame(fails):
                found.append(jax.device_get(call(loaded.state, rows)))
            arrays = by_path(jax.tree.map(np.asarray, found[-1]))
        except TypeError as error:  # from a library's function, or a result that is no array
            raise InputError(f"{fails}: {first_line(error)}") from error
        for path, array in arrays.items():
            if array.shape[:1] != (part.rows,):
                raise _not_by_row(path, array.shape, part.rows)
        if len(found) == 1:
            _require_by_row(call, loaded.state, placed.program.batch_spec(part.rows + 1), part.rows)
    order = None if numbers is None else np.argsort(numbers(0, source.rows_per_epoch))

    def joined(*arrays: np.ndarray) -> np.ndarray:
        rows = np.concatenate(arrays)
        return rows if order is None else rows[order]

    return jax.tree.map(joined, *found)


def _require_by_row(call: Callable[..., Any], state: State, spec: Mapping[str, Any], before: int) -> None:
    """Raise InputError if an array's first axis does not grow with one more row, as in a sum over rows."""
    try:
        shapes = jax.eval_shape(call, state, dict(spec))
    except Exception:  # noqa: BLE001  # a function for one size of batches alone
        return
    for path, array in by_path(shapes).items():
        if array.shape[0] == before:
            raise _not_by_row(path, array.shape, before + 1)


def _not_by_row(path: str, shape: Sequence[int], rows: int) -> InputError:
    what = f"{path or 'an array'} of shape {tuple(shape)}"
    return InputError(f"the function gives {what} for {rows} rows: its first axis has to be those")


def _row_numbers(source: Any) -> Callable[[int, int], np.ndarray] | None:
    """`source.row_numbers`; InputError where it may not be about what `source.rows` gives."""
    order = type(source).__mro__
    of_rows, of_numbers = (
        next((index for index, each in enumerate(order) if name in vars(each)), len(order))
        for name in ("rows", "row_numbers")
    )
    if of_rows < of_numbers < len(order):
        raise InputError(
            f"{type(source).__name__} has rows of its own and row_numbers of {order[of_numbers].__name__}: give it "
            "row_numbers(start, count), which rows of the data they are, so that predictions come in the data's order"
        )
    return getattr(source, "row_numbers", None)


def _held_out(loaded: LoadedRun, split: str, batch: int | None) -> HeldOut:
    """The rows of a split; InputError where they have no end."""
    with blame(f"the data of {loaded.recipe.name} failed"):
        source: Any = source_of(loaded.recipe, split)
    if getattr(source, "rows_per_epoch", None) is None:
        raise InputError(f"the data of {loaded.recipe.name} has no rows_per_epoch, so evaluation would never end")
    devices = loaded.placed.mesh.size
    own = loaded.config.get("may_change", {}).get("eval_batch")
    micro = loaded.config["train"]["batch"] // loaded.config.get("chosen", {}).get("micro_batches", 1)
    return HeldOut(source, -(-(batch if batch is not None else own or micro) // devices) * devices)


def _mean(values: Sequence[Any], counts: Sequence[int]) -> float | None:
    """Return the mean of a metric from its values for all parts; None if no row counts."""
    if isinstance(values[0], Weighted):
        total, weight = np.sum(np.asarray(values, np.float64), axis=0)
        return None if weight == 0 else float(total / weight)
    return float(np.average(np.asarray(values, np.float64), weights=counts))
