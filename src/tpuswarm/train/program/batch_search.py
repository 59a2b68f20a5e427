"""Find a batch that fits by compiling, for these devices (`--batch auto`) or for a described TPU (plan)."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any, NamedTuple

from tpuswarm.errors import InputError
from tpuswarm.train.program.compiled import (
    Compiled,
    CompilerRefused,
    DoesNotFit,
    TooLarge,
    compile_step,
    compile_traced,
    device_memory,
    local_device,
    trace,
)
from tpuswarm.train.program.request import Request, default_request
from tpuswarm.train.recipe import Recipe

AUTO = "auto"
MAX_ROWS = 2**20
"""Largest number of rows per device to try."""
SIGNIFICANT_BITS = 4
"""Sizes to try are 1 to 16, then larger ones in steps of an eighth to a sixteenth."""
MAX_GROWTH_FACTOR = 64
"""From the largest size that fits to the next one to try."""


def largest_batch(recipe: Recipe, asked: Mapping[str, Any], devices: Sequence[Any], log: Callable[[str], None]) -> int:
    """Return the rows of the largest step that fits; InputError for a CPU and for devices that hide their memory."""
    kind = devices[0].device_kind
    if devices[0].platform == "cpu":
        raise InputError(f"--batch auto fills the memory of devices, and {kind} shares the machine's: give a number")
    memory = device_memory(local_device(devices))
    if memory is None:
        raise InputError(f"{kind} does not say how much memory it has: give --batch a number")
    names = set(Request.__dataclass_fields__) - {"batch"}
    request = default_request(recipe, **{name: asked[name] for name in names & asked.keys()})
    found, _ = BatchSearch(recipe, request, devices, memory, log).find_largest()
    return found.batch


class CompiledBatch(NamedTuple):
    """A step compiled for a batch; rows: of one micro-batch on one device."""

    rows: int
    batch: int
    compiled: Compiled


class BatchSearch:
    """Compile one program for the same devices with several batches.

    memory: bytes of one device; log is called with a line for each compilation.
    """

    def __init__(
        self, recipe: Recipe, request: Request, devices: Sequence[Any], memory: int, log: Callable[[str], None]
    ):
        self._recipe, self._request, self._devices, self._memory, self._log = recipe, request, devices, memory, log
        self._micro_batches = request.accumulate or 1
        self.compilations = 0
        self._fits: int | None = None
        """Most rows per device that are known to fit."""
        self._too_many: int | None = None

    def _log_attempt(self, rows: int) -> None:
        known = [f"{self._fits} fit{'s' * (self._fits == 1)}"] if self._fits else []
        known += [f"{self._too_many} are too many"] if self._too_many else []
        self._log(f"trying {_rows_per_device(rows)}" + f" ({', '.join(known)})" * bool(known))

    def _log_result(self, rows: int, fits: bool) -> None:
        if fits:
            self._fits = rows
        else:
            self._too_many = rows
        verb = f"fit{'s' * (rows == 1)}" if fits else "are too many"
        self._log(f"{_rows_per_device(rows)} {verb}")

    def compile_requested(self) -> CompiledBatch:
        """Compile the request's batch, in as many micro-batches as it needs. Raises DoesNotFit and CompilerRefused."""
        compiled = self._compile(self._request)
        batch = self._request.batch
        return CompiledBatch(batch // len(self._devices) // compiled.choice.accumulate, batch, compiled)

    def find_largest(self, max_growth: int | None = None) -> tuple[CompiledBatch, int | None]:
        """Return the largest micro-batch and the next size, which does not fit (None if untried).

        max_growth: the largest size to try, in usual batches; None for no limit.

        It runs with the choice for the recipe's usual batch: a larger batch is not worth more recomputation or more
        micro-batches. Raises DoesNotFit, if not even one row per device fits, and CompilerRefused.
        """
        best = self._compile_usual()
        usual = best.compiled

        def measure(rows: int) -> int | None:
            nonlocal best
            self.compilations += 1
            self._log_attempt(rows)
            batch = self._with_rows(rows).batch
            try:
                traced = trace(self._recipe, usual.options, usual.choice, batch, usual.mesh)
                tried = compile_traced(traced, self._memory)
            except CompilerRefused as error:  # a kernel may be too large at this size only
                self._log(f"{rows} rows per device: {error}")
                return None
            if not isinstance(tried, Compiled):
                self._log_result(rows, fits=False)
                return None
            self._log_result(rows, fits=True)
            best = CompiledBatch(rows, batch, tried)
            return tried.memory.total

        limit = best.rows * max_growth if max_growth else MAX_ROWS
        _, above = find_largest(measure, best.rows, usual.memory.total, self._memory, limit)
        return best, above

    def _compile_usual(self) -> CompiledBatch:
        """Compile the request's batch, or a half, a quarter and so on, until it fits."""
        rows = max(1, self._request.batch // self._micro_batches // len(self._devices))
        while True:
            request = self._with_rows(rows)
            self._log_attempt(rows)
            try:
                compiled = self._compile(request)
            except DoesNotFit:
                if rows == 1:
                    raise
                self._log_result(rows, fits=False)
                rows //= 2
            else:
                self._log_result(rows, fits=True)
                return CompiledBatch(rows, request.batch, compiled)

    def _compile(self, request: Request) -> Compiled:
        def count_too_large(tried: TooLarge) -> None:
            self.compilations += 1
            self._log(f"too large: {tried.choice.why}")

        compiled = compile_step(self._recipe, request, self._devices, self._memory, count_too_large)
        self.compilations += 1
        return compiled

    def _with_rows(self, rows: int) -> Request:
        count = self._micro_batches
        return replace(self._request, batch=rows * len(self._devices) * count, accumulate=count)


def _rows_per_device(rows: int) -> str:
    return f"{rows} row{'s' * (rows != 1)} per device"


def next_size(rows: int) -> int:
    """Return the next larger size to try."""
    step = 1 << max(0, rows.bit_length() - SIGNIFICANT_BITS)
    return (rows // step + 1) * step


def find_largest(
    measure: Callable[[int], int | None], start: int, start_used: int, memory: int, limit: int = MAX_ROWS
) -> tuple[int, int | None]:
    """Return the largest size that fits, and the next one, which does not (None if untried).

    measure(size) compiles and returns the bytes used, None if they do not fit; `start` fits and uses `start_used`. A
    size that does not fit costs seconds, one that fits a minute, so the search comes from above. A line through the two
    largest known sizes predicts the memory of the next one. A size above `limit` is not tried.
    """
    points = [(start, start_used)]
    too_large: int | None = None
    size = next_size(2 * start - 1)
    while points[-1][0] < limit:
        size = min(size, limit)
        used = measure(size)
        if used is None:
            too_large = size
        else:
            points.append((size, used))
        largest = points[-1][0]
        if too_large is not None and too_large <= next_size(largest):
            return largest, too_large
        size = _size_to_try(points, too_large, memory)
    return points[-1][0], too_large


def _size_to_try(points: list[tuple[int, int]], too_large: int | None, memory: int) -> int:
    largest, used = points[-1]
    predicted = math.inf
    if len(points) > 1:
        before, used_before = points[-2]
        slope = (used - used_before) / (largest - before)
        predicted = largest + (memory - used) / slope if slope > 0 else math.inf
    if too_large is None:
        wanted = min(max(predicted, 1.25 * largest), MAX_GROWTH_FACTOR * largest)
        return next(size for size in _sizes_above(largest) if size > wanted)
    between = list(takewhile(lambda size: size < too_large, _sizes_above(largest)))
    if between[0] <= predicted < too_large:
        return max(size for size in between if size <= predicted)
    return between[len(between) * 3 // 4]


def _sizes_above(size: int) -> Iterator[int]:
    while True:
        size = next_size(size)
        yield size
