"""All diagnostics of one run in one object: what the training loop talks to."""

import os
from collections.abc import Callable, Generator
from types import TracebackType
from typing import Any

from tpuswarm.catalog import peak_flops
from tpuswarm.config.formatting import token_unit
from tpuswarm.train.diagnose import cpu_fallback, times
from tpuswarm.train.diagnose.callbacks import host_callbacks
from tpuswarm.train.diagnose.environment import dead_variables
from tpuswarm.train.diagnose.finding import Finding
from tpuswarm.train.diagnose.gradients import gradients
from tpuswarm.train.diagnose.host_sync import HostSync
from tpuswarm.train.diagnose.products import float32_in_bf16, half_empty
from tpuswarm.train.diagnose.recompilation import Recompilation
from tpuswarm.train.diagnose.starvation import Starvation
from tpuswarm.train.diagnose.summary import facts
from tpuswarm.train.diagnose.tied_weights import tied_weights
from tpuswarm.train.diagnose.times import Times
from tpuswarm.train.program.compiled import Compiled

WARM_UP = 2
"""Steps after which training is what it will be."""


class Watch:
    """A context manager around one process's work on one run."""

    def __init__(self) -> None:
        self.times = Times()
        self._recompilation = Recompilation(lambda seconds: self.times.move(seconds, times.COMPILING))
        self._host_sync = HostSync(lambda seconds: self.times.move(seconds, times.READING))
        self._starvation = Starvation()
        self._steps = 0
        self._flops: int | None = None
        self._said: list[Finding] = []
        """What does not grow; the others count on."""

    def __enter__(self) -> "Watch":
        self._recompilation.start()
        self._host_sync.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._host_sync.stop()
        self._recompilation.stop()

    def at_start(self, compiled: Compiled, batch: int) -> list[Finding]:
        """What can be seen before the first step; batch: rows of a step."""
        device, micro_batch = compiled.mesh.devices.flat[0], batch // compiled.choice.accumulate
        looks: tuple[Callable[[], list[Finding]], ...] = (
            lambda: cpu_fallback.look(device),
            lambda: dead_variables(os.environ),
            lambda: tied_weights(compiled.program),
            lambda: gradients(compiled, micro_batch),
            lambda: host_callbacks(compiled.jaxpr),
            lambda: float32_in_bf16(compiled),
            lambda: half_empty(compiled.flops, device.device_kind, micro_batch, compiled.mesh.size),
            lambda: self._count_flops(compiled),
        )
        found = [finding for look in looks for finding in _unharmed(look)]
        self._said += found
        return found

    def _count_flops(self, compiled: Compiled) -> list[Finding]:
        self._flops = compiled.flops.total if not compiled.flops.unknown else None
        return []

    def after_step(self, step: int, waited: float) -> list[Finding]:
        """What can be said now that `step` was dispatched, for whose batch `waited` seconds passed."""
        self._steps += 1
        self.times.move(waited, times.WAITING)
        found = self._recompilation.look(step) + self._host_sync.look()
        waiting, training = self.times.of(times.WAITING), self.times.of(*times.TRAINING)
        if self._steps <= WARM_UP:
            self._starvation.begin(step, waiting, training)
        elif starved := self._starvation.look(step, waiting, training):
            self._said.append(starved)
            found.append(starved)
        return found

    def hand_out(self, loop: Generator[Any, None, Any]) -> Generator[Any, None, Any]:
        """What `loop` yields and returns, with an eye on the user's code that runs between two of its steps."""
        try:
            while True:
                try:
                    step = next(loop)
                except StopIteration as end:
                    return end.value
                before = self.times.go(times.USER)
                self._host_sync.theirs(step.row["step"])
                try:
                    yield step
                finally:
                    self._host_sync.ours()
                    self.times.go(before)
        finally:
            loop.close()

    def summary(self, compiled: Compiled, tokens_per_step: int) -> dict[str, Any]:
        """What became of the time so far: `facts`."""
        peak = peak_flops(compiled.mesh.devices.flat[0].device_kind, compiled.options.precision)
        return facts(
            self.times.all(),
            self._steps,
            tokens=self._steps * tokens_per_step,
            flops=self._flops and self._flops * self._steps,
            peak=peak and peak * compiled.mesh.size,
            unit=token_unit(compiled.program.tokens_per_row),
            findings=[*self._said, *self._recompilation.totals(), *self._host_sync.totals()],
        )


def _unharmed(look: Callable[[], list[Finding]]) -> list[Finding]:
    """What a look finds; where it fails itself, that: it must not end the run that it is to help."""
    try:
        return look()
    except Exception as error:  # noqa: BLE001  # programs and machines are of all kinds, and this is only advice
        return [Finding("unknown", f"a diagnostic failed; training continues: {type(error).__name__}: {error}")]
