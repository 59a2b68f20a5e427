"""Traces of a few training steps, for xprof and TensorBoard; taken when a run begins, or when somebody asks."""

import json
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from tpuswarm.train.process.atomic import write_atomically
from tpuswarm.train.run.directory import Run, writing

STEPS = 5
"""In one trace: enough to see a rhythm, small enough to open."""
WARM_UP = 10
"""Steps before the trace of `--profile`."""
LOOK = 0.5
"""Seconds between looks for a request."""
REQUEST = "profile-request.json"
TRACE = "profile"
"""The event of a trace, or of why there is none."""
HOW_TO_OPEN = "pip install tensorboard xprof, then tensorboard --logdir {folder} (Profile), or xprof {folder}"


def traces(run: Path) -> list[Path]:
    """The folders of a run's traces, the oldest first."""
    return sorted(path.parent for path in (run / "tensorboard/plugins/profile").glob("*/*.xplane.pb"))


def request(run: Path, steps: int) -> None:
    """Ask the process that trains `run` to trace its next steps."""
    with writing(run / REQUEST):
        write_atomically(run / REQUEST, json.dumps({"steps": steps}))


def withdraw(run: Path) -> bool:
    """Take a request back; False if it was taken up already."""
    with suppress(FileNotFoundError):
        (run / REQUEST).unlink()
        return True
    return False


class Profiler:
    """Starts and stops JAX's profiler around steps of one process; a trace that fails is said, and training goes on."""

    def __init__(self, run: Run, first_step: int, last_step: int, asked: bool):
        """asked: for a trace after WARM_UP. Of several hosts the one that writes the run traces itself."""
        self._run, self._last_step = run.folder, last_step
        self._listens = run.writes
        asked = asked and run.writes
        self._start_after = max(first_step, min(first_step + WARM_UP, last_step - STEPS)) if asked else None
        self._steps = STEPS
        self._end_after: int | None = None
        self._began = self._done = 0
        self._looked_at = time.monotonic()

    @property
    def _folder(self) -> Path:
        return self._run / "tensorboard"

    def before(self, done: int) -> str | None:
        """Before the step after `done`: start, if one is due. What went wrong, in words."""
        if self._end_after is not None:
            return None
        if self._listens and time.monotonic() - self._looked_at > LOOK:
            self._take_request(done)
        if self._start_after is None or done < self._start_after:
            return None
        import jax

        self._start_after = None
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # hooks in every thread, which slow each call
        try:
            jax.profiler.start_trace(self._folder, profiler_options=options)
        except RuntimeError as error:  # somebody else traces this process
            return f"no trace was taken: {error}"
        self._began, self._end_after = done + 1, min(done + self._steps, self._last_step)
        return None

    def after(self, done: int, metrics: Any) -> str | None:
        """After step `done` was dispatched: stop, if it was the last one of a trace. What came of it, in words."""
        self._done = done
        if self._end_after is None or done < self._end_after:
            return None
        import jax

        jax.block_until_ready(metrics)
        return self.close()

    def close(self) -> str | None:
        """Stop the trace under way, if there is one, and write it. What came of it, in words."""
        if self._end_after is None:
            return None
        steps, self._end_after = f"steps {self._began} to {self._done}", None
        import jax

        before = set(self._made())
        try:
            jax.profiler.stop_trace()
        except (RuntimeError, OSError) as error:
            for folder in set(self._made()) - before:
                shutil.rmtree(folder, ignore_errors=True)
            _forget_trace()
            reason = "the disk is full" if "No space left" in str(error) else str(error).splitlines()[0]
            return f"the trace of {steps} could not be written: {reason}; training continues without it"
        folder = self._folder
        return f"trace of {steps} in {folder}; to open it: {HOW_TO_OPEN.format(folder=folder)}"

    def _made(self) -> list[Path]:
        return list((self._folder / "plugins/profile").glob("*"))

    def _take_request(self, done: int) -> None:
        self._looked_at = time.monotonic()
        path = self._run / REQUEST
        if path.exists():
            with suppress(OSError, ValueError, KeyError, TypeError):  # withdrawn meanwhile, or not ours
                self._start_after, self._steps = done, int(json.loads(path.read_text())["steps"])
            path.unlink(missing_ok=True)


def _forget_trace() -> None:
    """JAX keeps a trace that it could not write as if it were still under way, and would refuse the next one."""
    with suppress(ImportError, AttributeError):
        from jax._src.profiler import _profile_state

        _profile_state.reset()
