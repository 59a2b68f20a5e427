"""The supervisor of a host, asked over SSH: `supervise.py`, sent there when it is asked for the first time."""

import hashlib
import json
import shlex
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from tpuswarm.remote.connect import Connections, on_host
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
        lines = (await self._ask("show")).decode().splitlines()
        return {each["name"]: each for each in map(json.loads, lines)}

    async def start(self, name: str, run: int, spec: Mapping[str, Any]) -> dict[str, Any]:
        """Start a run unless it was started before; how the job stands. `spec`: line, alive_s."""
        return json.loads(await self._ask("start", name, str(run), data=json.dumps(spec).encode()))

    async def end(self, name: str, run: int) -> dict[str, Any]:
        """Ask a run to end; how the job stands."""
        return json.loads(await self._ask("end", name, str(run)))

    async def log(self, name: str, lines: int, begin: int | None = None) -> tuple[int, int, bytes]:
        """The last lines of what a job printed, or all from a byte on; with the file's inode and size."""
        head, _, data = (await self._ask("log", name, str(lines), *([] if begin is None else [str(begin)]))).partition(
            b"\n"
        )
        inode, size = map(int, head.split())
        return inode, size, data

    async def _ask(self, *words: str, data: bytes = b"") -> bytes:
        program, path = _program()
        said = shlex.join(words)
        ask = f'[ -e "{path}" ] || exit {MISSING}; exec python3 "{path}" {said}'
        code, out, err = await self._run(ask, data)
        if code == MISSING:
            send = f'mkdir -p ~/.tpuswarm && cat >"{path}.$$" && mv "{path}.$$" "{path}"'
            code, out, err = await self._run(send, program)
            if code == 0:
                code, out, err = await self._run(ask, data)
        if code != 0:
            last = err.decode(errors="replace").strip().rpartition("\n")[2]
            raise NoWay(self._host, f"cannot run its supervisor of jobs (exit {code}): {last or 'it said nothing'}")
        return out

    async def _run(self, line: str, data: bytes) -> tuple[int | None, bytes, bytes]:
        connection = await self._connections.to(self._host)

        async def go() -> tuple[int | None, bytes, bytes]:
            done = await connection.run(shlex.join(["/bin/bash", "-c", line]), input=data, encoding=None)
            return done.exit_status, done.stdout or b"", done.stderr or b""  # type: ignore[return-value]

        return await on_host(self._host, go)
