"""Traces of members: asked for in the run's folder, taken where the member is, written here."""

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from tpuswarm.swarm.engines.ray import Started
from tpuswarm.swarm.member.trace import Traced
from tpuswarm.swarm.supervision.kept import KeptProcess
from tpuswarm.train.look.profile import BOARD, LOOK, TRACE, Request, take_request


@dataclass(frozen=True)
class Awaited:
    """A trace that has not come yet."""

    process: Started
    """That was asked."""
    request: str
    files: dict[str, bytearray] = field(default_factory=dict)
    """What has come of them, by their names."""


class Traces:
    """What was asked for and has not come yet; `keep` is called at each round of the supervisor."""

    def __init__(self, run: Path, event: Callable[..., None]):
        """event: writes one down."""
        self._run, self._event = run, event
        self._awaited: dict[str, Awaited] = {}
        """By their members."""
        self._looked_at = 0.0

    def took(self, member: KeptProcess, part: Traced) -> None:
        """A look has brought a part of a trace."""
        awaited = self._awaited.get(member.name)
        if awaited is None:
            return
        if part.file:
            awaited.files.setdefault(part.file, bytearray()).extend(part.data)
        if part.last:
            self._end(member.name, self._written(member.name, part.steps, part.problem, awaited.files))

    def keep(self, kept: Mapping[str, KeptProcess]) -> None:
        """Pass on what is asked, and say what will not come."""
        for name, awaited in list(self._awaited.items()):
            if kept[name].left or kept[name].process is not awaited.process:
                self._end(name, f"{name} ended before its trace was taken; ask again once it trains")
        now = time.monotonic()
        if now - self._looked_at < LOOK:
            return
        self._looked_at = now
        if asked := take_request(self._run):
            self._ask(kept.get(asked.member or ""), asked)

    def _ask(self, member: KeptProcess | None, asked: Request) -> None:
        if member is None or not member.member or member.process is None or member.incarnation is None:
            message = f"{asked.member} does not train; `tpuswarm status {self._run}` shows who does"
            self._tell(asked.member, asked.id, message)
        elif member.name in self._awaited:
            self._tell(member.name, asked.id, f"{member.name} is traced already; ask again once that trace is there")
        else:
            self._awaited[member.name] = Awaited(member.process, asked.id)
            member.process.trace(asked.steps)

    def _end(self, name: str, message: str) -> None:
        self._tell(name, self._awaited.pop(name).request, message)

    def _tell(self, name: str | None, request: str, message: str) -> None:
        self._event(TRACE, member=name, request=request, message=message)

    def _written(self, name: str, steps: int, problem: str, files: Mapping[str, bytearray]) -> str:
        """What came of a trace, in words, once its files are in TensorBoard's folder."""
        folder, written = self._run / BOARD / name, []
        try:
            for path, data in files.items():
                below = PurePosixPath(path)
                if below.is_absolute() or ".." in below.parts:
                    continue  # a machine that joined writes nowhere else
                place = folder / below
                place.parent.mkdir(parents=True, exist_ok=True)
                written.append(place)
                place.write_bytes(data)
        except OSError as error:
            problem = f"could not be written: {error.strerror}"
            for place in written:  # part of a trace cannot be opened
                with suppress(OSError):
                    place.unlink()
        if not written and not problem:
            problem = "came without a file"
        if problem:
            return f"the trace of {name} {problem}; training continues without it"
        return f"trace of {steps} steps of {name}"
