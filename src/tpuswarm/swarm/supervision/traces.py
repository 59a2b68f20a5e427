"""Traces of members: asked for in the run's folder, taken where the member is, written here."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from tpuswarm.swarm.engines.ray import Started
from tpuswarm.swarm.supervision.kept import Kept
from tpuswarm.train.look.profile import BOARD, LOOK, TRACE, take_request


class Traces:
    """What was asked for and has not come yet; `keep` is called at each round of the supervisor."""

    def __init__(self, run: Path, event: Callable[..., None]):
        """event: writes one down."""
        self._run, self._event = run, event
        self._awaited: dict[str, Started] = {}
        """By their members, the processes that were asked."""
        self._looked_at = 0.0

    def keep(self, kept: Mapping[str, Kept]) -> None:
        """Pass on what is asked, write what came, and say what will not come."""
        for name, process in list(self._awaited.items()):
            traced = (kept[name].seen or {}).pop("trace", None)
            if traced is not None:
                self._tell(name, self._written(name, traced.steps, traced.problem, traced.files))
            elif kept[name].left or kept[name].process is not process:
                self._tell(name, f"{name} ended before its trace was taken; ask again once it trains")
        now = time.monotonic()
        if now - self._looked_at < LOOK:
            return
        self._looked_at = now
        if asked := take_request(self._run):
            steps, member = asked
            self._ask(kept.get(member or ""), member, steps)

    def _ask(self, member: Kept | None, name: str | None, steps: int) -> None:
        if member is None or not member.member or member.process is None or member.incarnation is None:
            self._tell(name, f"{name} does not train; `tpuswarm status {self._run}` shows who does")
            return
        self._awaited[member.name] = member.process
        member.process.trace(steps)

    def _tell(self, name: str | None, message: str) -> None:
        self._awaited.pop(name or "", None)
        self._event(TRACE, member=name, message=message)

    def _written(self, name: str, steps: int, problem: str, files: Mapping[str, bytes]) -> str:
        """What came of a trace, in words, once its files are in TensorBoard's folder."""
        folder = self._run / BOARD / name
        try:
            for path, data in files.items():
                place = folder / path
                if ".." in place.parts or not place.is_relative_to(folder):
                    continue  # a machine that joined writes nowhere else
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(data)
        except OSError as error:
            problem = f"could not be written: {error.strerror}"
        if problem:
            return f"the trace of {name} {problem}; training continues without it"
        return f"trace of {steps} steps of {name}"
