"""Run all diagnostics of one run; the training loop calls this module only."""

import os
from collections.abc import Callable, Generator
from typing import Any

from tpuswarm.catalog import peak_flops
from tpuswarm.config.formatting import token_unit
from tpuswarm.train.diagnose import phases
from tpuswarm.train.diagnose.finding import Finding
from tpuswarm.train.diagnose.host_sync import HostSync
from tpuswarm.train.diagnose.machine_faults import cpu_fallback, dead_variables
from tpuswarm.train.diagnose.phases import Stopwatch, summarize
from tpuswarm.train.diagnose.program_faults import float32_in_bf16, gradients, half_empty, host_callbacks, tied_weights
from tpuswarm.train.diagnose.recompilation import Recompilation
from tpuswarm.train.program.compiled import Compiled

WARM_UP_STEPS = 2
STARVED_SHARE = 0.2
"""Share of the training time spent waiting for data from which it is reported."""
STARVATION_WINDOW_STEPS, STARVATION_WINDOW_S = 20, 2.0
"""Least length of the window over which the share is measured."""


class Diagnostics:
    """A context manager around one process's work on one run."""

    def __init__(self) -> None:
        self.stopwatch = Stopwatch()
        self._recompilation = Recompilation(lambda seconds: self.stopwatch.move(seconds, phases.COMPILING))
        self._host_sync = HostSync(lambda seconds: self.stopwatch.move(seconds, phases.READING))
        self._starvation = Starvation()
        self._steps = 0
        self._flops_per_step: int | None = None
        self._findings: list[Finding] = []
        """Findings whose numbers are final."""

    def __enter__(self) -> "Diagnostics":
        self._recompilation.start()
        self._host_sync.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._host_sync.stop()
        self._recompilation.stop()

    def at_start(self, compiled: Compiled, batch: int) -> list[Finding]:
        """Return the findings before the first step; batch: rows of a step."""
        device, micro_batch = compiled.mesh.devices.flat[0], batch // compiled.choice.accumulate
        checks: tuple[Callable[[], list[Finding]], ...] = (
            lambda: cpu_fallback(device.platform),
            lambda: dead_variables(os.environ),
            lambda: tied_weights(compiled.program),
            lambda: gradients(compiled, micro_batch),
            lambda: host_callbacks(compiled.jaxpr),
            lambda: float32_in_bf16(compiled),
            lambda: half_empty(compiled.flops, device.device_kind, micro_batch, compiled.mesh.size),
            lambda: self._count_flops(compiled),
        )
        found = [finding for check in checks for finding in _run_check(check)]
        self._findings += found
        return found

    def _count_flops(self, compiled: Compiled) -> list[Finding]:
        self._flops_per_step = compiled.flops.total if not compiled.flops.unknown else None
        return []

    def after_step(self, step: int, wait_s: float) -> list[Finding]:
        """Return the new findings after `step` was dispatched; wait_s: time spent waiting for its batch."""
        self._steps += 1
        self.stopwatch.move(wait_s, phases.WAITING)
        found = self._recompilation.new_findings(step) + self._host_sync.new_findings()
        waiting_s, training_s = self.stopwatch.seconds(phases.WAITING), self.stopwatch.seconds(*phases.TRAINING)
        if self._steps <= WARM_UP_STEPS:
            self._starvation.begin_window(step, waiting_s, training_s)
        elif starved := self._starvation.after_step(step, waiting_s, training_s):
            self._findings.append(starved)
            found.append(starved)
        return found

    def watch_user_code(self, loop: Generator[Any, None, Any]) -> Generator[Any, None, Any]:
        """Yield the items of `loop` and return its value; measure the user's code between items."""
        try:
            while True:
                try:
                    step = next(loop)
                except StopIteration as end:
                    return end.value
                before = self.stopwatch.switch(phases.USER)
                self._host_sync.enter_user_code(step.row["step"])
                try:
                    yield step
                finally:
                    self._host_sync.leave_user_code()
                    self.stopwatch.switch(before)
        finally:
            loop.close()

    def summary(self, compiled: Compiled, tokens_per_step: int) -> dict[str, Any]:
        """Return the summary of the run so far (phases.summarize)."""
        peak = peak_flops(compiled.mesh.devices.flat[0].device_kind, compiled.options.precision)
        return summarize(
            self.stopwatch.by_phase(),
            self._steps,
            tokens=self._steps * tokens_per_step,
            flops=self._flops_per_step and self._flops_per_step * self._steps,
            peak=peak and peak * compiled.mesh.size,
            unit=token_unit(compiled.program.tokens_per_row),
            findings=[*self._findings, *self._recompilation.totals(), *self._host_sync.totals()],
        )


def _run_check(check: Callable[[], list[Finding]]) -> list[Finding]:
    """Return the findings of a check; if it fails, a finding about that, because advice must not end a run."""
    try:
        return check()
    except Exception as error:  # noqa: BLE001  # programs and machines are of all kinds
        return [Finding("unknown", f"a diagnostic failed; training continues: {type(error).__name__}: {error}")]


class Starvation:
    """Reports once if training spends a large share of its time waiting for data."""

    def __init__(self) -> None:
        self._is_reported = False
        self.begin_window(0, 0.0, 0.0)

    def begin_window(self, step: int, waiting_s: float, training_s: float) -> None:
        self._step, self._waiting_s, self._training_s = step, waiting_s, training_s

    def after_step(self, step: int, waiting_s: float, training_s: float) -> Finding | None:
        """Return a finding if there is one; waiting_s, training_s: so far, the latter includes the former."""
        steps, wait_s, window_s = step - self._step, waiting_s - self._waiting_s, training_s - self._training_s
        if self._is_reported or steps < STARVATION_WINDOW_STEPS or window_s < STARVATION_WINDOW_S:
            return None
        first, last = self._step + 1, step
        self.begin_window(step, waiting_s, training_s)
        if wait_s < STARVED_SHARE * window_s:
            return None
        self._is_reported = True
        return Finding(
            "starvation",
            f"the devices waited for data {wait_s / window_s:.0%} of the time from step {first} to {last} "
            f"({wait_s / steps:.3f} of {window_s / steps:.3f} s per step): the source's rows() is slower than a step; "
            "prepare its rows before training (a memory-mapped file), or build them with fewer, larger NumPy calls",
            {"first_step": first, "last_step": last, "wait_s": wait_s, "window_s": window_s},
        )
