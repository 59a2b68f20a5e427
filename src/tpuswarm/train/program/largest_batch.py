"""The largest batch that devices hold, by compiling: those of this run (`--batch auto`), or described ones (plan)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from tpuswarm.errors import InputError
from tpuswarm.train.program.compiled import (
    Compiled,
    DoesNotFit,
    Refused,
    TooLarge,
    compile_step,
    compile_traced,
    device_memory,
    mine,
    trace,
)
from tpuswarm.train.program.largest import largest
from tpuswarm.train.program.request import Request, usual_request
from tpuswarm.train.recipe import Recipe

AUTO = "auto"


def largest_batch(recipe: Recipe, asked: Mapping[str, Any], devices: Sequence[Any], say: Callable[[str], None]) -> int:
    """Rows of the largest step that fits; InputError for devices that have no memory of their own, or hide it."""
    kind = devices[0].device_kind
    if devices[0].platform == "cpu":
        raise InputError(f"--batch auto fills the memory of devices, and {kind} shares the machine's: give a number")
    memory = device_memory(mine(devices))
    if memory is None:
        raise InputError(f"{kind} does not say how much memory it has: give --batch a number")
    names = set(Request.__dataclass_fields__) - {"batch"}
    request = usual_request(recipe, **{name: asked[name] for name in names & asked.keys()})
    found, _ = Sizes(recipe, request, devices, memory, say).largest()
    return found.batch


class Sized(NamedTuple):
    """A compiled step."""

    rows: int
    """Of one micro-batch on one device."""
    batch: int
    compiled: Compiled


class Sizes:
    """Compiles one program for the same devices in several sizes."""

    def __init__(
        self, recipe: Recipe, request: Request, devices: Sequence[Any], memory: int, say: Callable[[str], None]
    ):
        """memory: bytes of one device; say: told of each size."""
        self._recipe, self._request, self._devices, self._memory, self._say = recipe, request, devices, memory, say
        self._micro_batches = request.accumulate or 1
        self.compilations = 0

    def asked(self) -> Sized:
        """The batch of the request, in as many micro-batches as it takes. Raises DoesNotFit and Refused."""
        compiled = self._compile(self._request)
        batch = self._request.batch
        return Sized(batch // len(self._devices) // compiled.choice.accumulate, batch, compiled)

    def largest(self) -> tuple[Sized, int | None]:
        """The largest micro-batch, and the next size, which does not fit (None: it was not looked for).

        It runs in the way that the recipe's usual batch takes: what more recomputing of layers and more micro-batches
        cost in time, a larger batch does not bring back. Raises DoesNotFit, for one row a device, and Refused.
        """
        best = self._usual()
        usual = best.compiled

        def used(rows: int) -> int | None:
            nonlocal best
            self.compilations += 1
            batch = self._sized(rows).batch
            try:
                traced = trace(self._recipe, usual.options, usual.choice, batch, usual.mesh)
                tried = compile_traced(traced, self._memory)
            except Refused as error:  # a kernel that is too large at this size, where a smaller one was not
                self._say(f"{rows} rows per device: {error}")
                return None
            if not isinstance(tried, Compiled):
                self._say(f"{rows} rows per device are too many")
                return None
            self._say(f"{rows} rows per device fit")
            best = Sized(rows, batch, tried)
            return tried.memory.total

        _, above = largest(used, best.rows, usual.memory.total, self._memory)
        return best, above

    def _usual(self) -> Sized:
        """The request's batch, or half of it, and so on until it fits."""
        rows = max(1, self._request.batch // self._micro_batches // len(self._devices))
        while True:
            request = self._sized(rows)
            try:
                compiled = self._compile(request)
            except DoesNotFit:
                if rows == 1:
                    raise
                self._say(f"{rows} rows per device are too many")
                rows //= 2
            else:
                self._say(f"{rows} rows per device fit")
                return Sized(rows, request.batch, compiled)

    def _compile(self, request: Request) -> Compiled:
        """What a run would find; each way that it leaves behind is told, and counted."""

        def refused(tried: TooLarge) -> None:
            self.compilations += 1
            self._say(f"too large: {tried.choice.why}")

        compiled = compile_step(self._recipe, request, self._devices, self._memory, refused)
        self.compilations += 1
        return compiled

    def _sized(self, rows: int) -> Request:
        count = self._micro_batches
        return replace(self._request, batch=rows * len(self._devices) * count, accumulate=count)
