"""How fast at best, how fast to expect, and for how many dollars.

The floor is a time that this program cannot beat, from two numbers that can be trusted without a TPU:

- model FLOPs over the chips' peak. Of an attention kernel only half is asked: a causal mask hides the rest, and the
  kernel skips it. The peak is that of bf16; float32 products are no faster.
- bytes over the bandwidth of the HBM. Counted is what one device holds of the state (parameters and the optimizer's),
  read once and written once: every update of all parameters needs that (of frozen ones, only the reading). Activations,
  and weights read again by each micro-batch, come on top; the compiler's own count of bytes will not do, for it counts
  a loop's body once.

What is expected lies above it by what others have published (`published.py`): a guess, and marked as one. They have
published shares of the peak; where the bandwidth is what limits, the same share of it is the guess.
"""

from dataclasses import dataclass
from typing import Literal

from tpuswarm.catalog import Generation, Price
from tpuswarm.plan.published import band


@dataclass(frozen=True)
class Range:
    """From the worst to the best that is expected."""

    low: float
    high: float


@dataclass(frozen=True)
class Speed:
    """Of one step on one slice."""

    floor_seconds: float
    bound: Literal["compute", "memory"]
    """Which of the two numbers is the floor."""
    seconds: Range
    """Expected; `low` is the shortest."""
    tokens_per_s: Range
    """Expected."""
    floor_tokens_per_s: float
    """At the floor: no program reaches it."""
    source: str
    """Of the expectation."""


def speed(
    generation: Generation,
    devices: int,
    flops: float,
    least_flops: float,
    moved_bytes: float,
    tokens: float,
    precision: str = "bf16",
) -> Speed:
    """Of a step over `devices`.

    flops: of the model, over all devices (`Flops.total`); least_flops: those that nothing can skip (`Flops.least`);
    moved_bytes: what one device must read and write of the state; tokens: of a step.
    """
    rate = devices * generation.peak_bf16_per_device
    compute = least_flops / rate
    memory = moved_bytes / generation.bandwidth_per_device
    floor = max(compute, memory)
    guess = band(generation.name)
    fast, slow = (max(memory, flops / rate) / share for share in (guess.high, guess.low))
    slower = "" if precision == "bf16" else f"; all in bf16, and {precision} is slower"
    return Speed(
        floor,
        "memory" if memory > compute else "compute",
        Range(fast, slow),
        Range(tokens / slow, tokens / fast),
        tokens / floor,
        guess.source + slower,
    )


@dataclass(frozen=True)
class Cost:
    """Of so many tokens, by the expected speed; None: the price is unknown."""

    hours: Range
    on_demand: Range | None
    spot: Range | None
    """Dollars. Time lost to preemptions is not in them."""
    region: str | None


def cost(tokens_per_s: Range, tokens: float, price: Price | None, *, members: int = 1, free: bool = False) -> Cost:
    """Hours and dollars of `tokens`, at `tokens_per_s` of all members together.

    price: of one member's slice an hour. free: the TPUs cost nothing, as under a grant; their traffic still does.
    """
    hours = Range(*(tokens / rate / 3600 for rate in (tokens_per_s.high, tokens_per_s.low)))

    def dollars(rate: float | None) -> Range | None:
        rate = 0.0 if free else rate
        return None if rate is None else Range(hours.low * members * rate, hours.high * members * rate)

    on_demand, spot, region = (price.on_demand, price.spot, price.region) if price else (None, None, None)
    return Cost(hours, dollars(on_demand), dollars(spot), region)
