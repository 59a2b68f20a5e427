"""Forward a port of a machine to a port of this computer, loopback to loopback; reconnect after a lost connection."""

import asyncio
import errno
import socket
from collections.abc import Awaitable, Callable

from tpuswarm.errors import InputError, TpuswarmError
from tpuswarm.remote.connect import Connections
from tpuswarm.remote.host import Host, HostKeyChanged

RETRY_S, MAX_RETRY_S = 1.0, 30.0


class PortInUse(InputError):
    """Another program uses the port of this computer."""


async def forward(
    connections: Connections,
    find: Callable[[], Awaitable[Host]],
    local: int,
    remote: int,
    notify: Callable[[str], None],
    describe: Callable[[Host], str] | None = None,
) -> None:
    """Forward a port until cancelled.

    find: returns the current host before each connection. describe: the message after each connection; None: a default.
    Raise PortInUse; HostUnreachable, or an error of `find`, if there is no first connection.
    """
    retry_s, is_first, held = RETRY_S, True, None
    try:
        while True:
            try:
                host = await find()
                connection = await connections.to(host)
                command = f"tpuswarm forward {host.label} {local + 1}:{remote}"
                if held is None:
                    held = _hold(local, command)
                held.close()
                listener = await connection.forward_local_port("127.0.0.1", local, "127.0.0.1", remote)
            except TpuswarmError as error:
                # Later errors pass: the cloud may not answer, the machine may be repaired or replaced.
                if is_first or isinstance(error, HostKeyChanged | PortInUse):
                    raise
                notify(f"{error}; retrying in {retry_s:g} s")
                await asyncio.sleep(retry_s)
                retry_s = min(MAX_RETRY_S, retry_s * 2)
                continue
            default = f"http://127.0.0.1:{local} is port {remote} of {host.label}; Ctrl-C ends it"
            notify(describe(host) if describe else default)
            is_first, retry_s = False, RETRY_S
            await connection.wait_closed()
            listener.close()
            # Clients wait meanwhile: a browser gives up after several refused connections.
            held = _hold(local, command)
            notify(f"the connection to {host.label} was lost; reconnecting")
    finally:
        if held is not None:
            held.close()


def is_port_used(port: int) -> bool:
    """Return whether a program of this computer listens at the port."""
    try:
        _hold(port, "").close()
    except PortInUse:
        return True
    return False


def _hold(port: int, command: str) -> socket.socket:
    """Listen at a local port without accepting. `command`: the hint of the error."""
    try:
        return socket.create_server(("127.0.0.1", port))
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise PortInUse(f"another program of this computer uses port {port}; try `{command}`") from error


def parse_ports(text: str) -> tuple[int, int]:
    """Parse PORT or LOCAL:REMOTE. Raise InputError."""
    local, colon, remote = text.partition(":")
    ports = (local, remote if colon else local)
    if not all(port.isdecimal() and 0 < int(port) < 65_536 for port in ports):
        raise InputError(f"ports are like 8888, or 8889:8888 (local:remote), from 1 to 65535, not {text!r}")
    return int(ports[0]), int(ports[1])
