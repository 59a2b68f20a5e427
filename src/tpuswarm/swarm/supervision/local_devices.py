"""Count this machine's devices and share them out among members; compute the sizes of a recipe's state."""

import math
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from tpuswarm.errors import InputError
from tpuswarm.train.paths import by_path
from tpuswarm.train.process import nvidia, platform
from tpuswarm.train.process.platform import VISIBLE, visible_devices
from tpuswarm.train.program.contract import abstract_state, check_exchange, program_of
from tpuswarm.train.program.exchanged import exchanged, exchanged_parameters
from tpuswarm.train.program.mesh import select_devices
from tpuswarm.train.recipe import Average, Capability, Options, Recipe
from tpuswarm.train.supervised_program import SupervisedProgram

TPU_BOUNDS = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1", 8: "2,4,1"}
"""Chip layout of one process; https://docs.jax.dev/en/latest/multi_process.html."""

PLATFORMS = {"tpu": "tpu", "cuda": "gpu", "gpu": "gpu", "cpu": "cpu"}
"""Kinds of devices by JAX's names of platforms."""


class _UnopenedDevice:
    """Stands for a device that only the members will open."""

    def __init__(self, kind: str):
        self.device_kind = kind


def local_devices(which: str | int | list[int]) -> tuple[str, list[str]]:
    """Return the platform of this machine's devices and the names of the chosen ones; no names for the CPU.

    Find devices without opening them, as JAX would: with JAX_PLATFORMS, CUDA_VISIBLE_DEVICES and TPU_VISIBLE_CHIPS.
    Raise InputError for a platform that is missing, for GPUs that JAX cannot use, and for more devices than there are.
    """
    asked = [name.strip() for name in os.environ.get("JAX_PLATFORMS", "").split(",") if name.strip()]
    wanted = [kind for kind in VISIBLE if not asked or kind in map(PLATFORMS.get, asked)]
    names = {kind: visible_devices(kind, count_devices(kind)) for kind in wanted}
    present = [*(kind for kind in wanted if names[kind]), "cpu"]
    if "gpu" in wanted and not names.get("tpu"):
        nvidia.require_driver(bool(asked))
    for name in asked:
        if PLATFORMS.get(name) not in present:
            raise InputError(
                f"JAX finds no devices (JAX_PLATFORMS={','.join(asked)}): that platform is not installed here, or "
                "another variable hides its devices; correct or unset it"
            )
    kind = PLATFORMS[asked[0]] if asked else present[0]
    if kind == "cpu":
        if which != "all":
            raise InputError(
                f"--devices {which}: this machine has no TPU or GPU to share out; "
                "--devices-per-member gives each member its own virtual CPU devices"
            )
        return kind, []
    listed = [_UnopenedDevice(kind) for _ in names[kind]]
    chosen = select_devices(which, listed)
    return kind, [
        name
        for name, device in zip(names[kind], listed, strict=True)
        if any(device is chosen_one for chosen_one in chosen)
    ]


def require_usable(kind: str, devices: Sequence[str]) -> Capability | None:
    """Return the lowest compute capability of GPUs, if known. Raise InputError for one that members cannot use."""
    if kind != "gpu":
        return None
    cards = platform.require_gpus(devices)
    nvidia.require_free_memory(cards)
    return min((card.capability for card in cards if card.capability), default=None)


def count_devices(kind: str) -> int:
    """Return how many TPU chips or GPUs this machine has."""
    if kind == "tpu":
        return platform.count_tpu_chips()
    return platform.count_gpus()


def share_out(kind: str, devices: Sequence[str], members: int, asked: int | None) -> int:
    """Return the number of devices of each member; members may share GPUs. Raise InputError if there are too few."""
    if kind == "cpu" or not members:
        return asked or 1
    if kind == "gpu" and members > len(devices) and asked in (None, 1):
        return 1
    per_member = asked or len(devices) // members
    if per_member < 1 or per_member * members > len(devices):
        raise InputError(
            f"{members} members with {asked or 'at least 1'} devices each need {members * (asked or 1)}, this machine "
            f"has {len(devices)} ({kind}); use --members {max(1, len(devices) // (asked or 1))}"
        )
    return per_member


def shared_by(devices: Sequence[str], members: int, per_member: int) -> list[int]:
    """Return how many members each device has, if there are more members than devices; else nothing."""
    if not devices or members * per_member <= len(devices):
        return []
    return [len(range(index, members, len(devices))) for index in range(len(devices))]


def sharing_note(devices: Sequence[str], members: int, per_member: int) -> list[str]:
    """Return a sentence if members share GPUs."""
    if not (most := max(shared_by(devices, members, per_member), default=0)):
        return []
    share = f"{nvidia.memory_share() / most:.0%} of its memory"
    if len(devices) == 1:
        return [f"{members} members share one GPU, each with {share}"]
    return [f"{members} members share {len(devices)} GPUs, up to {most} on each, each with at least {share}"]


def environments(
    kind: str, devices: Sequence[str], per_member: int, members: int
) -> Callable[[int | None], dict[str, str]]:
    """Return a function that gives the environment of a member by its number; empty for None, a joined one."""
    sharing = shared_by(devices, members, per_member)
    whole = nvidia.memory_share() if sharing else 0.0

    def environment(number: int | None) -> dict[str, str]:
        if number is None:
            return {}
        if kind == "cpu":
            return {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(per_member)}
        if sharing:
            index = number % len(devices)
            share = math.floor(1000 * whole / sharing[index]) / 1000
            return {
                VISIBLE[kind]: devices[index],
                nvidia.MEMORY_SHARE: f"{share:.3f}",
                nvidia.OLD_MEMORY_SHARE: "",
            }
        mine = ",".join(devices[number * per_member : (number + 1) * per_member])
        if kind == "gpu":
            return {VISIBLE[kind]: mine}
        return {
            VISIBLE[kind]: mine,
            "TPU_CHIPS_PER_PROCESS_BOUNDS": TPU_BOUNDS.get(per_member, f"1,{per_member},1"),
            "TPU_PROCESS_BOUNDS": "1,1,1",
            # Else a process with the bounds 2,2,1 takes libtpu's lock, and the next one ends (libtpu 0.0.42.1).
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        }

    return environment


class Sizes(NamedTuple):
    """Sizes of a recipe's state."""

    exchanged: int
    """Bytes of the shared arrays, float32."""
    state: int
    """Bytes of the whole state."""
    parameters: int
    """Number of parameters, trained or frozen."""
    statistics: tuple[str, ...] = ()
    """Paths of shared running statistics, which are not trained."""
    average: Average | None = None
    """The moving average of the parameters, if the program keeps one."""
    swarm_obstacle: str = ""
    """Why its optimizer is for a single member, and what to do; empty if it is not."""


def sizes(recipe: Recipe, ema: float | None) -> Sizes:
    """Compute the sizes of a recipe's state without creating it; ema: as in `Options`."""
    program = program_of(recipe, Options(ema=ema))
    state = abstract_state(program, recipe.name)
    check_exchange(program, recipe.name, state)
    rows = program.parameters(state)
    if recipe.base_model is None and any(row.base for row in rows):
        raise InputError(f"a swarm of {recipe.name} needs the model that its adapters belong to: train hf:…")
    exchange = exchanged(program, state)
    shared = by_path(exchange.get(state))
    if path := next((path for path, leaf in shared.items() if leaf.dtype != "float32"), None):
        raise InputError(
            f"a swarm shares float32 only, but {path} of {recipe.name} is {shared[path].dtype}: make it float32"
        )
    kinds = zip(shared, exchanged_parameters(program, state), strict=True)
    statistics = tuple(path for path, row in kinds if row.statistic)
    counted = zip(jax.tree.leaves(program.exchange().get(state)), rows, strict=True)
    parameters = sum(math.prod(leaf.shape) for leaf, row in counted if not row.statistic)
    total = sum(_bytes(leaf) for leaf in jax.tree.leaves(state))
    swarm_obstacle = program.swarm_obstacle(state) if isinstance(program, SupervisedProgram) else ""
    return Sizes(sum(map(_bytes, shared.values())), total, parameters, statistics, exchange.average, swarm_obstacle)


def _bytes(leaf: Any) -> int:
    return math.prod(leaf.shape) * jax.numpy.dtype(leaf.dtype).itemsize
