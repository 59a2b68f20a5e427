"""What is asked of one compilation, and what it found: plain values that cross from process to process as JSON."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tpuswarm.catalog import Accelerator


@dataclass(frozen=True)
class Asked:
    """Which program, in which way; None leaves a choice to the recipe, or to `compile_step`."""

    target: str
    """`module:name` or `file.py:name` of the recipe."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Of the recipe, as they were written."""
    batch: int | None = None
    """Rows of a whole step over all devices; None: the largest that fits without micro-batches."""
    precision: str | None = None
    shard: str | None = None
    accumulate: int | None = None
    freeze: str | None = None
    ema: float | None = None


@dataclass(frozen=True)
class DescribedSlice:
    """A described slice."""

    name: str
    compiler: str
    """`topology_name` of `jax.experimental.topologies.get_topology_desc`."""
    compiler_options: Mapping[str, Any]
    kind: str
    devices: int
    hbm_bytes: int
    """What the compiler grants a program on one device."""
    matrix_unit: int


def described(accelerator: Accelerator) -> DescribedSlice:
    """The slice as the compiler is told of it."""
    generation, compiler = accelerator.generation, accelerator.compiler
    return DescribedSlice(
        accelerator.name,
        compiler.name,
        compiler.options,
        generation.device_kind,
        accelerator.devices,
        generation.compiler_hbm_bytes,
        generation.matrix_unit,
    )


@dataclass(frozen=True)
class Order:
    """One compilation: what is sent to the process that does it."""

    asked: Asked
    place: DescribedSlice
    lower_only: str = ""
    """Why nothing can be compiled here; empty where it can."""

    @staticmethod
    def of(values: Mapping[str, Any]) -> "Order":
        """From `dataclasses.asdict`, read back from JSON."""
        return Order(Asked(**values["asked"]), DescribedSlice(**values["place"]), values["lower_only"])


@dataclass(frozen=True)
class Program:
    """A step as it would run: compiled, or, without libtpu, only lowered."""

    batch: int
    micro_batch: int
    """Rows of one micro-batch on one device."""
    micro_batches: int
    sharding: str
    remat: str
    why: str
    precision: str
    attention: str
    tokens_per_row: int
    model_flops: int
    """Of one step, over all devices."""
    least_flops: int
    """Of these, what no program can skip: a causal mask hides half of the attention."""
    flops_unknown: tuple[str, ...]
    """What could not be counted; the FLOPs are a lower bound then."""
    state_bytes: int
    """Of the whole state, over all devices once."""
    moved_bytes: int
    """That a step must read and write of the state on one device: all of it twice, what is frozen once."""
    row_bytes: int
    """Of one row where it is kept."""
    exchanged: int
    """Numbers that the members of a swarm share: the parameters."""
    outer: str
    """The rule by which a swarm of this recipe changes them."""
    averaged: bool
    """Whether it keeps a moving average of them."""


@dataclass(frozen=True)
class Found:
    """The compiler's answer for one slice."""

    fits: bool | None
    """None: nobody could say; `problem` has the reason."""
    program: Program | None = None
    """None where nothing fits, or nothing was found."""
    arguments: int | None = None
    """Bytes of one device's memory, like the two that follow."""
    temporaries: int | None = None
    code: int | None = None
    too_large: int | None = None
    """The next larger micro-batch, which was compiled too and does not fit."""
    needed: int | None = None
    """Where nothing fits: bytes a device that the smallest form needs, as far as the compiler says."""
    held: int | None = None
    """Where nothing fits: bytes of these that are the smallest form's state."""
    smallest: str = ""
    """Where nothing fits: the smallest form in words."""
    spread: bool = False
    """Where nothing fits: whether each device holds only a part of the smallest form's state."""
    rows: int = 1
    """Where nothing fits: rows of the smallest form's micro-batch on one device."""
    problem: str = ""
    hazards: tuple[Mapping[str, Any], ...] | None = None
    """kind, sentence, file and line of each; None where the compiled program was not seen."""
    compilations: int = 0
    seconds: float = 0.0

    @property
    def used(self) -> int | None:
        """Bytes of one device's memory that are used at the worst moment."""
        if self.arguments is None or self.temporaries is None or self.code is None:
            return None
        return self.arguments + self.temporaries + self.code

    @staticmethod
    def of(values: Mapping[str, Any]) -> "Found":
        """From `dataclasses.asdict`, read back from JSON."""
        program = values["program"]
        if program is not None:
            program = Program(**{**program, "flops_unknown": tuple(program["flops_unknown"])})
        hazards = None if values["hazards"] is None else tuple(values["hazards"])
        return Found(**{**values, "program": program, "hazards": hazards})
