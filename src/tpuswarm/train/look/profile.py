"""Trace a few training steps for xprof and TensorBoard, at the start of a run or on request.

In a swarm, the process that holds the run asks the member for its files, because it may run on another machine.
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

TRACE_STEPS = 5
WARMUP_STEPS = 10
"""Before the trace of `--profile`."""
REQUEST_POLL_INTERVAL_S = 0.5
TENSORBOARD_FOLDER = "tensorboard"
"""In a run; holds a folder for each member."""
TRACE_PATTERN = "plugins/profile/*/*.xplane.pb"
TRACE_EVENT = "profile"
HOW_TO_OPEN = "pip install xprof, then xprof {folder}"


class TraceRequest(NamedTuple):
    steps: int
    member: str | None
    id: str
    """Distinguishes the events that answer requests for the same member."""


def trace_folders(run: Path, member: str | None = None) -> list[Path]:
    """Return the folders of a run's traces, of one member or all, the oldest first."""
    root = run / TENSORBOARD_FOLDER
    files = [*root.glob(TRACE_PATTERN), *root.glob(f"*/{TRACE_PATTERN}")]
    folders = [file.parent for file in files if member in (None, file.relative_to(root).parts[0])]
    return sorted(folders, key=lambda folder: (folder.name, folder))


def request_trace(run: Path, steps: int, member: str | None = None) -> str:
    """Ask the process that trains `run`, on any machine, to trace its next steps or those of a member.

    Returns the id of the request; the event that answers a request for a member has it.
    """
    request = TraceRequest(steps, member, secrets.token_hex(8))
    text = json.dumps(request._asdict())
    if owner_elsewhere(run):
        send_request(run, TRACE_REQUEST, text)
    else:
        with writing(run / TRACE_REQUEST):
            write_atomically(run / TRACE_REQUEST, text)
    return request.id


def take_request(run: Path) -> TraceRequest | None:
    """Remove and return the request, if there is a valid one."""
    path, valid = run / TRACE_REQUEST, None
    if path.exists():
        with suppress(OSError, ValueError, TypeError):  # withdrawn meanwhile, or invalid
            request = TraceRequest(**json.loads(path.read_text()))
            if isinstance(request.steps, int) and request.steps > 0 and isinstance(request.member, str | None):
                valid = request
        path.unlink(missing_ok=True)
    return valid


def withdraw_request(run: Path) -> None:
    (run / TRACE_REQUEST).unlink(missing_ok=True)


def trace_sentence(what: str, folder: Path) -> str:
    """folder: of TensorBoard."""
    return f"trace of {what} in {folder}; to open it: {HOW_TO_OPEN.format(folder=folder)}"


class Profiler:
    """Run JAX's profiler around some steps of this process; training continues if a trace fails."""

    def __init__(self, run: Run, first_step: int, last_step: int, trace_first: bool):
        """trace_first: trace after WARMUP_STEPS. Of several hosts only the one that writes the run is traced."""
        self._run, self._folder, self._last_step = run.folder, run.folder / TENSORBOARD_FOLDER, last_step
        self._takes_requests = run.writes
        first = max(first_step, min(first_step + WARMUP_STEPS, last_step - TRACE_STEPS))
        self._start_after = first if trace_first and run.writes else None
        self._steps = TRACE_STEPS
        self._end_after: int | None = None
        self._first_traced = self._done = 0
        self._polled_at = time.monotonic()

    def before(self, done: int) -> str | None:
        """Start a due trace before the step after `done`; return a sentence if it fails."""
        if self._end_after is not None:
            return None
        if self._takes_requests and time.monotonic() - self._polled_at > REQUEST_POLL_INTERVAL_S:
            self._polled_at = time.monotonic()
            if request := take_request(self._run):
                self._start_after, self._steps = done, request.steps
        if self._start_after is None or done < self._start_after:
            return None
        self._start_after = None
        if error := start_trace(self._folder):
            return f"no trace was taken: {error}"
        self._first_traced, self._end_after = done + 1, min(done + self._steps, self._last_step)
        return None

    def after(self, done: int, metrics: Any) -> str | None:
        """Stop a trace after its last step was dispatched; return a sentence about it."""
        self._done = done
        if self._end_after is None or done < self._end_after:
            return None
        import jax

        jax.block_until_ready(metrics)
        return self.close()

    def close(self) -> str | None:
        """Stop and write the current trace, if any; return a sentence about it."""
        if self._end_after is None:
            return None
        steps, self._end_after = f"steps {self._first_traced} to {self._done}", None
        if error := stop_trace(self._folder):
            return f"the trace of {steps} could not be written: {error}; training continues without it"
        return trace_sentence(steps, self._folder)


def start_trace(folder: Path) -> str:
    """Begin a trace of this process; return the error, if any."""
    import jax

    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # its hooks slow each call in every thread
    try:
        jax.profiler.start_trace(folder, profiler_options=options)
    except RuntimeError as error:  # this process is being traced already
        return str(error)
    return ""


def stop_trace(folder: Path) -> str:
    """Write the trace that `start_trace` began; return the error, if any."""
    import jax

    def folders() -> set[Path]:
        return set((folder / "plugins/profile").glob("*"))

    before = folders()
    try:
        jax.profiler.stop_trace()
    except (RuntimeError, OSError) as error:
        for incomplete in folders() - before:
            shutil.rmtree(incomplete, ignore_errors=True)
        _forget_trace()
        return "the disk is full" if "No space left" in str(error) else first_line(error)
    return ""


def _forget_trace() -> None:
    """After a failed write JAX would refuse the next trace."""
    with suppress(ImportError, AttributeError):
        from jax._src.profiler import _profile_state

        _profile_state.reset()
