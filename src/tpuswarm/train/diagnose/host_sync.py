"""Reads of device arrays in the user's loop: the host waits for the devices, and then the devices for the host.

JAX's own transfer guard does not see `float(x)` or `x.item()` on CPU, so a loop that is tried out there would be found
slow only on the TPU. Here the few methods of JAX's array through which every read goes are wrapped while a run is under
way. Only what the user's code does between two steps is counted; the trainer's own reads see one flag and pass.
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

from tpuswarm.train.diagnose.finding import Finding, place, users_frame

STEPS, SHARE = 10, 0.1
"""A line that reads in so many steps, and such a share of all, is worth a sentence; logging now and then is not."""

HOOKS: tuple[tuple[Any, str], ...] = (
    (ArrayImpl, "_value"),
    (ArrayImpl, "item"),
    (ArrayImpl, "block_until_ready"),
    (jaxlib.xla_client, "batched_block_until_ready"),
)
_reading: "HostSync | None" = None
"""Whose user code runs now."""
_wrapped: list[tuple[Any, str, Any]] = []
_users = 0


@dataclass
class _Line:
    """A line of the user's that reads device arrays."""

    place: str
    text: str
    reads: int = 0
    seconds: float = 0.0
    steps: int = 0
    last_step: int = -1
    said: bool = False


class HostSync:
    """Counts what the user's code between two steps reads from the devices.

    blocked(seconds): told of the time of each read.
    """

    def __init__(self, blocked: Callable[[float], None]):
        self._blocked = blocked
        self._lines: dict[tuple[str, int], _Line] = {}
        self._thread, self._step, self._first = 0, 0, 0
        self._inside = False

    def start(self) -> None:
        """Wrap the methods, unless another run has."""
        global _users
        self._thread = threading.get_ident()
        _users += 1
        if _users == 1:
            _wrap()

    def stop(self) -> None:
        """Put them back once no run needs them."""
        global _users
        _users -= 1
        if _users == 0:
            _unwrap()

    def theirs(self, step: int) -> None:
        """The user's code runs from now on, after `step`."""
        global _reading
        self._step, _reading = step, self
        self._first = self._first or step

    def ours(self) -> None:
        """The trainer's code runs from now on."""
        global _reading
        _reading = None

    def look(self) -> list[Finding]:
        """Lines that have now read too often, each once."""
        new = [line for line in self._lines.values() if not line.said and self._often(line)]
        for line in new:
            line.said = True
        return [self._finding(line) for line in new]

    def totals(self) -> list[Finding]:
        """Every line that was said, with all its reads."""
        return [self._finding(line) for line in self._lines.values() if line.said]

    def read(self, call: Callable[..., Any], *args: Any) -> Any:
        """Do what a wrapped method did, and count it."""
        if self._inside or threading.get_ident() != self._thread:
            return call(*args)
        self._inside, start = True, time.perf_counter()
        try:
            return call(*args)
        finally:
            self._inside = False
            self._count(time.perf_counter() - start)

    def _count(self, seconds: float) -> None:
        frame = users_frame(sys._getframe(3))  # past this, `read` and the wrapper
        if frame is None:
            return
        self._blocked(seconds)
        key = (frame.f_code.co_filename, frame.f_lineno)
        if key not in self._lines:
            self._lines[key] = _Line(str(place(frame)), linecache.getline(*key).strip())
        line = self._lines[key]
        line.reads += 1
        line.seconds += seconds
        if line.last_step != self._step:
            line.last_step = self._step
            line.steps += 1

    def _often(self, line: _Line) -> bool:
        return line.steps >= STEPS and line.steps >= SHARE * (self._step - self._first + 1)

    def _finding(self, line: _Line) -> Finding:
        text = f" ({line.text})" if line.text else ""
        return Finding(
            "host-sync",
            f"{line.place}{text} reads device arrays: {line.reads} reads in {line.steps} steps, {line.seconds:.2f} s; "
            "the host waits there for the devices, and then they wait for the host; a step's figures are already in "
            "its row (row['loss']), and anything else is best read every hundred steps",
            {"place": line.place, "reads": line.reads, "steps": line.steps, "seconds": line.seconds},
        )


def _wrap() -> None:
    """float(), int(), bool(), print, tolist, device_get and np.asarray go through `_value`.

    `item` and np.asarray of an array on one CPU device use a buffer instead: the first is wrapped as well, the second
    nobody can see; on TPU and GPU, where it matters, it goes through `_value`.
    """
    for owner, name in HOOKS:
        original = vars(owner).get(name)
        if original is None:  # another version of JAX; what is left is still seen
            continue
        _wrapped.append((owner, name, original))
        setattr(owner, name, _wrapper(original))


def _wrapper(original: Any) -> Any:
    call: Callable[..., Any] = original.fget if isinstance(original, property) else original  # type: ignore[assignment]

    def read(*args: Any) -> Any:
        if _reading is None:
            return call(*args)
        return _reading.read(call, *args)

    return property(read) if isinstance(original, property) else read


def _unwrap() -> None:
    while _wrapped:
        owner, name, original = _wrapped.pop()
        setattr(owner, name, original)
