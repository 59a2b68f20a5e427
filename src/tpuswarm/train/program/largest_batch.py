"""`--batch auto`: the largest batch that the devices of this run hold."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tpuswarm.errors import InputError
from tpuswarm.train.program.compiled import Compiled, DoesNotFit, compile_step, device_memory
from tpuswarm.train.program.request import REMATS, Request, usual_request
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
    """Rows of a step: doubled from one a device and micro-batch on, as long as a step fits that saves no more memory.

    Recomputing layers and more micro-batches cost time, which a larger batch does not bring back: they are used where
    the smallest batch needs them, and not more of them after that. Each size is compiled once. Raises InputError where
    not even the smallest fits.
    """
    names = set(Request.__dataclass_fields__) - {"batch"}
    kept = {name: asked[name] for name in names & asked.keys()}
    batch = len(devices) * (asked.get("accumulate") or 1)
    best = compile_step(recipe, usual_request(recipe, **kept, batch=batch), devices)
    while True:
        say(f"{batch:,} rows fit: {best.memory.total / 2**30:.2f} GiB per device")
        try:
            larger = compile_step(recipe, usual_request(recipe, **kept, batch=2 * batch), devices)
        except DoesNotFit:
            return batch
        if _saves(larger) > _saves(best):
            return batch
        batch, best = 2 * batch, larger


def _saves(compiled: Compiled) -> tuple[int, int]:
    """How much time it gives for memory."""
    return compiled.choice.accumulate, list(REMATS).index(compiled.choice.remat)
