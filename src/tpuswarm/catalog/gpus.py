"""Find GPUs by name, and look up peak FLOP/s and memory bandwidth of GPUs and TPUs by their JAX device kind."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

from tpuswarm.catalog.accelerators import Accelerator, Compiler, accelerators, find
from tpuswarm.catalog.figures import Figure, parse_figure, read_data
from tpuswarm.catalog.generations import generation_of
from tpuswarm.catalog.prices import Price
from tpuswarm.config.nearest import nearest_name
from tpuswarm.config.units import GIB
from tpuswarm.errors import InputError

MEMORY_SHARE = 0.75
"""Share of a GPU's memory that JAX takes for its programs (https://docs.jax.dev/en/latest/gpu_memory_allocation.html)."""


@dataclass(frozen=True)
class Gpu:
    """One GPU: dense FLOP/s (no sparsity), memory in B/s; `figures` has the sources."""

    name: str
    """Short form: h100-sxm."""
    also: tuple[str, ...]
    """Other short forms: h100."""
    device_kinds: tuple[str, ...]
    peak_bf16: float | None
    """FLOP/s; None for a GPU without bfloat16 units."""
    peak_f32: float
    """FLOP/s of float32 matmuls, which JAX runs in TF32 on GPUs that have it."""
    bandwidth: float
    memory_gib: float
    """Memory that CUDA reports."""
    compute_capability: str
    multiprocessors: int
    clock_ghz: float
    l2_mib: float
    figures: Mapping[str, Figure] = field(hash=False, repr=False)

    devices = 1
    """JAX devices."""
    matrix_unit = 8
    """Dimensions in multiples of this fill the tensor cores (NVIDIA, Matrix Multiplication Background)."""

    @property
    def device_kind(self) -> str:
        return self.device_kinds[0]

    @property
    def program_bytes(self) -> int:
        """Memory for programs."""
        return int(MEMORY_SHARE * self.memory_gib * GIB)

    @property
    def names(self) -> tuple[str, ...]:
        """All names that `find_hardware` accepts, in lower case, the short form first."""
        return (self.name, *self.also, *(kind.lower() for kind in self.device_kinds))

    @property
    def compiler(self) -> Compiler:
        """Arguments for which XLA describes this GPU without one: its GpuTargetConfigProto as text."""
        return Compiler("", {"target_config": self._target_config(), "topology": "1x1x1"})

    def zones(self) -> tuple[str, ...]:
        """Return the zones that offer it: none is known."""
        return ()

    def price(self) -> Price | None:
        """Return its price: no source has one."""
        return None

    def _target_config(self) -> str:
        limits = read_data("capabilities")[self.compute_capability]
        major, minor = self.compute_capability.split(".")
        return f"""\
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: {48 * 1024}
  shared_memory_per_core: {limits["shared_memory_kib"] * 1024}
  shared_memory_per_block_optin: {limits["shared_memory_per_block_kib"] * 1024}
  threads_per_core_limit: {limits["threads"]}
  core_count: {self.multiprocessors}
  fpus_per_core: {limits["float32_units"]}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {self.bandwidth:.0f}
  l2_cache_size: {self.l2_mib * 2**20:.0f}
  clock_rate_ghz: {self.clock_ghz}
  device_memory_size: {self.memory_gib * GIB:.0f}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
runtime_version {{ major: 13 }}
device_description_str: "{self.device_kind}"
"""


Hardware = Accelerator | Gpu
"""A TPU type or a GPU, on which a member trains."""


@cache
def gpus() -> tuple[Gpu, ...]:
    found = []
    for name, section in read_data("gpus").items():
        figures = {key: parse_figure(entry, section["source"]) for key, entry in section.items() if key != "source"}
        values = {"also": (), "peak_bf16": None} | {key: figure.value for key, figure in figures.items()}
        found.append(Gpu(name, figures=figures, **values))
    return tuple(found)


def find_hardware(name: str) -> Hardware:
    """Find a TPU type or a GPU by any of its names, in upper or lower case; raise InputError with the nearest one."""
    wanted = name.strip().lower()
    by_name = {known: gpu for gpu in gpus() for known in gpu.names}
    if wanted in by_name:
        return by_name[wanted]
    near = nearest_name(wanted, {*by_name, *(known for tpu in accelerators() for known in tpu.names)}, 0.65)
    if near in by_name or (near is None and ":" not in wanted):
        listed = ", ".join(gpu.name for gpu in gpus())
        raise InputError(
            f"unknown TPU or GPU {name!r}: "
            + (f"did you mean {by_name[near].name}? " if near else "`tpuswarm catalog` lists the TPUs. ")
            + f"GPUs: {listed}"
        )
    return find(name)


def peak_flops(device_kind: str, precision: str) -> float | None:
    """Return the peak FLOP/s of one JAX device for dense matmuls in `precision` (bf16, f32, highest); None: unknown.

    f32 means `jax.lax.Precision.DEFAULT`, which is TF32 on GPUs. TPUs have no published rate for it, and `highest`
    has none anywhere.
    """
    gpu = _gpu(device_kind)
    if precision == "f32":
        return gpu.peak_f32 if gpu else None
    if precision != "bf16":
        return None
    generation = generation_of(device_kind)
    return generation.peak_bf16_per_device if generation else gpu.peak_bf16 if gpu else None


def memory_bandwidth(device_kind: str) -> float | None:
    """Return the memory bandwidth of one JAX device in B/s; None: unknown."""
    generation, gpu = generation_of(device_kind), _gpu(device_kind)
    return generation.bandwidth_per_device if generation else gpu.bandwidth if gpu else None


def _gpu(device_kind: str) -> Gpu | None:
    return next((gpu for gpu in gpus() if device_kind in gpu.device_kinds), None)
