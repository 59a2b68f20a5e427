"""How fast others have trained transformers on TPUs: what a plan's expected band rests on.

All were read in 2026-11. `share` is model FLOPs, counted as `train/program/flops.py` counts them, over what the chips'
peak would have done in the same time.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Published:
    """One published figure."""

    system: str
    model: str
    generation: str
    slice: str
    share: float
    """Of the peak."""
    tokens_per_s: float | None
    """Of one chip; None where only a share was published."""
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

ENOUGH = 3
"""Systems with figures of one generation that make a band of its own."""


@dataclass(frozen=True)
class Band:
    """The share of the peak to expect: a guess from what others reached, lowest and highest."""

    low: float
    high: float
    source: str


def band(generation: str, without: str = "") -> Band:
    """Of a generation where enough was published on it, else of all TPUs; `without` one system's figures."""
    known = [each for each in PUBLISHED if each.system != without]
    own = [each for each in known if each.generation == generation]
    used = own if len({each.system for each in own}) >= ENOUGH else known
    shares = [each.share for each in used]
    of = generation if used is own else "any TPU"
    systems = ", ".join(dict.fromkeys(each.system for each in used))
    return Band(min(shares), max(shares), f"{len(used)} published figures for {of}: {systems}")
