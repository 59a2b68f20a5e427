"""Estimate how fast a step is at best, how fast to expect, and for how many dollars.

The floor is a time that no program beats: model FLOPs over the chips' bf16 peak, or the state that one device must read
and write over its memory bandwidth, whichever is longer. Activations and repeated reads of weights come on top; the
compiler's own count of bytes is no help, because it counts a loop's body once. The expected time is a guess above the
floor: the share of the peak that others have published for transformers on TPUs. Of the bandwidth it is the same share.

The floor of a GPU is the least time of its program's kernels (`compile/kernels.py`). The expected time is a guess: up
to GPU_SLOWDOWN times that.
"""

from dataclasses import dataclass
from typing import Literal

from tpuswarm.catalog import Generation, Price


@dataclass(frozen=True)
class Published:
    """One published speed, read in 2026-11."""

    system: str
    model: str
    generation: str
    slice: str
    share: float
    """Model FLOPs, counted as in `train/program/flops.py`, over the peak."""
    tokens_per_s: float | None
    """Per chip; None: only the share was published."""
    source: str


LEVANTER = "Levanter, docs/Levanter-1.0-Release.md"
MAXTEXT = "MaxText, docs/reference/models/tiering.md"
TPUCHAT = "vorushin.github.io, 2026-02-22"

PUBLISHED = (
    Published("Levanter", "GPT-2 345M", "v3", "v3-256", 0.351, None, LEVANTER),
    Published("Levanter", "GPT-2 750M", "v3", "v3-256", 0.389, None, LEVANTER),
    Published("Levanter", "GPT-2 1.4B", "v3", "v3-256", 0.417, None, LEVANTER),
    Published("tpuchat", "164M", "v5e", "v5e-1", 0.743, 148_829, f"{TPUCHAT}; share by the FLOPs of its v6e figure"),
    Published("MaxText", "Llama 70B", "v5p", "v5p-512", 0.654, 692, MAXTEXT),
    Published("tpuchat", "164M", "v6e", "v6e-1", 0.465, 433_606, TPUCHAT),
    Published("MaxText", "Llama 8B", "v6e", "v6e-256", 0.455, 7_207, MAXTEXT),
    Published("modded-nanogpt in JAX", "GPT-2 124M", "v6e", "v6e-8", 0.23, None, "nor-blog.pages.dev, 2025-08-21"),
)
MIN_SYSTEMS = 3
"""With fewer published systems a generation uses the band of all TPUs."""


@dataclass(frozen=True)
class Band:
    """Lowest and highest share of the peak to expect."""

    low: float
    high: float
    source: str


def expected_band(generation: str, without: str = "") -> Band:
    """Return the band of a generation, or of all TPUs if too little is published; leave out the system `without`."""
    all_figures = [figure for figure in PUBLISHED if figure.system != without]
    own = [figure for figure in all_figures if figure.generation == generation]
    has_own = len({figure.system for figure in own}) >= MIN_SYSTEMS
    used = own if has_own else all_figures
    shares = [figure.share for figure in used]
    systems = ", ".join(dict.fromkeys(figure.system for figure in used))
    subject = generation if has_own else "any TPU"
    return Band(min(shares), max(shares), f"{len(used)} published figures for {subject}: {systems}")


@dataclass(frozen=True)
class Range:
    """From the lowest to the highest expected value."""

    low: float
    high: float


@dataclass(frozen=True)
class Speed:
    """Speed of a step on one slice."""

    floor_seconds: float
    bound: Literal["compute", "memory"]
    """Limit of the floor."""
    seconds: Range
    """Expected."""
    tokens_per_s: Range
    """Expected."""
    floor_tokens_per_s: float
    source: str
    """Source of the expectation."""


def estimate_speed(
    generation: Generation,
    devices: int,
    flops: float,
    least_flops: float,
    moved_bytes: float,
    tokens: float,
    precision: str = "bf16",
) -> Speed:
    """Estimate the speed of a step.

    flops: the model's, over all devices; least_flops: without masked attention; moved_bytes: state that one device
    reads and writes; tokens: of a step.
    """
    rate = devices * generation.peak_bf16_per_device
    compute = least_flops / rate
    memory = moved_bytes / generation.bandwidth_per_device
    floor = max(compute, memory)
    band = expected_band(generation.name)
    fast, slow = (max(memory, flops / rate) / share for share in (band.high, band.low))
    note = "" if precision == "bf16" else f"; all in bf16, and {precision} is slower"
    return Speed(
        floor,
        "memory" if memory > compute else "compute",
        Range(fast, slow),
        Range(tokens / slow, tokens / fast),
        tokens / floor,
        band.source + note,
    )


GPU_SLOWDOWN = 2.0
GPU_SOURCE = "a guess for GPUs, once to twice the floor: an H100 took 1.3 times with GPT-2 124M"


def estimate_gpu_speed(compute_seconds: float, memory_seconds: float, tokens: float) -> Speed:
    """Estimate the speed of a step whose kernels take at least these times, by what limits each."""
    floor = compute_seconds + memory_seconds
    return Speed(
        floor,
        "memory" if memory_seconds > compute_seconds else "compute",
        Range(floor, GPU_SLOWDOWN * floor),
        Range(tokens / (GPU_SLOWDOWN * floor), tokens / floor),
        tokens / floor,
        GPU_SOURCE,
    )


@dataclass(frozen=True)
class Cost:
    """Hours and dollars to train on some tokens; None: the price is unknown."""

    hours: Range
    on_demand: Range | None
    """Without preemptions, as `spot`."""
    spot: Range | None
    region: str | None


def estimate_cost(
    tokens_per_s: Range, tokens: float, price: Price | None, *, members: int = 1, free: bool = False
) -> Cost:
    """Estimate hours and dollars at `tokens_per_s` of all members together; `price`: one member's slice."""
    hours = Range(*(tokens / rate / 3600 for rate in (tokens_per_s.high, tokens_per_s.low)))

    def dollars(rate: float | None) -> Range | None:
        rate = 0.0 if free else rate
        return None if rate is None else Range(hours.low * members * rate, hours.high * members * rate)

    on_demand, spot, region = (price.on_demand, price.spot, price.region) if price else (None, None, None)
    return Cost(hours, dollars(on_demand), dollars(spot), region)
