"""Collect traces of members: requested in the run's folder, recorded by the member, written here."""

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from tpuswarm.swarm.engines.ray import ActorHandle
from tpuswarm.swarm.member.trace import TracePart
from tpuswarm.swarm.supervision.remote_members import RemoteHandle
from tpuswarm.swarm.supervision.supervised_process import SupervisedProcess
from tpuswarm.train.look.profile import (
    REQUEST_POLL_INTERVAL_S,
    TENSORBOARD_FOLDER,
    TRACE_EVENT,
    TraceRequest,
    take_request,
)
from tpuswarm.train.process.atomic import write_atomically


@dataclass(frozen=True)
class PendingTrace:
    """A trace that has not arrived yet."""

    actor: ActorHandle
    request: str
    files: dict[str, bytearray] = field(default_factory=dict)
    """Received data by file name."""


class TraceCollector:
    """Pending traces of a run's members. The supervisor calls `update` in each round."""

    def __init__(self, run: Path, event: Callable[..., None]):
        """event: writes an event."""
        self._run, self._event = run, event
        self._pending: dict[str, PendingTrace] = {}
        """By member."""
        self._last_poll = 0.0

    def add_part(self, member: SupervisedProcess, part: TracePart) -> None:
        """Add a part that a report contained."""
        pending = self._pending.get(member.name)
        if pending is None:
            return
        if part.file:
            pending.files.setdefault(part.file, bytearray()).extend(part.data)
        if part.last:
            self._finish(member.name, self._write(member.name, part.steps, part.problem, pending.files))

    def update(self, processes: Mapping[str, SupervisedProcess]) -> None:
        """Pass requests on, and end traces whose member has ended."""
        for name, pending in list(self._pending.items()):
            if processes[name].left or processes[name].actor is not pending.actor:
                self._finish(name, f"{name} ended before its trace was taken; ask again once it trains")
        now = time.monotonic()
        if now - self._last_poll < REQUEST_POLL_INTERVAL_S:
            return
        self._last_poll = now
        if request := take_request(self._run):
            self._start(processes.get(request.member or ""), request)

    def _start(self, member: SupervisedProcess | None, request: TraceRequest) -> None:
        if member is None or not member.is_member or member.actor is None or member.incarnation is None:
            message = f"{request.member} does not train; `tpuswarm status {self._run}` shows who does"
            self._answer(request.member, request.id, message)
        elif isinstance(member.actor, RemoteHandle):
            self._answer(member.name, request.id, f"{member.name} dialled in: its trace cannot be taken from here")
        elif member.name in self._pending:
            self._answer(member.name, request.id, f"{member.name} is traced already; ask again when that trace is done")
        else:
            self._pending[member.name] = PendingTrace(member.actor, request.id)
            member.actor.trace(request.steps)

    def _finish(self, name: str, message: str) -> None:
        self._answer(name, self._pending.pop(name).request, message)

    def _answer(self, name: str | None, request: str, message: str) -> None:
        self._event(TRACE_EVENT, member=name, request=request, message=message)

    def _write(self, name: str, steps: int, problem: str, files: Mapping[str, bytearray]) -> str:
        """Write a trace to TensorBoard's folder; return the message about it."""
        folder, written = self._run / TENSORBOARD_FOLDER / name, []
        try:
            for file_name, data in files.items():
                relative = PurePosixPath(file_name)
                if relative.is_absolute() or ".." in relative.parts:
                    continue  # a joined machine may write nowhere else
                path = folder / relative
                path.parent.mkdir(parents=True, exist_ok=True)
                written.append(path)
                write_atomically(path, bytes(data))
        except OSError as error:
            problem = f"could not be written: {error.strerror}"
            for path in written:  # a partial trace cannot be opened
                with suppress(OSError):
                    path.unlink()
        if not written and not problem:
            problem = "came without a file"
        if problem:
            return f"the trace of {name} {problem}; training continues without it"
        return f"trace of {steps} steps of {name}"
