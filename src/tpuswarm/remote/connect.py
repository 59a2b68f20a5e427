"""Open one SSH connection to each host, share it, and work on many hosts at once."""

import asyncio
import os
import shlex
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tpuswarm.errors import TpuswarmError
from tpuswarm.remote.host import Host, HostKeyChanged, HostTimeout, HostUnreachable, KeyRefused
from tpuswarm.remote.own_key import read_private

if TYPE_CHECKING:
    import asyncssh

T = TypeVar("T")
LOGIN_TIMEOUT_S = 20.0
MAX_HANDSHAKES = 64
"""Key exchanges at the same time; they use this computer's CPU."""
KEEPALIVE_INTERVAL_S = 15.0
"""The third unanswered keepalive message ends a connection."""


BASH = ("/bin/bash", "--norc", "-c")
"""Debian's bash reads ~/.bashrc for each command that SSH runs, nested ones too."""
OUTPUT_BEGINS = "tpuswarm: the output begins"


def marked(line: str) -> str:
    """Return a shell line that first prints a mark: a ~/.bashrc or ~/.zshenv may print before it."""
    return f"printf '\\n%s\\n' {shlex.quote(OUTPUT_BEGINS)}; {line}"


async def skip_login_output(reader: Any) -> None:
    """Read until the output of a `marked` line begins, or has ended."""
    while (line := await reader.readline()) and line.rstrip(b"\n") != OUTPUT_BEGINS.encode():
        pass


class Connections:
    """The open connections of one event loop; use it as a context, which closes them."""

    def __init__(self, key: Path, login_timeout_s: float = LOGIN_TIMEOUT_S):
        """key: the file of our private key."""
        self._key, self._login_timeout_s = key, login_timeout_s
        self._handshakes = asyncio.Semaphore(MAX_HANDSHAKES)
        self._tasks: dict[Host, asyncio.Task[asyncssh.SSHClientConnection]] = {}
        self._options: dict[tuple[str, str], asyncssh.SSHClientConnectionOptions] = {}

    async def __aenter__(self) -> "Connections":
        return self

    async def __aexit__(self, *exception: object) -> None:
        tasks, self._tasks = list(self._tasks.values()), {}
        for task in tasks:
            if task.done() and not task.cancelled() and task.exception() is None:
                task.result().abort()
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def to(self, host: Host) -> "asyncssh.SSHClientConnection":
        """Return the connection to a host; open it if it is new or was lost. Raise HostUnreachable."""
        task = self._tasks.get(host)
        if task is None or (task.done() and not _is_open(task)):
            task = self._tasks[host] = asyncio.ensure_future(self._connect(host))
        return await asyncio.shield(task)  # shielded: other callers may wait for it

    async def _connect(self, host: Host) -> "asyncssh.SSHClientConnection":
        import asyncssh

        trusted = [asyncssh.import_public_key(key) for key in host.keys]
        options = self._options_for(host)
        try:
            async with self._handshakes, asyncio.timeout(self._login_timeout_s):
                return await asyncssh.connect(
                    host.address, host.port, options=options, config=None, known_hosts=(trusted, [], [])
                )
        except TimeoutError as error:
            raise HostTimeout(host, self._login_timeout_s) from error
        except asyncssh.HostKeyNotVerifiable as error:
            raise HostKeyChanged(host) from error
        except asyncssh.PermissionDenied as error:
            raise KeyRefused(host, self._key) from error
        except (asyncssh.Error, OSError) as error:
            raise HostUnreachable(host, f"cannot be reached: {_describe(error)}") from error

    def _options_for(self, host: Host) -> "asyncssh.SSHClientConnectionOptions":
        """Return cached options: creating them takes longer than a handshake."""
        import asyncssh

        proxy = (host.proxy or "").replace("%h", host.address).replace("%p", str(host.port))
        kind = (host.user, proxy)
        if kind not in self._options:
            private = read_private(self._key)
            self._options[kind] = asyncssh.SSHClientConnectionOptions(
                username=host.user,
                client_keys=[private or self._key],
                ignore_encrypted=True,  # the agent has the key instead
                known_hosts=([], [], []),
                config=None,
                agent_path=None if private else os.environ.get("SSH_AUTH_SOCK"),
                agent_identities=[] if private else [self._key],
                gss_host=None,
                preferred_auth="publickey",
                compression_algs=None,
                # AES-GCM is the fastest on processors with AES instructions.
                encryption_algs=["aes128-gcm@openssh.com", "chacha20-poly1305@openssh.com", "aes128-ctr"],
                keepalive_interval=KEEPALIVE_INTERVAL_S,
                keepalive_count_max=3,
                proxy_command=shlex.split(proxy) or None,
                x509_trusted_certs=None,
            )
        return self._options[kind]


def _is_open(task: "asyncio.Task[asyncssh.SSHClientConnection]") -> bool:
    return not task.cancelled() and task.exception() is None and not task.result().is_closed()


async def on_host(host: Host, work: Callable[[], Awaitable[T]]) -> T:
    """Await work over an open connection; raise HostUnreachable if the connection breaks."""
    import asyncssh

    try:
        return await work()
    except (asyncssh.Error, OSError) as error:
        raise HostUnreachable(host, f"was lost: {_describe(error)}") from error


async def run_shell(connections: Connections, host: Host, line: str, data: bytes = b"") -> tuple[int, bytes, bytes]:
    """Run a line of bash with `data` as its input; return exit code, output and errors. Raise HostUnreachable."""
    connection = await connections.to(host)

    async def run() -> tuple[int, bytes, bytes]:
        process = await connection.create_process(marked(shlex.join([*BASH, line])), encoding=None)
        if data:
            with suppress(BrokenPipeError):  # it ended without reading; its exit code says why
                process.stdin.write(data)
                process.stdin.write_eof()
        done = await process.wait()
        if done.exit_status is None:
            raise ConnectionError("the command had not ended yet")
        _, _, output = bytes(done.stdout or b"").partition(f"{OUTPUT_BEGINS}\n".encode())  # type: ignore[arg-type]
        return done.exit_status, output, done.stderr or b""  # type: ignore[return-value]

    return await on_host(host, run)


async def fan_out(
    hosts: Sequence[Host], work: Callable[[Host], Awaitable[T]], time_out_s: float | None = None
) -> list[T | TpuswarmError]:
    """Return the result of `work`, or its TpuswarmError, for each host in order. time_out_s: for each host."""

    async def run(host: Host) -> T | TpuswarmError:
        timeout = asyncio.timeout(time_out_s)
        try:
            async with timeout:
                return await work(host)
        except TimeoutError:
            if not timeout.expired():
                raise
            return HostTimeout(host, time_out_s or 0.0, "was not done")
        except TpuswarmError as error:
            return error

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(run(host)) for host in hosts]
    return [task.result() for task in tasks]


def _describe(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno:  # asyncio's own text omits the reason
        return os.strerror(error.errno).lower()
    text = getattr(error, "reason", None) or str(error) or type(error).__name__
    return " ".join(str(text).split())
