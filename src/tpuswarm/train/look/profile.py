"""Traces of a few training steps, for xprof and TensorBoard; taken when a run begins, or when somebody asks.

A process takes those of itself. In a swarm the one that holds the run asks the member, which hands its files over: its
machine may be another one.
"""

import json
import secrets
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from tpuswarm.errors import first_line
from tpuswarm.train.process.atomic import write_atomically
from tpuswarm.train.run.directory import Run, writing
from tpuswarm.train.storage.sync import TRACE_REQUEST, owner_elsewhere, send_request

STEPS = 5
"""In one trace: enough to see a rhythm, small enough to open."""
WARM_UP = 10
"""Steps before the trace of `--profile`."""
LOOK = 0.5
"""Seconds between looks for a request."""
BOARD = "tensorboard"
"""Where TensorBoard looks; in it, a member's in a folder of its name."""
TAKEN = "plugins/profile/*/*.xplane.pb"
TRACE = "profile"
"""The event of a trace, or of why there is none."""
HOW_TO_OPEN = "pip install xprof, then xprof {folder}"


class Request(NamedTuple):
    """What somebody asks for."""

    steps: int
    member: str | None
    """Of a swarm."""
    id: str
    """Of two that ask for the same member, each is told its own."""


def traces(run: Path, member: str | None = None) -> list[Path]:
    """The folders of a run's traces, of one member or all, the oldest first."""
    found = [*(run / BOARD).glob(TAKEN), *(run / BOARD).glob(f"*/{TAKEN}")]
    folders = [path.parent for path in found if member in (None, path.relative_to(run / BOARD).parts[0])]
    return sorted(folders, key=lambda folder: (folder.name, folder))


def request(run: Path, steps: int, member: str | None = None) -> str:
    """Ask the process that trains `run`, wherever it is, to trace its next steps, or those of a member.

    Returns the request's id, which is in the event that answers it where that is of a member.
    """
    made = Request(steps, member, secrets.token_hex(8))
    asked = json.dumps(made._asdict())
    if owner_elsewhere(run):
        send_request(run, TRACE_REQUEST, asked)
    else:
        with writing(run / TRACE_REQUEST):
            write_atomically(run / TRACE_REQUEST, asked)
    return made.id


def take_request(run: Path) -> Request | None:
    """What somebody asked for; None where nobody did, or it is none. It is taken up now."""
    path, found = run / TRACE_REQUEST, None
    if path.exists():
        with suppress(OSError, ValueError, TypeError):  # withdrawn meanwhile, or not ours
            asked = Request(**json.loads(path.read_text()))
            if isinstance(asked.steps, int) and asked.steps > 0 and isinstance(asked.member, str | None):
                found = asked
        path.unlink(missing_ok=True)
    return found


def withdraw(run: Path) -> bool:
    """Take a request back; False if it was taken up already."""
    with suppress(FileNotFoundError):
        (run / TRACE_REQUEST).unlink()
        return True
    return False


def taken_sentence(what: str, folder: Path) -> str:
    """What came of a trace, and how to see it; folder: TensorBoard's."""
    return f"trace of {what} in {folder}; to open it: {HOW_TO_OPEN.format(folder=folder)}"


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
        return self._run / BOARD

    def before(self, done: int) -> str | None:
        """Before the step after `done`: start, if one is due. What went wrong, in words."""
        if self._end_after is not None:
            return None
        if self._listens and time.monotonic() - self._looked_at > LOOK:
            self._take_request(done)
        if self._start_after is None or done < self._start_after:
            return None
        self._start_after = None
        if why := start(self._folder):
            return f"no trace was taken: {why}"
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
        why = stop(self._folder)
        if why:
            return f"the trace of {steps} could not be written: {why}; training continues without it"
        return taken_sentence(steps, self._folder)

    def _take_request(self, done: int) -> None:
        self._looked_at = time.monotonic()
        if found := take_request(self._run):
            self._start_after, self._steps = done, found.steps


def start(folder: Path) -> str:
    """Begin a trace of this process; why there is none, in words, or nothing."""
    import jax

    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # hooks in every thread, which slow each call
    try:
        jax.profiler.start_trace(folder, profiler_options=options)
    except RuntimeError as error:  # somebody else traces this process
        return str(error)
    return ""


def stop(folder: Path) -> str:
    """End the trace that `start` began, and write it; why it could not be written, in words, or nothing."""
    import jax

    before = set(_made(folder))
    try:
        jax.profiler.stop_trace()
    except (RuntimeError, OSError) as error:
        for made in set(_made(folder)) - before:
            shutil.rmtree(made, ignore_errors=True)
        _forget_trace()
        return "the disk is full" if "No space left" in str(error) else first_line(error)
    return ""


def _made(folder: Path) -> list[Path]:
    return list((folder / "plugins/profile").glob("*"))


def _forget_trace() -> None:
    """JAX keeps a trace that it could not write as if it were still under way, and would refuse the next one."""
    with suppress(ImportError, AttributeError):
        from jax._src.profiler import _profile_state

        _profile_state.reset()
