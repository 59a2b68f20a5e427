"""A command on a host while we attend to it: its output as it comes, its exit code, its end when we end."""

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

CHUNK = 1 << 16
LINGER = 1.0
"""Seconds without output after a command's end, after which what it left running is left alone."""
LOOK = 0.25
Take = Callable[[bytes, bool], None]
"""Takes output as it comes; whether it is standard error's."""


@cache
def _script() -> str:
    return files("tpuswarm.remote").joinpath("attended.sh").read_text(encoding="utf-8")


def line_of(words: list[str]) -> str:
    """The line of a shell: one word is a line already, several are a program and its arguments, taken as they are."""
    return words[0] if len(words) == 1 else shlex.join(words)


class Attended:
    """One command on one host."""

    def __init__(self, connections: Connections, host: Host, line: str):
        self.host = host
        self._connections, self._line = connections, line
        self._mark = secrets.token_hex(8)
        self._process: asyncssh.SSHClientProcess[bytes] | None = None
        self._word: bytes | None = None
        self._moved = False

    async def run(self, take: Take) -> int:
        """Run it; its exit code, 128 + N for signal N. Raises NoWay.

        Cancelled, it ends all that it has started there; so does a lost connection, once the host has noticed it.
        """
        connection = await self._connections.to(self.host)
        command = shlex.join(["/bin/sh", "-c", _script(), "tpuswarm-exec", self._line, self._mark])

        async def go() -> int:
            async with connection.create_process(command, encoding=None) as process:
                self._process = process
                if self._word:  # it was to end before it began
                    process.stdin.write(self._word)
                streams = [
                    asyncio.create_task(self._read(process.stdout, False, take)),
                    asyncio.create_task(self._read(process.stderr, True, take)),
                ]
                try:
                    await self._end_of(process, streams)
                except asyncio.CancelledError:
                    process.stdin.write_eof()
                    raise
                finally:
                    for each in streams:
                        each.cancel()
                if process.exit_signal is not None:
                    return 128 + getattr(signal, f"SIG{process.exit_signal[0]}", 0)
                if process.exit_status is not None:
                    return process.exit_status
                raise ConnectionError("the connection was lost")

        return await on_host(self.host, go)

    def end(self, now: bool = False) -> None:
        """Ask it to end, or end it at once, with all it has started; `run` returns when it has."""
        self._word = b"now\n" if now else b"end\n"
        if self._process is not None and not self._process.is_closing():
            self._process.stdin.write(self._word)

    async def _read(self, stream: Any, is_error: bool, take: Take) -> None:
        while data := await stream.read(CHUNK):
            self._moved = True
            take(data, is_error)

    async def _end_of(self, process: Any, streams: "list[asyncio.Task[None]]") -> None:
        """Wait for the end of the command, and of its output unless something that it left running holds that open."""
        quiet = 0.0
        while True:
            done, waiting = await asyncio.wait(streams, timeout=LOOK, return_when=asyncio.FIRST_EXCEPTION)
            for each in done:
                each.result()
            if not waiting:
                await process.wait_closed()
                return
            if process.exit_status is None and process.exit_signal is None:
                continue
            quiet, self._moved = 0.0 if self._moved else quiet + LOOK, False
            if quiet >= LINGER:
                process.close()
                return
