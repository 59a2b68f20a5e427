"""Record a trace of a member's steps, in parts for the supervisor, which may run on another machine."""

import tempfile
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import jax

from tpuswarm.train.look import profile
from tpuswarm.train.recipe import Metrics

PART_BYTES = 2**20
"""Bytes in one report: a member whose reports fail to arrive is killed, and its link may be slow."""


@dataclass(frozen=True)
class TracePart:
    """A part of a trace, or its end."""

    steps: int
    problem: str = ""
    """The error, such as `could not start: …`, if there was one."""
    file: str = ""
    """The file's name below TensorBoard's folder; empty at the end."""
    data: bytes = b""
    """Data to append to the file."""
    last: bool = True


class Tracer:
    """Traces one process. `start` and `next_part` are for any thread, `after_step` for the one that trains."""

    def __init__(self) -> None:
        self._requested = self._steps = self._left = 0
        self._parts: deque[TracePart] = deque()
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def start(self, steps: int) -> None:
        """Trace the next steps."""
        self._requested = steps

    def next_part(self) -> TracePart | None:
        """Remove and return the next part, if any."""
        return self._parts.popleft() if self._parts else None

    def after_step(self, metrics: Metrics) -> None:
        """Start or stop the profiler after a dispatched step, once it is computed, so that whole steps are traced."""
        if self._folder is not None:
            self._left -= 1
            if not self._left:
                jax.block_until_ready(metrics)
                why = profile.stop_trace(Path(self._folder.name))
                self._stop(self._folder, f"could not be written: {why}" if why else "")
        elif self._requested:
            jax.block_until_ready(metrics)
            self._steps = self._left = self._requested
            self._requested = 0
            try:
                self._folder = tempfile.TemporaryDirectory(prefix="tpuswarm-trace-", ignore_cleanup_errors=True)
            except OSError as error:
                self._parts.append(TracePart(0, f"could not start: {error.strerror}"))
                return
            if why := profile.start_trace(Path(self._folder.name)):
                self._stop(self._folder, f"could not start: {why}")

    def _stop(self, folder: tempfile.TemporaryDirectory[str], problem: str) -> None:
        self._folder, root = None, Path(folder.name)
        steps, parts = self._steps - self._left, []
        try:
            with folder:
                for path in sorted(path for path in root.rglob("*") if path.is_file() and not problem):
                    name, data = path.relative_to(root).as_posix(), path.read_bytes()
                    for start in range(0, len(data), PART_BYTES):
                        parts.append(TracePart(steps, "", name, data[start : start + PART_BYTES], last=False))
        except OSError as error:
            problem, parts = f"could not be read: {error.strerror}", []
        self._parts.extend([*parts, TracePart(steps, problem)])
