"""Save the state of a run, unless it holds NaN or infinity."""

import time

from tpuswarm.config.units import parse_every
from tpuswarm.errors import RunFailed
from tpuswarm.train.diagnose import phases
from tpuswarm.train.diagnose.diagnostics import Diagnostics
from tpuswarm.train.loop.finite import diverged, not_finite
from tpuswarm.train.loop.progress import Progress
from tpuswarm.train.process.waiting import waiting
from tpuswarm.train.run.best import best_step
from tpuswarm.train.run.checkpoint import Checkpoints


class Saver:
    """Saves the state that a `Progress` has reached."""

    def __init__(self, progress: Progress, diagnostics: Diagnostics):
        session = progress.session
        self._progress, self._diagnostics = progress, diagnostics
        self._interval = parse_every(session.settings["save_every"], "save_every")
        keep, writes = session.settings["keep"], session.run.writes
        self.checkpoints = Checkpoints(session.run.checkpoints, keep, session.save_s, writes)
        self.checkpoints.pinned = best_step(session.run.folder)
        self._saved_step = session.first_step or None  # a new run has no checkpoint yet
        self._saved_at = time.monotonic()

    @property
    def saved_step(self) -> int:
        return self._saved_step or 0

    def is_due(self) -> bool:
        return self._interval.due(self._progress.step, time.monotonic() - self._saved_at)

    def save(self, wait: bool) -> None:
        """Save the state, unless this step is saved already; wait: until the checkpoint is complete."""
        progress = self._progress
        if progress.step == self._saved_step:
            return
        with progress.pause_clock(), self._diagnostics.stopwatch.during(phases.CHECKPOINTS):
            if not_finite(self._params()):
                raise self.failure(progress.step, "the parameters")
            position = progress.session.position(progress.step)
            self.checkpoints.save(progress.step, progress.state, {"wall_s": progress.wall_s}, position)
            if wait:
                with waiting(f"saving step {progress.step}"):
                    self.checkpoints.wait()
            self._saved_step, self._saved_at = progress.step, time.monotonic()

    def failure(self, step: int, quantity: str) -> RunFailed:
        """Wait for the running save; return the error of a run in which `quantity` is NaN or infinite."""
        self.checkpoints.wait()
        clips = bool(self._progress.session.compiled.options.clip)
        return diverged(self._params(), step, quantity, self.saved_step, clips)

    def _params(self) -> object:
        return self._progress.session.compiled.program.exchange().get(self._progress.state)
