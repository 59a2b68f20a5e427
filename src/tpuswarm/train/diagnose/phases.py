"""Measure where the time of a process goes: each second belongs to one phase."""

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from tpuswarm.train.diagnose.finding import Finding

SET_UP, COMPILING, STEPS, WAITING, READING, USER, EVALUATION, CHECKPOINTS = PHASES = (
    "set-up",
    "compiling",
    "steps on the devices",
    "waiting for data",
    "reading device arrays",
    "your code between steps",
    "evaluation",
    "checkpoints",
)
TRAINING = (STEPS, WAITING, READING, USER)
MIN_SHOWN_SHARE = 0.0005


class Stopwatch:
    """A stopwatch that runs in one phase at a time; the phases add up to the time since it was made."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        self._phase, self._phase_start = SET_UP, time.perf_counter()

    def switch(self, phase: str) -> str:
        """Start a phase; return the phase before."""
        now = time.perf_counter()
        self._seconds[self._phase] += now - self._phase_start
        before, self._phase, self._phase_start = self._phase, phase, now
        return before

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        before = self.switch(phase)
        try:
            yield
        finally:
            self.switch(before)

    def move(self, seconds: float, phase: str) -> None:
        """Count seconds that just passed to another phase."""
        self._seconds[self._phase] -= seconds
        self._seconds[phase] += seconds

    def seconds(self, *phases: str) -> float:
        running = time.perf_counter() - self._phase_start if self._phase in phases else 0.0
        return running + sum(self._seconds[phase] for phase in phases)

    def by_phase(self) -> dict[str, float]:
        return {phase: self.seconds(phase) for phase in PHASES}


def summarize(
    seconds: Mapping[str, float],
    steps: int,
    tokens: int,
    flops: int | None,
    peak: float | None,
    unit: str = "tokens",
    findings: Sequence[Finding] = (),
) -> dict[str, Any]:
    """Return the summary of one process's work on a run, for events.jsonl.

    seconds: by phase; tokens, flops: of all its steps, flops None if some operations cannot be counted; peak: FLOP/s of
    all devices at best, None if unknown; unit: tokens or rows; findings: with their last counts.
    """
    training_s = sum(seconds[phase] for phase in TRAINING)
    rate = flops / training_s if flops and training_s > 0 else None
    return {
        "seconds": dict(seconds),
        "steps": steps,
        "tokens_per_s": tokens / training_s if steps and training_s > 0 else None,
        "unit": unit,
        "flops_per_s": rate,
        "mfu": rate / peak if rate and peak else None,
        "findings": [{"kind": finding.kind, "message": finding.message, **finding.numbers} for finding in findings],
    }


def summary_rows(summary: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return a summary as a table of name, value, and share of the time."""
    total_s = sum(summary["seconds"].values())
    rows = [
        (phase, f"{seconds:,.1f} s", f"{seconds / total_s:.1%}")
        for phase, seconds in summary["seconds"].items()
        if seconds >= MIN_SHOWN_SHARE * total_s
    ]
    rows.append(("total", f"{total_s:,.1f} s", ""))
    if summary["tokens_per_s"] is not None:
        rows.append((f"{summary['unit']}/s while training", f"{summary['tokens_per_s']:,.0f}", ""))
    if summary["mfu"] is not None:
        rows.append(("MFU (model FLOPs utilisation)", f"{summary['mfu']:.1%}", ""))
    return rows


def summary_sentence(summary: Mapping[str, Any]) -> str:
    """Return a sentence with the three longest phases."""
    total_s = sum(summary["seconds"].values())
    longest = sorted(summary["seconds"].items(), key=lambda item: -item[1])[:3]
    return f"of {total_s:,.1f} s: " + ", ".join(f"{phase} {seconds / total_s:.0%}" for phase, seconds in longest)
