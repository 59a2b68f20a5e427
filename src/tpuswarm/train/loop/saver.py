"""Save the state of a run, and refuse states with NaN or infinity."""

import time
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from tpuswarm.config.units import parse_every
from tpuswarm.errors import InputError, RunFailed
from tpuswarm.train.diagnose import phases
from tpuswarm.train.diagnose.diagnostics import Diagnostics
from tpuswarm.train.loop.run_config import checked_settings
from tpuswarm.train.paths import leaf_paths
from tpuswarm.train.process.waiting import waiting
from tpuswarm.train.program.exchanged import without_base
from tpuswarm.train.run.best import best_step
from tpuswarm.train.run.checkpoint_writer import Checkpoints

if TYPE_CHECKING:
    from tpuswarm.train.loop.progress import Progress


class Saver:
    """Saves the state that a `Progress` has reached."""

    def __init__(self, progress: "Progress", diagnostics: Diagnostics):
        session = progress.session
        self._progress, self._stopwatch = progress, diagnostics.stopwatch
        self._interval = parse_every(session.settings["save_every"], "save_every")
        self.checkpoints = Checkpoints(
            session.run.checkpoints, session.settings["keep"], session.save_s, is_leader=session.run.writes,
            leader_process=session.agreement.leader_process,
            leader_saves_all=session.run.in_bucket and jax.process_count() > 1,
        )  # fmt: skip
        self.checkpoints.warn = partial(progress.note_once, "old checkpoint")
        self.checkpoints.pinned = best_step(session.run.folder)
        place = session.recipe.base_model
        self._base = session.recipe.shared_digest(place) if place else None
        self._saved_step = session.first_step or None  # a new run has no checkpoint yet
        self._save_time = time.monotonic()

    @property
    def saved_step(self) -> int:
        return self._saved_step or 0

    def is_due(self) -> bool:
        return self._interval.due(self._progress.step, time.monotonic() - self._save_time)

    def save(self, wait: bool) -> None:
        """Save the state, unless this step is saved already; wait: until the checkpoint is complete."""
        progress = self._progress
        if progress.step == self._saved_step:
            return
        with progress.pause_clock(), self._stopwatch.during(phases.CHECKPOINTS):
            if _not_finite(self._parameters()):
                raise self.failure(progress.step, "the parameters")
            position = progress.session.position(progress.step)
            about = {
                "wall_s": progress.wall_s,
                "lr_scale": progress.session.lr_scale,
                "settings": checked_settings(progress.session.config),
            } | ({"base": self._base} if self._base else {})
            session = progress.session
            state = without_base(session.recipe, session.compiled.program, progress.state)
            self.checkpoints.save(progress.step, state, about, position)
            if wait:
                with waiting(f"saving step {progress.step}"):
                    self.checkpoints.wait()
            self._saved_step, self._save_time = progress.step, time.monotonic()

    def failure(self, step: int, quantity: str) -> RunFailed:
        """Wait for the running save; return the error of a run in which `quantity` is NaN or infinite, with advice."""
        self.checkpoints.wait()
        bad = _not_finite(self._parameters())
        if step == 1 and quantity.startswith("loss"):
            advice = "no update came before, so look for NaNs in the data, and for a division by 0 in the loss"
        elif bad:
            clips = bool(self._progress.session.compiled.options.clip)
            advice = f"a lower learning rate{'' if clips else ' or --clip'} may help, unless the data has NaNs"
        else:
            advice = "check the data for NaNs"
        parameters = f"parameters not finite: {_first_names(bad)}" if bad else "all parameters are finite"
        return RunFailed(
            f"NaN or infinity at step {step} ({quantity}; {parameters}); the checkpoint of step {self.saved_step} is "
            f"safe; {advice}"
        )

    def _parameters(self) -> object:
        return self._progress.session.compiled.program.exchange().get(self._progress.state)


def require_finite(parameters: Any, source: str) -> None:
    """Raise InputError, naming the first leaves, if parameters from `source` hold NaN or infinity."""
    if bad := _not_finite(parameters):
        raise InputError(f"{source} gives NaN or infinity in {_first_names(bad)}: check what makes or holds them")


def _not_finite(tree: Any) -> list[str]:
    """Return the paths of the leaves that hold NaN or infinity."""
    finite = jax.device_get(_are_finite(tree))
    return [path for path, is_finite in zip(leaf_paths(tree), finite, strict=True) if not is_finite]


@jax.jit
def _are_finite(tree: Any) -> list[jax.Array]:
    return [jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree)]


def _first_names(paths: list[str]) -> str:
    return ", ".join(paths[:3]) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")
