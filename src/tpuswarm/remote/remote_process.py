"""Run a command on a host: stream its output, return its exit code, and end it when we end."""

import asyncio
import secrets
import shlex
import signal
from collections.abc import Callable
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from tpuswarm.remote.connect import Connections, on_host
from tpuswarm.remote.host import Host

if TYPE_CHECKING:
    import asyncssh

CHUNK_BYTES = 1 << 16
OUTPUT_GRACE_S = 1.0
"""Wait this long for output after the command has ended; programs that it left running may hold its output open."""
POLL_INTERVAL_S = 0.25
OnOutput = Callable[[bytes, bool], None]
"""Called with output, and whether it is standard error."""


@cache
def _script() -> str:
    return files("tpuswarm.remote").joinpath("remote_process.sh").read_text(encoding="utf-8")


class RemoteProcess:
    """One command on one host."""

    def __init__(self, connections: Connections, host: Host, line: str):
        self._connections, self._host, self._line = connections, host, line
        self._process: asyncssh.SSHClientProcess[bytes] | None = None
        self._request = b""
        self._has_output = False

    async def run(self, on_output: OnOutput) -> int:
        """Run it; return the exit code, 128 + N after signal N. Raise HostUnreachable.

        A cancellation, or a lost connection, ends the command and everything that it started.
        """
        connection = await self._connections.to(self._host)
        mark = secrets.token_hex(8)
        command = shlex.join(["/bin/sh", "-c", _script(), "tpuswarm-exec", self._line, mark])

        async def stream() -> int:
            async with connection.create_process(command, encoding=None) as process:
                self._process = process
                if self._request:  # `end` was called before the command began
                    process.stdin.write(self._request)
                readers = [
                    asyncio.create_task(self._read(process.stdout, False, on_output)),
                    asyncio.create_task(self._read(process.stderr, True, on_output)),
                ]
                try:
                    await self._wait(process, readers)
                except asyncio.CancelledError:
                    process.stdin.write_eof()
                    raise
                finally:
                    for reader in readers:
                        reader.cancel()
                if process.exit_signal is not None:
                    return 128 + getattr(signal, f"SIG{process.exit_signal[0]}", 0)
                if process.exit_status is not None:
                    return process.exit_status
                raise ConnectionError("the connection was lost")

        return await on_host(self._host, stream)

    def end(self, now: bool = False) -> None:
        """End the command and everything that it started: SIGINT, or SIGKILL if `now`; `run` then returns."""
        self._request = b"now\n" if now else b"end\n"
        if self._process is not None and not self._process.is_closing():
            self._process.stdin.write(self._request)

    async def _read(self, stream: Any, is_error: bool, on_output: OnOutput) -> None:
        while data := await stream.read(CHUNK_BYTES):
            self._has_output = True
            on_output(data, is_error)

    async def _wait(self, process: Any, readers: "list[asyncio.Task[None]]") -> None:
        """Wait for the end of the command and of its output."""
        silent_s = 0.0
        while True:
            done, pending = await asyncio.wait(readers, timeout=POLL_INTERVAL_S, return_when=asyncio.FIRST_EXCEPTION)
            for reader in done:
                reader.result()
            if not pending:
                await process.wait_closed()
                return
            if process.exit_status is None and process.exit_signal is None:
                continue
            silent_s, self._has_output = 0.0 if self._has_output else silent_s + POLL_INTERVAL_S, False
            if silent_s >= OUTPUT_GRACE_S:
                process.close()
                return
