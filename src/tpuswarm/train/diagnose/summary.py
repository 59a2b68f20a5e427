"""The end of a run in one short table: where the time went, how fast the steps were, how much of the peak that is."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tpuswarm.train.diagnose.finding import Finding
from tpuswarm.train.diagnose.times import TRAINING

SHOWN = 0.0005
"""A place with a smaller share of the time is left out of the table."""


@dataclass(frozen=True)
class Summary:
    """What one process did with its time."""

    seconds: Mapping[str, float]
    """Of each place of times.PLACES; together the process's time on this run."""
    steps: int
    """Steps of this process."""
    tokens: int
    """Tokens of these steps."""
    flops_per_step: int | None
    """The model's, over all devices; None where some of its operations cannot be counted."""
    peak: float | None
    """FLOP/s of one device at best; None where that is not known."""
    devices: int
    unit: str = "tokens"
    """What the tokens are: tokens, or rows where a row counts for one."""
    findings: Sequence[Finding] = ()
    """What was found and said on the way, with the last counts."""

    @property
    def training(self) -> float:
        """Seconds from step to step."""
        return sum(self.seconds[place] for place in TRAINING)

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens a second of training; None without a step."""
        return self.tokens / self.training if self.steps and self.training > 0 else None

    @property
    def flops_per_s(self) -> float | None:
        """Model FLOPs a second of training."""
        return self.flops_per_step * self.steps / self.training if self.flops_per_step and self.training > 0 else None

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation: flops_per_s over the peak of all devices."""
        return self.flops_per_s / (self.peak * self.devices) if self.flops_per_s and self.peak else None

    def facts(self) -> dict[str, Any]:
        """For events.jsonl."""
        return {
            "seconds": dict(self.seconds),
            "steps": self.steps,
            "tokens_per_s": self.tokens_per_s,
            "unit": self.unit,
            "flops_per_s": self.flops_per_s,
            "mfu": self.mfu,
            "findings": [{"kind": each.kind, "message": each.message, **each.numbers} for each in self.findings],
        }


def rows(facts: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """The table of `Summary.facts()`: name, value, share of the time."""
    whole = sum(facts["seconds"].values())
    made = [
        (place, f"{seconds:,.1f} s", f"{seconds / whole:.1%}")
        for place, seconds in facts["seconds"].items()
        if seconds >= SHOWN * whole
    ]
    made.append(("total", f"{whole:,.1f} s", ""))
    if facts["tokens_per_s"] is not None:
        made.append((f"{facts['unit']}/s while training", f"{facts['tokens_per_s']:,.0f}", ""))
    made.append(("MFU (model FLOPs utilisation)", "–" if facts["mfu"] is None else f"{facts['mfu']:.1%}", ""))
    return made


def sentence(facts: Mapping[str, Any]) -> str:
    """The three largest parts of the time, in words."""
    whole = sum(facts["seconds"].values())
    largest = sorted(facts["seconds"].items(), key=lambda part: -part[1])[:3]
    return f"of {whole:,.1f} s: " + ", ".join(f"{place} {seconds / whole:.0%}" for place, seconds in largest)
