"""What this machine has for members: devices, shared out among them."""

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from tpuswarm.errors import InputError
from tpuswarm.train.paths import leaf_paths
from tpuswarm.train.process.platform import has_gpu, has_tpu
from tpuswarm.train.program.contract import abstract_state, check_exchange, program_of
from tpuswarm.train.program.mesh import select_devices
from tpuswarm.train.recipe import Average, Options, Recipe
from tpuswarm.train.supervised_program import SupervisedProgram

TPU_BOUNDS = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1", 8: "2,4,1"}
"""How the chips of one process lie; https://docs.jax.dev/en/latest/multi_process.html."""


class _Listed:
    """Stands for a device that is not opened: the members will."""

    def __init__(self, kind: str):
        self.device_kind = kind


def local_devices(which: str | int | list[int]) -> tuple[str, list[int]]:
    """The platform of this machine's devices, and the indices of those meant; no indices on a machine without any.

    Counted without opening them. Raises InputError for more than there are.
    """
    kind = "tpu" if has_tpu() else "gpu" if has_gpu() else "cpu"
    if kind == "cpu":
        if which != "all":
            raise InputError(
                f"--devices {which}: this machine has no TPU or GPU to share out; "
                "--devices-per-member gives each member its own virtual CPU devices"
            )
        return kind, []
    folder, pattern = ("/dev/vfio", r"\d+") if Path("/dev/vfio").exists() and kind == "tpu" else ("/dev", r"accel\d+")
    if kind == "gpu":
        folder, pattern = "/dev", r"nvidia\d+"
    count = sum(bool(re.fullmatch(pattern, path.name)) for path in Path(folder).iterdir())
    listed = [_Listed(kind) for _ in range(count)]
    chosen = select_devices(which, listed)
    return kind, [index for index, device in enumerate(listed) if any(device is each for each in chosen)]


def share_out(kind: str, devices: Sequence[int], members: int, asked: int | None) -> int:
    """Devices of each member; InputError where there are too few."""
    if kind == "cpu" or not members:
        return asked or 1
    each = asked or len(devices) // members
    if each < 1 or each * members > len(devices):
        raise InputError(
            f"{members} members with {asked or 'at least 1'} devices each need {members * (asked or 1)}, this machine "
            f"has {len(devices)} ({kind}); use --members {max(1, len(devices) // (asked or 1))}"
        )
    return each


def environments(kind: str, devices: Sequence[int], each: int) -> Callable[[int | None], dict[str, str]]:
    """The environment of the member with a number on this machine; of one that joined, for None: its own."""

    def environment(number: int | None) -> dict[str, str]:
        if number is None:
            return {}
        if kind == "cpu":
            return {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(each)}
        mine = ",".join(str(index) for index in devices[number * each : (number + 1) * each])
        if kind == "gpu":
            return {"CUDA_VISIBLE_DEVICES": mine}
        return {
            "TPU_VISIBLE_CHIPS": mine,
            "TPU_CHIPS_PER_PROCESS_BOUNDS": TPU_BOUNDS.get(each, f"1,{each},1"),
            "TPU_PROCESS_BOUNDS": "1,1,1",
        }

    return environment


class Sizes(NamedTuple):
    """Bytes of a recipe's state."""

    exchanged: int
    largest: int
    """Of the shared arrays; none is ever divided."""
    state: int
    """All of it."""
    statistics: tuple[str, ...] = ()
    """The paths of arrays that are exchanged and not trained: running averages."""
    average: Average | None = None
    """The moving average of the parameters that it keeps."""
    alone_because: str = ""
    """Why its optimizer is for one member alone, and the way out; empty where it is not."""


def sizes(recipe: Recipe, ema: float | None) -> Sizes:
    """How large the state of a recipe is, without making it; ema: as in `Options`."""
    program = program_of(recipe, Options(ema=ema))
    state = abstract_state(program, recipe.name)
    check_exchange(program, recipe.name, state)
    exchanged = program.exchange().get(state)
    shared = [_bytes(leaf) for leaf in jax.tree.leaves(exchanged)]
    told = zip(leaf_paths(exchanged), program.parameters(state), strict=True)
    statistics = tuple(path for path, each in told if each.statistic)
    whole = sum(_bytes(leaf) for leaf in jax.tree.leaves(state))
    alone_because = program.alone_because(state) if isinstance(program, SupervisedProgram) else ""
    return Sizes(sum(shared), max(shared), whole, statistics, program.exchange().average, alone_because)


def _bytes(leaf: Any) -> int:
    return math.prod(leaf.shape) * jax.numpy.dtype(leaf.dtype).itemsize
