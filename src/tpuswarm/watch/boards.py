"""What TensorBoard shows: a folder with a link or a copy of each run's event files, kept up to date.

A plain run has event files beside its metrics. A swarm's are made of its metrics, a curve for each member. Those of a
machine come through SSH, from where they ended last time, so that a lost connection loses nothing.
"""

import shlex
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from tpuswarm.errors import InputError
from tpuswarm.remote.connect import Connections, ask
from tpuswarm.remote.host import Host, NoWay
from tpuswarm.train.look.board import Board
from tpuswarm.train.look.profile import BOARD
from tpuswarm.train.run.directory import METRICS
from tpuswarm.train.storage.copy import bring
from tpuswarm.train.storage.folders import folder_of
from tpuswarm.watch.page.lines import Line, Lines

AT_ONCE = 4 << 20
"""Bytes of a file of a machine that one answer brings."""
LIST = "cd {folder} 2>/dev/null || exit 66; find . -type f -path '*tensorboard/*' -printf '%s %P\\n'"
"""Sizes and names, on a machine; 66: there is no such folder."""


class Source(Protocol):
    """Whatever has event files."""

    async def update(self) -> None:
        """Bring what is new. Raises TpuswarmError for what may pass."""


class Linked:
    """A plain run of this disk, or of a bucket by its copy there."""

    def __init__(self, run: Path, to: Path, url: str = ""):
        self._board, self._to, self._url = run / BOARD, to, url

    async def update(self) -> None:
        """Link the files that are new; of a bucket those that it has now."""
        import asyncio

        if self._url:
            await asyncio.to_thread(bring, self._url)
        self._to.mkdir(exist_ok=True)
        for file in self._board.glob("*tfevents*"):
            _link(file, self._to / file.name)
        _link_traces(self._board, self._to)


class Made:
    """A swarm's run: event files made of its rows."""

    def __init__(self, run: Path, to: Path, url: str = ""):
        self._lines, self._to, self._url = Lines(run / METRICS), to, url
        self._traces = run / BOARD
        self._boards: dict[str, Board] = {}

    async def update(self) -> None:
        """Write the rows that are new."""
        import asyncio

        await asyncio.to_thread(self._update)

    def _update(self) -> None:
        if self._url:
            bring(self._url)
        while lines := self._lines.new(whole=True):
            self._write(lines)
        if lines is None:
            raise InputError(f"{self._to.name}: its run has changed; start the same command again")
        for board in self._boards.values():
            board.flush()
        for member in self._traces.glob("*"):
            if (self._to / member.name).is_dir():  # beside its curves
                _link_traces(member, self._to / member.name)

    def _write(self, lines: Iterable[Line]) -> None:
        for line in lines:
            row = line.row
            with suppress(KeyError, TypeError, ValueError):  # a damaged row
                member = "held out" if "eval_loss" in row else str(row["member"])
                board = self._boards.get(member) or Board(self._to / member, 0)
                self._boards[member] = board
                board.write({name: value for name, value in row.items() if not isinstance(value, str)})


class Far:
    """A run on a machine, or a folder of runs there."""

    def __init__(self, connections: Connections, find: Callable[[], Awaitable[Host]], folder: str, to: Path):
        """find: the host as it is now; folder: as its user writes it, below the home or with a slash."""
        self._connections, self._find, self._to = connections, find, to
        below = folder.removeprefix("~/")
        self._folder = shlex.quote(folder) if folder.startswith("/") else f"~/{shlex.quote(below)}"

    async def update(self) -> None:
        """Bring what has been written since."""
        host = await self._find()
        said = await self._ask(host, LIST.format(folder=self._folder))
        for line in said.decode(errors="replace").splitlines():
            size, _, name = line.partition(" ")
            path = Path(name)
            if size.isdecimal() and not path.is_absolute() and ".." not in path.parts:  # in this copy and nowhere else
                await self._fetch(host, name, int(size))

    async def _fetch(self, host: Host, name: str, size: int) -> None:
        path = self._to / name
        path.parent.mkdir(parents=True, exist_ok=True)
        here = path.stat().st_size if path.exists() else 0
        while here < size:
            line = f"cd {self._folder} && tail -c +{here + 1} {shlex.quote(name)} | head -c {AT_ONCE}"
            data = await self._ask(host, line)
            if not data:
                return
            with path.open("ab") as file:
                file.write(data)
            here += len(data)

    async def _ask(self, host: Host, line: str) -> bytes:
        code, out, err = await ask(self._connections, host, line)
        if code:
            why = err.decode(errors="replace").strip() or f"has no folder {self._folder}"
            raise NoWay(host, why.splitlines()[-1])
        return out


def _link_traces(board: Path, to: Path) -> None:
    """Each trace alone: xprof follows no link on its way to them."""
    for trace in board.glob("plugins/profile/*"):
        _link(trace, to / trace.relative_to(board))


def _link(there: Path, link: Path) -> None:
    if not link.is_symlink():
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(there.resolve())


def of_run(run: Path, swarm: bool, to: Path, url: str = "") -> Source:
    """A run of this disk; with its URL one of a bucket, of which `run` is the copy."""
    return Made(run, to, url) if swarm else Linked(run if not url else folder_of(url), to, url)
