"""Look up peak FLOP/s and memory bandwidth of GPUs and TPUs by their JAX device kind."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

from tpuswarm.catalog.figures import Figure, parse_figure, read_data
from tpuswarm.catalog.generations import generation_of


@dataclass(frozen=True)
class Gpu:
    """One GPU: dense FLOP/s (no sparsity), memory in B/s; `figures` has the sources."""

    name: str
    device_kinds: tuple[str, ...]
    peak_bf16: float
    peak_f32: float | None
    """For float32 matmuls as JAX runs them by default: in TF32. None: unknown."""
    bandwidth: float
    figures: Mapping[str, Figure] = field(hash=False, repr=False)


@cache
def gpus() -> tuple[Gpu, ...]:
    found = []
    for name, section in read_data("gpus").items():
        figures = {key: parse_figure(entry, section["source"]) for key, entry in section.items() if key != "source"}
        values = {key: figure.value for key, figure in figures.items()}
        found.append(Gpu(name, peak_f32=values.pop("peak_f32", None), figures=figures, **values))
    return tuple(found)


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
