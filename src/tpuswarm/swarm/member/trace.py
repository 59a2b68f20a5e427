"""A trace of a member's steps, when somebody asks: files for whoever holds the run, which may be on another machine."""

import tempfile
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import jax

from tpuswarm.train.look import profile
from tpuswarm.train.recipe import Metrics

PART = 2**20
"""Bytes that one look hands over: a member whose looks stay out is killed, and its link may be slow."""


@dataclass(frozen=True)
class Traced:
    """What came of a trace, or a part of it."""

    steps: int
    problem: str = ""
    """What went wrong, as `could not …: why`, or nothing."""
    file: str = ""
    """Its name below TensorBoard's folder; empty where there is none."""
    data: bytes = b""
    """To append to it."""
    last: bool = True
    """Whether no other part comes."""


class Tracer:
    """Of one process; `ask` and `taken` are for any thread, `took` for the one that trains."""

    def __init__(self) -> None:
        self._asked = self._steps = self._left = 0
        self._parts: deque[Traced] = deque()
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def ask(self, steps: int) -> None:
        """Trace so many steps, the next ones."""
        self._asked = steps

    def taken(self) -> Traced | None:
        """What came of it, one part after the other; None before, and after the last."""
        return self._parts.popleft() if self._parts else None

    def took(self, metrics: Metrics) -> None:
        """A step was dispatched. A trace begins and ends with none under way, so that it holds whole steps."""
        if self._folder is not None:
            self._left -= 1
            if not self._left:
                jax.block_until_ready(metrics)
                why = profile.stop(Path(self._folder.name))
                self._end(self._folder, f"could not be written: {why}" if why else "")
        elif self._asked:
            jax.block_until_ready(metrics)
            self._steps = self._left = self._asked
            self._asked = 0
            try:
                self._folder = tempfile.TemporaryDirectory(prefix="tpuswarm-trace-", ignore_cleanup_errors=True)
            except OSError as error:
                self._parts.append(Traced(0, f"could not begin: {error.strerror}"))
                return
            if why := profile.start(Path(self._folder.name)):
                self._end(self._folder, f"could not begin: {why}")

    def _end(self, folder: tempfile.TemporaryDirectory[str], problem: str) -> None:
        self._folder, root = None, Path(folder.name)
        steps, parts = self._steps - self._left, []
        try:
            with folder:
                for path in sorted(path for path in root.rglob("*") if path.is_file() and not problem):
                    name, data = path.relative_to(root).as_posix(), path.read_bytes()
                    for at in range(0, len(data), PART):
                        parts.append(Traced(steps, "", name, data[at : at + PART], last=False))
        except OSError as error:
            problem, parts = f"could not be read: {error.strerror}", []
        self._parts.extend([*parts, Traced(steps, problem)])
