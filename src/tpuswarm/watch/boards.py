"""Keep a folder for TensorBoard up to date, with links to or copies of each run's event files.

A plain run has event files beside its metrics. A swarm's are generated from its metrics, a curve for each member. A
machine's are copied over SSH, continuing where the last copy ended.
"""

import shlex
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from tpuswarm.errors import InputError
from tpuswarm.remote.connect import Connections, run_shell
from tpuswarm.remote.host import Host, HostUnreachable
from tpuswarm.train.look.profile import TENSORBOARD_FOLDER
from tpuswarm.train.look.tensorboard_log import TensorBoardLog
from tpuswarm.train.run.directory import METRICS
from tpuswarm.train.storage.copy import download_run
from tpuswarm.train.storage.folders import copy_folder
from tpuswarm.watch.page.json_lines import JsonLines, Line

FETCH_BYTES = 4 << 20
"""Per answer, from a machine's file."""
LIST_COMMAND = "cd {folder} 2>/dev/null || exit 66; find . -type f -path '*tensorboard/*' -printf '%s %P\\n'"
"""Prints sizes and names; exit code 66: no such folder."""


class BoardSource(Protocol):
    """A source of event files."""

    async def update(self) -> None:
        """Fetch new data; raise TpuswarmError for temporary errors."""


class PlainRunBoards:
    """A plain run on this disk, or the copy of one in a bucket."""

    def __init__(self, run: Path, to: Path, url: str = ""):
        self._board, self._to, self._url = run / TENSORBOARD_FOLDER, to, url

    async def update(self) -> None:
        """Link the new files, after fetching a bucket's."""
        import asyncio

        if self._url:
            await asyncio.to_thread(download_run, self._url)
        self._to.mkdir(exist_ok=True)
        for file in self._board.glob("*tfevents*"):
            _link(file, self._to / file.name)
        _link_traces(self._board, self._to)


class SwarmRunBoards:
    """A swarm's run: event files generated from its metrics."""

    def __init__(self, run: Path, to: Path, url: str = ""):
        self._lines, self._to, self._url = JsonLines(run / METRICS), to, url
        self._traces = run / TENSORBOARD_FOLDER
        self._boards: dict[str, TensorBoardLog] = {}

    async def update(self) -> None:
        """Write the new rows."""
        import asyncio

        await asyncio.to_thread(self._update)

    def _update(self) -> None:
        if self._url:
            download_run(self._url)
        while lines := self._lines.read_new(whole=True):
            self._write(lines)
        if lines is None:
            raise InputError(f"{self._to.name}: its run was replaced; start the same command again")
        for board in self._boards.values():
            board.flush()
        for member in self._traces.glob("*"):
            if (self._to / member.name).is_dir():
                _link_traces(member, self._to / member.name)

    def _write(self, lines: Iterable[Line]) -> None:
        for line in lines:
            row = line.row
            with suppress(KeyError, TypeError, ValueError):  # a damaged row
                member = "held out" if "eval_loss" in row else str(row["member"])
                board = self._boards.get(member) or TensorBoardLog(self._to / member, 0)
                self._boards[member] = board
                board.write({name: value for name, value in row.items() if not isinstance(value, str)})


class MachineBoards:
    """A run on a machine, or a folder of runs there."""

    def __init__(self, connections: Connections, find: Callable[[], Awaitable[Host]], folder: str, to: Path):
        """find: returns the current host; folder: relative to the home folder, or absolute."""
        self._connections, self._find, self._to = connections, find, to
        below = folder.removeprefix("~/")
        self._folder = shlex.quote(folder) if folder.startswith("/") else f"~/{shlex.quote(below)}"

    async def update(self) -> None:
        """Copy the bytes written since the last copy."""
        host = await self._find()
        listing = await self._run(host, LIST_COMMAND.format(folder=self._folder))
        for line in listing.decode(errors="replace").splitlines():
            size, _, name = line.partition(" ")
            path = Path(name)
            if size.isdecimal() and not path.is_absolute() and ".." not in path.parts:  # inside this copy
                await self._fetch(host, name, int(size))

    async def _fetch(self, host: Host, name: str, size: int) -> None:
        path = self._to / name
        path.parent.mkdir(parents=True, exist_ok=True)
        copied = path.stat().st_size if path.exists() else 0
        while copied < size:
            line = f"cd {self._folder} && tail -c +{copied + 1} {shlex.quote(name)} | head -c {FETCH_BYTES}"
            data = await self._run(host, line)
            if not data:
                return
            with path.open("ab") as file:
                file.write(data)
            copied += len(data)

    async def _run(self, host: Host, line: str) -> bytes:
        code, out, err = await run_shell(self._connections, host, line)
        if code:
            reason = err.decode(errors="replace").strip() or f"has no folder {self._folder}"
            raise HostUnreachable(host, reason.splitlines()[-1])
        return out


def _link_traces(board: Path, to: Path) -> None:
    """Link each trace by itself: xprof follows no links to folders above."""
    for trace in board.glob("plugins/profile/*"):
        _link(trace, to / trace.relative_to(board))


def _link(target: Path, link: Path) -> None:
    if not link.is_symlink():
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(target.resolve())


def boards_of_run(run: Path, swarm: bool, to: Path, url: str = "") -> BoardSource:
    """Return the boards of a run on this disk; with a URL, `run` is its copy from a bucket."""
    return SwarmRunBoards(run, to, url) if swarm else PlainRunBoards(run if not url else copy_folder(url), to, url)
