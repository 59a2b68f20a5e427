"""`--batch auto`: the largest batch that the devices of this run hold."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tpuswarm.errors import InputError
from tpuswarm.train.program.compiled import Compiled, Refused, compile_step, compile_traced, device_memory, trace
from tpuswarm.train.program.largest import largest
from tpuswarm.train.program.request import Request, usual_request
from tpuswarm.train.recipe import Recipe

AUTO = "auto"


def largest_batch(recipe: Recipe, asked: Mapping[str, Any], devices: Sequence[Any], say: Callable[[str], None]) -> int:
    """Rows of a step, as `search` finds them; InputError for devices that have no memory of their own, or hide it."""
    kind = devices[0].device_kind
    if devices[0].platform == "cpu":
        raise InputError(f"--batch auto fills the memory of devices, and {kind} shares the machine's: give a number")
    if device_memory(devices[0]) is None:
        raise InputError(f"{kind} does not say how much memory it has: give --batch a number")
    return search(recipe, asked, devices, say)


def search(recipe: Recipe, asked: Mapping[str, Any], devices: Sequence[Any], say: Callable[[str], None]) -> int:
    """Rows of a step: as many as fit in the way that one row a device and micro-batch runs.

    Recomputing layers and more micro-batches cost time, which a larger batch does not bring back: they are used where
    the smallest batch needs them, and not more of them after that. Sizes are those of a plan (largest.py), each
    compiled once. Raises InputError where not even the smallest fits.
    """
    names = set(Request.__dataclass_fields__) - {"batch"}
    kept = {name: asked[name] for name in names & asked.keys()}
    unit = len(devices) * (asked.get("accumulate") or 1)
    memory = device_memory(devices[0])
    assert memory is not None
    smallest = compile_step(recipe, usual_request(recipe, **kept, batch=unit), devices)

    def used(rows: int) -> int | None:
        try:
            traced = trace(recipe, smallest.options, smallest.choice, unit * rows, smallest.mesh)
            tried = compile_traced(traced, memory)
        except Refused:  # a kernel that is too large at this size, where a smaller one was not
            return None
        if not isinstance(tried, Compiled):
            return None
        say(f"{unit * rows:,} rows fit: {tried.memory.total / 2**30:.2f} GiB per device")
        return tried.memory.total

    say(f"{unit:,} rows fit: {smallest.memory.total / 2**30:.2f} GiB per device")
    rows, _ = largest(used, 1, smallest.memory.total, memory)
    return unit * rows
