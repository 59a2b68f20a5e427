"""Find reads of device arrays in the user's loop, which make host and devices wait for each other.

JAX's transfer guard misses `float(x)` and `x.item()` on CPU. So a run wraps the few methods of JAX's array that all
reads go through. Only reads of the user's code between two steps count.
"""

import linecache
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jaxlib.xla_client
from jax._src.array import ArrayImpl

from tpuswarm.train.diagnose.finding import Finding, line_of_frame, user_frame

MIN_STEPS, MIN_SHARE = 10, 0.1
"""Report a line that reads in so many steps and in this share of all; occasional logging is fine."""

READ_METHODS: tuple[tuple[Any, str], ...] = (
    (ArrayImpl, "_value"),
    (ArrayImpl, "item"),
    (ArrayImpl, "block_until_ready"),
    (jaxlib.xla_client, "batched_block_until_ready"),
)
_active: "HostSync | None" = None
"""The run whose user code executes now."""
_originals: list[tuple[Any, str, Any]] = []
_runs = 0
"""Runs that need the wrappers."""


@dataclass
class _Line:
    """A line of the user's code that reads device arrays."""

    place: str
    text: str
    reads: int = 0
    seconds: float = 0.0
    steps: int = 0
    last_step: int = -1
    is_reported: bool = False


class HostSync:
    """Counts the reads of device arrays by the user's code between two steps.

    on_read(seconds): called for each read.
    """

    def __init__(self, on_read: Callable[[float], None]):
        self._on_read = on_read
        self._lines: dict[tuple[str, int], _Line] = {}
        self._thread, self._step, self._first_step = 0, 0, 0
        self._is_reading = False

    def start(self) -> None:
        global _runs
        self._thread = threading.get_ident()
        _runs += 1
        if _runs == 1:
            _wrap()

    def stop(self) -> None:
        global _runs
        _runs -= 1
        if _runs == 0:
            while _originals:
                owner, name, original = _originals.pop()
                setattr(owner, name, original)

    def enter_user_code(self, step: int) -> None:
        """Count reads from now on, after `step`."""
        global _active
        self._step, _active = step, self
        self._first_step = self._first_step or step

    def leave_user_code(self) -> None:
        global _active
        _active = None

    def new_findings(self) -> list[Finding]:
        """Return lines that read too often by now, each once."""
        new = [line for line in self._lines.values() if not line.is_reported and self._reads_often(line)]
        for line in new:
            line.is_reported = True
        return [_finding(line) for line in new]

    def totals(self) -> list[Finding]:
        """Return all reported lines with their final counts."""
        return [_finding(line) for line in self._lines.values() if line.is_reported]

    def read(self, call: Callable[..., Any], *args: Any) -> Any:
        """Call an original method, and count the read."""
        if self._is_reading or threading.get_ident() != self._thread:
            return call(*args)
        self._is_reading, start = True, time.perf_counter()
        try:
            return call(*args)
        finally:
            self._is_reading = False
            self._count(time.perf_counter() - start)

    def _count(self, seconds: float) -> None:
        frame = user_frame(sys._getframe(3))  # above this, `read` and the wrapper
        if frame is None:
            return
        self._on_read(seconds)
        key = (frame.f_code.co_filename, frame.f_lineno)
        if key not in self._lines:
            self._lines[key] = _Line(str(line_of_frame(frame)), linecache.getline(*key).strip())
        line = self._lines[key]
        line.reads += 1
        line.seconds += seconds
        if line.last_step != self._step:
            line.last_step = self._step
            line.steps += 1

    def _reads_often(self, line: _Line) -> bool:
        return line.steps >= MIN_STEPS and line.steps >= MIN_SHARE * (self._step - self._first_step + 1)


def _finding(line: _Line) -> Finding:
    text = f" ({line.text})" if line.text else ""
    return Finding(
        "host-sync",
        f"{line.place}{text} reads device arrays: {line.reads} reads in {line.steps} steps, {line.seconds:.2f} s; "
        "the host waits there for the devices, and then they wait for the host; a step's figures are already in "
        "its row (row['loss']), and anything else is best read every hundred steps",
        {"place": line.place, "reads": line.reads, "steps": line.steps, "seconds": line.seconds},
    )


def _wrap() -> None:
    """Wrap the methods that reads go through.

    float(), int(), bool(), print, tolist, device_get and np.asarray use `_value`. `item`, and np.asarray of an array on
    one CPU device, use a buffer instead; the latter cannot be seen.
    """
    for owner, name in READ_METHODS:
        original = vars(owner).get(name)
        if original is not None:  # else another version of JAX; the other methods still count
            _originals.append((owner, name, original))
            setattr(owner, name, _wrapper(original))


def _wrapper(original: Any) -> Any:
    call: Callable[..., Any] = original.fget if isinstance(original, property) else original  # type: ignore[assignment]

    def read(*args: Any) -> Any:
        return call(*args) if _active is None else _active.read(call, *args)

    return property(read) if isinstance(original, property) else read
