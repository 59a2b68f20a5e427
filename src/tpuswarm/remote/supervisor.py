"""The supervisor of a host, asked over SSH: `supervise.py`, sent there when it is asked for the first time."""

import hashlib
import json
import shlex
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib.resources import files
from typing import Any

from tpuswarm.remote.connect import Connections, ask
from tpuswarm.remote.host import Host, NoWay

MISSING = 66
"""Exit code of the shell where the host does not have the supervisor."""


@cache
def _program() -> tuple[bytes, str]:
    """The file, and where it lies on hosts: another version has another name."""
    data = files("tpuswarm.remote").joinpath("supervise.py").read_bytes()
    return data, f"$HOME/.tpuswarm/supervise-{hashlib.sha256(data).hexdigest()[:12]}.py"


class Supervisor:
    """Of one host."""

    def __init__(self, connections: Connections, host: Host):
        self._connections, self._host = connections, host

    async def show(self) -> dict[str, dict[str, Any]]:
        """How all jobs stand that it has ever run, by name. Raises NoWay."""
        return {each["name"]: each for each in await self._objects("show")}

    async def start(self, name: str, run: int, spec: Mapping[str, Any]) -> dict[str, Any]:
        """Start a run unless it was started before; how the job stands. `spec`: line, alive_s."""
        return (await self._objects("start", name, str(run), data=json.dumps(spec).encode()))[0]

    async def end(self, name: str, run: int) -> dict[str, Any]:
        """Ask a run to end; how the job stands."""
        return (await self._objects("end", name, str(run)))[0]

    async def log(self, name: str, lines: int, since: tuple[int, int] | None = None) -> tuple[tuple[int, int], bytes]:
        """The last lines of what a job printed, or what came since a place; and the place to which that goes.

        A place is a file's inode and an offset. What came may go on: it does until nothing comes.
        """
        asked = [] if since is None else [str(since[1]), str(since[0])]
        head, _, data = (await self._ask("log", name, str(lines), *asked)).partition(b"\n")
        inode, offset = map(int, head.split())
        return (inode, offset), data

    async def _objects(self, *words: str, data: bytes = b"") -> list[dict[str, Any]]:
        """The lines that are its answer: what a ~/.bashrc prints comes before them."""
        found = []
        for line in (await self._ask(*words, data=data)).decode(errors="replace").splitlines():
            with suppress(ValueError):
                if isinstance(each := json.loads(line), dict) and "name" in each:
                    found.append(each)
        if not found and words[0] != "show":
            raise NoWay(self._host, "does not say how the job stands: its supervisor answered nothing")
        return found

    async def _ask(self, *words: str, data: bytes = b"") -> bytes:
        program, path = _program()
        said = shlex.join(words)
        line = f'[ -e "{path}" ] || exit {MISSING}; exec python3 "{path}" {said}'
        code, out, err = await self._run(line, data)
        if code == MISSING:
            # A connection that breaks is the end of the file there too: only what is whole gets its name.
            whole = f'[ "$(wc -c <"{path}.$$")" = {len(program)} ]'
            send = f'mkdir -p ~/.tpuswarm && cat >"{path}.$$" && {whole} && mv "{path}.$$" "{path}"'
            code, out, err = await self._run(send, program)
            if code == 0:
                code, out, err = await self._run(line, data)
        if code != 0:
            last = err.decode(errors="replace").strip().rpartition("\n")[2]
            raise NoWay(self._host, f"cannot run its supervisor of jobs (exit {code}): {last or 'it said nothing'}")
        return out

    async def _run(self, line: str, data: bytes) -> tuple[int, bytes, bytes]:
        return await ask(self._connections, self._host, line, data)
