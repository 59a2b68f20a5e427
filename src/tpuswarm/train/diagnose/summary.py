"""The end of a run in one short table: where the time went, how fast the steps were, how much of the peak that is."""

from collections.abc import Mapping, Sequence
from typing import Any

from tpuswarm.train.diagnose.finding import Finding
from tpuswarm.train.diagnose.times import TRAINING

SHOWN = 0.0005
"""A place with a smaller share of the time is left out of the table."""


def facts(
    seconds: Mapping[str, float],
    steps: int,
    tokens: int,
    flops: int | None,
    peak: float | None,
    unit: str = "tokens",
    findings: Sequence[Finding] = (),
) -> dict[str, Any]:
    """What one process did with its time, for events.jsonl.

    seconds: of each place of times.PLACES; tokens, flops: of all its steps, None where some operations of the model
    cannot be counted; peak: FLOP/s of all devices at best, None where that is not known; unit: what the tokens are,
    tokens or rows; findings: what was found and said on the way, with the last counts.
    """
    training = sum(seconds[place] for place in TRAINING)
    rate = flops / training if flops and training > 0 else None
    return {
        "seconds": dict(seconds),
        "steps": steps,
        "tokens_per_s": tokens / training if steps and training > 0 else None,
        "unit": unit,
        "flops_per_s": rate,
        "mfu": rate / peak if rate and peak else None,
        "findings": [{"kind": each.kind, "message": each.message, **each.numbers} for each in findings],
    }


def rows(facts: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """The table of `facts`: name, value, share of the time."""
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
