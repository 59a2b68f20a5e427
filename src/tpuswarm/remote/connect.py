"""Open SSH connections, one for each host, which everything that goes to that host shares."""

import asyncio
import os
import shlex
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from tpuswarm.remote.host import Host, HostKeyChanged, KeyRefused, NoWay, Silent

if TYPE_CHECKING:
    import asyncssh

T = TypeVar("T")
ANSWER = 20.0
"""Seconds in which a host has to let us in."""
AT_ONCE = 64
"""Connections that are opened at the same time: key exchange is this computer's work."""
ALIVE = 15.0
"""Seconds of silence after which a host is asked for a sign of life; the third unanswered one ends the connection."""


class Connections:
    """To be used in one event loop, as a context; at its end all are closed."""

    def __init__(self, key: Path, answer_s: float = ANSWER):
        """`key`: the file of our private key. `answer_s`: how long a host may take to let us in."""
        self._key, self._answer = key, answer_s
        self._turn = asyncio.Semaphore(AT_ONCE)
        self._open: dict[Host, asyncio.Task[asyncssh.SSHClientConnection]] = {}
        self._options: dict[tuple[str, str], asyncssh.SSHClientConnectionOptions] = {}

    async def __aenter__(self) -> "Connections":
        return self

    async def __aexit__(self, *about: object) -> None:
        tasks, self._open = list(self._open.values()), {}
        for task in tasks:
            if task.done() and not task.cancelled() and task.exception() is None:
                task.result().abort()
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def to(self, host: Host) -> "asyncssh.SSHClientConnection":
        """The connection to a host, opened by whoever asks first, and again if it was lost. Raises NoWay."""
        task = self._open.get(host)
        if task is None or (task.done() and not _is_good(task)):
            task = self._open[host] = asyncio.ensure_future(self._connect(host))
        return await asyncio.shield(task)  # one who gives up does not take it from the others

    async def _connect(self, host: Host) -> "asyncssh.SSHClientConnection":
        import asyncssh

        trusted = [asyncssh.import_public_key(each) for each in host.keys]
        options = self._options_for(host)
        try:
            async with self._turn, asyncio.timeout(self._answer):
                return await asyncssh.connect(
                    host.address, host.port, options=options, config=None, known_hosts=(trusted, [], [])
                )
        except TimeoutError as error:
            raise Silent(host, self._answer) from error
        except asyncssh.HostKeyNotVerifiable as error:
            raise HostKeyChanged(host) from error
        except asyncssh.PermissionDenied as error:
            raise KeyRefused(host, self._key) from error
        except (asyncssh.Error, OSError) as error:
            raise NoWay(host, f"cannot be reached: {_words(error)}") from error

    def _options_for(self, host: Host) -> "asyncssh.SSHClientConnectionOptions":
        """Made once: to make them costs more than a handshake."""
        import asyncssh

        proxy = (host.proxy or "").replace("%h", host.address).replace("%p", str(host.port))
        kind = (host.user, proxy)
        if kind not in self._options:
            self._options[kind] = asyncssh.SSHClientConnectionOptions(
                username=host.user,
                client_keys=[asyncssh.read_private_key(self._key)],
                known_hosts=([], [], []),
                config=None,
                agent_path=None,
                gss_host=None,
                preferred_auth="publickey",
                compression_algs=None,
                # The fastest of the usual ones where the processor knows AES, which those of clouds do.
                encryption_algs=["aes128-gcm@openssh.com", "chacha20-poly1305@openssh.com", "aes128-ctr"],
                keepalive_interval=ALIVE,
                keepalive_count_max=3,
                proxy_command=shlex.split(proxy) or None,
                x509_trusted_certs=None,
            )
        return self._options[kind]


def _is_good(task: "asyncio.Task[asyncssh.SSHClientConnection]") -> bool:
    return not task.cancelled() and task.exception() is None and not task.result().is_closed()


async def on_host(host: Host, work: Callable[[], Awaitable[T]]) -> T:
    """Do something over an open connection; raises NoWay, in words, where that breaks."""
    import asyncssh

    try:
        return await work()
    except (asyncssh.Error, OSError) as error:
        raise NoWay(host, f"was lost: {_words(error)}") from error


async def ask(connections: Connections, host: Host, line: str, data: bytes = b"") -> tuple[int, bytes, bytes]:
    """Run a line of bash with `data` as its input; exit code, output, errors. Raises NoWay."""
    connection = await connections.to(host)

    async def go() -> tuple[int, bytes, bytes]:
        process = await connection.create_process(shlex.join(["/bin/bash", "-c", line]), encoding=None)
        if data:
            with suppress(BrokenPipeError):  # it has ended without reading, and says with what code
                process.stdin.write(data)
                process.stdin.write_eof()
        done = await process.wait()
        if done.exit_status is None:
            raise ConnectionError("the command had not ended yet")
        return done.exit_status, done.stdout or b"", done.stderr or b""  # type: ignore[return-value]

    return await on_host(host, go)


def _words(error: Exception) -> str:
    """What happened, in one line."""
    if isinstance(error, OSError) and error.errno:  # asyncio has words of its own, which do not say why
        return os.strerror(error.errno).lower()
    text = getattr(error, "reason", None) or str(error) or type(error).__name__
    return " ".join(str(text).split())
