"""Define the request to compile one program, and its result: plain values that cross processes as JSON."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tpuswarm.catalog import Gpu, Hardware


@dataclass(frozen=True)
class PlanOptions:
    """Which program to compile; None leaves the choice to the recipe or to `compile_step`."""

    target: str
    """`module:name` or `file.py:name` of the recipe."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Recipe options, as typed."""
    batch: int | None = None
    """Rows of a step over all devices; None: the largest micro-batch that fits."""
    precision: str | None = None
    shard: str | None = None
    accumulate: int | None = None
    freeze: str | None = None
    ema: float | None = None


@dataclass(frozen=True)
class Target:
    """A slice or a GPU as its compiler needs it."""

    name: str
    platform: Literal["tpu", "cuda"]
    topology_name: str
    compiler_options: Mapping[str, Any]
    device_kind: str
    devices: int
    memory_bytes: int
    """Memory for a program on one device."""
    matrix_unit: int
    flops_per_s: Mapping[str, float] = field(default_factory=dict)
    """Peak of a GPU, by the dtype of a product's operands."""
    bytes_per_s: float = 0.0
    """Bandwidth of a GPU's memory."""


def describe_target(hardware: Hardware) -> Target:
    """Return the compiler's view of a slice or a GPU."""
    compiler, gpu = hardware.compiler, hardware if isinstance(hardware, Gpu) else None
    rates = {"bf16": gpu.peak_bf16 or gpu.peak_f32, "f32": gpu.peak_f32} if gpu else {}
    return Target(
        hardware.name,
        "cuda" if gpu else "tpu",
        compiler.name,
        compiler.options,
        hardware.device_kind,
        hardware.devices,
        hardware.program_bytes,
        hardware.matrix_unit,
        rates,
        gpu.bandwidth if gpu else 0.0,
    )


@dataclass(frozen=True)
class CompileRequest:
    """One compilation."""

    options: PlanOptions
    target: Target
    lower_only: str = ""
    """Why nothing can be compiled here, if so."""

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> "CompileRequest":
        """Read the JSON of `dataclasses.asdict`."""
        return CompileRequest(PlanOptions(**values["options"]), Target(**values["target"]), values["lower_only"])


@dataclass(frozen=True)
class Program:
    """A step as it would run: compiled, or without libtpu only lowered."""

    batch: int
    micro_batch: int
    """Rows per device."""
    micro_batches: int
    sharding: str
    remat: str
    why: str
    precision: str
    attention: str
    tokens_per_row: int
    model_flops: int
    """Per step, over all devices."""
    least_flops: int
    """Without the half of attention that a causal mask hides."""
    flops_unknown: tuple[str, ...]
    """Operations that could not be counted; the FLOPs are a lower bound then."""
    state_bytes: int
    """Sum over devices, without copies."""
    moved_bytes: int
    """State that one device reads and writes per step; frozen parameters are only read."""
    row_bytes: int
    """Size of a row on disk."""
    shared_elements: int
    """Numbers that the members of a swarm share."""
    outer: str
    """Rule of the outer step in a swarm."""
    is_averaged: bool
    """A swarm keeps a moving average of the parameters."""
    compute_seconds: float | None = None
    """Least time of a GPU's kernels that are limited by FLOPs; None for a TPU."""
    memory_seconds: float | None = None
    """Least time of a GPU's kernels that are limited by memory; None for a TPU."""


@dataclass(frozen=True)
class CompileResult:
    """The compiler's answer for one slice."""

    fits: bool | None
    """Unknown if None; `problem` has the reason."""
    program: Program | None = None
    arguments: int | None = None
    """Bytes per device, as the next two."""
    temporaries: int | None = None
    code: int | None = None
    too_large: int | None = None
    """The next larger micro-batch, which does not fit."""
    needed: int | None = None
    """If nothing fits: bytes per device of the smallest form, if known. So do the next four describe it."""
    smallest_state: int | None = None
    """Bytes per device of its state."""
    smallest: str = ""
    """In words."""
    is_sharded: bool = False
    rows: int = 1
    """Micro-batch rows per device."""
    problem: str = ""
    hazards: tuple[Mapping[str, Any], ...] | None = None
    """kind, sentence, file and line of each; None if the program was not compiled."""
    compilations: int = 0
    seconds: float = 0.0

    @property
    def used(self) -> int | None:
        """Peak bytes per device."""
        if self.arguments is None or self.temporaries is None or self.code is None:
            return None
        return self.arguments + self.temporaries + self.code

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> "CompileResult":
        """Read the JSON of `dataclasses.asdict`."""
        program = values["program"]
        if program is not None:
            program = Program(**{**program, "flops_unknown": tuple(program["flops_unknown"])})
        hazards = None if values["hazards"] is None else tuple(values["hazards"])
        return CompileResult(**{**values, "program": program, "hazards": hazards})
