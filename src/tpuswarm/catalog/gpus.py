"""Peak rates of devices by the name JAX gives them: TPUs, and the GPUs a utilisation is asked for."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

from tpuswarm.catalog.figures import Figure, data, figure
from tpuswarm.catalog.generations import generation_of


@dataclass(frozen=True)
class Gpu:
    """One GPU: dense FLOP/s (no sparsity) and B/s of its memory; `figures` has the sources."""

    name: str
    device_kinds: tuple[str, ...]
    peak_bf16: float
    peak_f32: float | None
    """Of float32 matmuls as JAX does them by default: in TF32. None where no source says."""
    bandwidth: float
    figures: Mapping[str, Figure] = field(hash=False, repr=False)


@cache
def gpus() -> tuple[Gpu, ...]:
    """The GPUs of the catalogue."""
    found = []
    for name, section in data("gpus").items():
        figures = {key: figure(entry, section["source"]) for key, entry in section.items() if key != "source"}
        values = {key: each.value for key, each in figures.items()}
        found.append(Gpu(name, peak_f32=values.pop("peak_f32", None), figures=figures, **values))
    return tuple(found)


def peak_flops(device_kind: str, precision: str) -> float | None:
    """FLOP/s of one JAX device at best, dense, for matmuls in `precision` (bf16, f32, highest); None: unknown.

    f32 is what JAX makes of float32 matmuls by default (`jax.lax.Precision.DEFAULT`): TF32 on GPUs, where NVIDIA states
    a rate. Nobody states one for TPUs, nor for `highest`.
    """
    gpu = _gpu(device_kind)
    if precision == "f32":
        return gpu.peak_f32 if gpu else None
    if precision != "bf16":
        return None
    generation = generation_of(device_kind)
    return generation.peak_bf16_per_device if generation else gpu.peak_bf16 if gpu else None


def memory_bandwidth(device_kind: str) -> float | None:
    """B/s between one JAX device and its memory; None: unknown."""
    generation, gpu = generation_of(device_kind), _gpu(device_kind)
    return generation.bandwidth_per_device if generation else gpu.bandwidth if gpu else None


def _gpu(device_kind: str) -> Gpu | None:
    return next((each for each in gpus() if device_kind in each.device_kinds), None)
