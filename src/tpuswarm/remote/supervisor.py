"""Call `supervise.py` on a host over SSH; send it there first if it is missing."""

import hashlib
import json
import shlex
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib.resources import files
from typing import Any

from tpuswarm.remote.connect import Connections, run_shell
from tpuswarm.remote.host import Host, HostUnreachable

MISSING = 66
"""Exit code if the host lacks this version of the program."""


@cache
def _program() -> tuple[bytes, str]:
    """Return the program, and its path on hosts, which names its version."""
    data = files("tpuswarm.remote").joinpath("supervise.py").read_bytes()
    return data, f"$HOME/.tpuswarm/supervise-{hashlib.sha256(data).hexdigest()[:12]}.py"


class Supervisor:
    """The jobs of one host. All methods raise HostUnreachable."""

    def __init__(self, connections: Connections, host: Host):
        self._connections, self._host = connections, host

    async def show(self) -> dict[str, dict[str, Any]]:
        """Return the states of all jobs that have ever run there, by name."""
        return {state["name"]: state for state in await self._read_states("show")}

    async def start(self, name: str, run: int, spec: Mapping[str, Any]) -> dict[str, Any]:
        """Start a run unless it has started before; return the job's state. `spec`: see supervise.start."""
        return (await self._read_states("start", name, str(run), data=json.dumps(spec).encode()))[0]

    async def end(self, name: str, run: int) -> dict[str, Any]:
        """Ask a run to end; return the job's state."""
        return (await self._read_states("end", name, str(run)))[0]

    async def maintenance(self) -> str:
        """Return the answer of the host's metadata key upcoming-maintenance; empty if there is none."""
        last_line = (await self._call("maintenance")).decode(errors="replace").strip().rpartition("\n")[2]
        return str(json.loads(last_line)) if last_line.startswith('"') else ""

    async def log(self, name: str, lines: int, since: tuple[int, int] | None = None) -> tuple[tuple[int, int], bytes]:
        """Return a position (inode, offset), and the last lines of a job's log or, with `since`, the output after it.

        More output may follow: ask again until there is none.
        """
        words = [] if since is None else [str(since[1]), str(since[0])]
        head, _, data = (await self._call("log", name, str(lines), *words)).partition(b"\n")
        inode, offset = map(int, head.split())
        return (inode, offset), data

    async def _read_states(self, *words: str, data: bytes = b"") -> list[dict[str, Any]]:
        states = []
        for line in (await self._call(*words, data=data)).decode(errors="replace").splitlines():
            with suppress(ValueError):  # a ~/.bashrc may print lines first
                if isinstance(state := json.loads(line), dict) and "name" in state:
                    states.append(state)
        if not states and words[0] != "show":
            raise HostUnreachable(self._host, "does not return the job's state: its supervisor printed nothing")
        return states

    async def _call(self, *words: str, data: bytes = b"") -> bytes:
        program, path = _program()
        line = f'[ -e "{path}" ] || exit {MISSING}; exec python3 "{path}" {shlex.join(words)}'
        code, out, err = await run_shell(self._connections, self._host, line, data)
        if code == MISSING:
            # A lost connection looks like the end of the file: check the size before naming it.
            is_whole = f'[ "$(wc -c <"{path}.$$")" = {len(program)} ]'
            save = f'mkdir -p ~/.tpuswarm && cat >"{path}.$$" && {is_whole} && mv "{path}.$$" "{path}"'
            code, out, err = await run_shell(self._connections, self._host, save, program)
            if code == 0:
                code, out, err = await run_shell(self._connections, self._host, line, data)
        if code != 0:
            last = err.decode(errors="replace").strip().rpartition("\n")[2]
            reason = f"cannot run its supervisor of jobs (exit {code}): {last or 'it printed nothing'}"
            raise HostUnreachable(self._host, reason)
        return out
