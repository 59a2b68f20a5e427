"""All diagnostics of one run in one object: what the training loop talks to."""

import os
from collections.abc import Generator
from types import TracebackType
from typing import Any

from tpuswarm.catalog import peak_flops
from tpuswarm.train.diagnose import cpu_fallback, times
from tpuswarm.train.diagnose.callbacks import host_callbacks
from tpuswarm.train.diagnose.environment import dead_variables
from tpuswarm.train.diagnose.finding import Finding
from tpuswarm.train.diagnose.host_sync import HostSync
from tpuswarm.train.diagnose.matrix_unit import half_empty
from tpuswarm.train.diagnose.recompilation import Recompilation
from tpuswarm.train.diagnose.starvation import Starvation
from tpuswarm.train.diagnose.summary import Summary
from tpuswarm.train.diagnose.tied_weights import tied_weights
from tpuswarm.train.diagnose.times import Times
from tpuswarm.train.fit import Fitted

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

    def at_start(self, fitted: Fitted, batch: int) -> list[Finding]:
        """What can be seen before the first step; batch: rows of a step."""
        device, micro_batch = fitted.mesh.devices.flat[0], batch // fitted.choice.accumulate
        found = [
            *cpu_fallback.look(device),
            *dead_variables(os.environ),
            *tied_weights(fitted.program),
            *host_callbacks(fitted.jaxpr),
            *half_empty(fitted.flops, device.device_kind, micro_batch, fitted.mesh.size),
        ]
        self._said += found
        return found

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

    def summary(self, fitted: Fitted, tokens_per_step: int) -> Summary:
        """What became of the time so far."""
        device = fitted.mesh.devices.flat[0]
        return Summary(
            seconds=self.times.all(),
            steps=self._steps,
            tokens=self._steps * tokens_per_step,
            flops_per_step=fitted.flops.total if not fitted.flops.unknown else None,
            peak=peak_flops(device.device_kind, fitted.options.precision),
            devices=fitted.mesh.size,
            findings=[*self._said, *self._recompilation.totals(), *self._host_sync.totals()],
        )
