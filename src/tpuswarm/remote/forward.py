"""A port of a machine as a port of this computer: loopback at both ends, and there again after a lost connection."""

import asyncio
import errno
import socket
from collections.abc import Awaitable, Callable

from tpuswarm.errors import InputError, TpuswarmError
from tpuswarm.remote.connect import Connections
from tpuswarm.remote.host import Host, HostKeyChanged

AGAIN_S, MOST_S = 1.0, 30.0
"""Seconds before the connection is tried again: at first, and at most."""


class Taken(InputError):
    """A port of this computer is another program's."""


async def forward(
    connections: Connections,
    find: Callable[[], Awaitable[Host]],
    here: int,
    there: int,
    say: Callable[[str], None],
    opened: Callable[[Host], str] | None = None,
) -> None:
    """Until it is cancelled. `find`: the host as it is now, asked again before each connection.

    opened: what is said when the port is there, and again after a lost connection; None: which port it is.

    Raises Taken where the port of this computer is, and NoWay or what `find` raises where there is no first connection.
    """
    wait, first, held = AGAIN_S, True, None
    try:
        while True:
            try:
                host = await find()
                connection = await connections.to(host)
                if held is None:
                    held = _take(here, f"tpuswarm forward {host.label} {here + 1}:{there}")
                held.close()
                listener = await connection.forward_local_port("127.0.0.1", here, "127.0.0.1", there)
            except TpuswarmError as error:
                # Later whatever it is passes: the cloud may not answer, the machine may be repaired or made again.
                if first or isinstance(error, HostKeyChanged | Taken):
                    raise
                say(f"{error}; retrying in {wait:g} s")
                await asyncio.sleep(wait)
                wait = min(MOST_S, wait * 2)
                continue
            mine = f"http://127.0.0.1:{here} is port {there} of {host.label}; Ctrl-C ends it"
            say(opened(host) if opened else mine)
            first, wait = False, AGAIN_S
            await connection.wait_closed()
            listener.close()
            # Who comes meanwhile waits: a page that is refused again and again gives up.
            held = hold(here)
            say(f"the connection to {host.label} was lost; reconnecting")
    finally:
        if held is not None:
            held.close()


def hold(port: int) -> socket.socket:
    """A port of this computer, taken and not answered yet. Raises Taken."""
    return _take(port, f"tpuswarm forward NAME {port + 1}:{port}")


def _take(port: int, way_out: str) -> socket.socket:
    try:
        return socket.create_server(("127.0.0.1", port))
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise Taken(
            f"port {port} of this computer is taken by another program: `{way_out}` takes the next one"
        ) from error


def ports(text: str) -> tuple[int, int]:
    """PORT or PORT:PORT, here and there. Raises InputError."""
    here, colon, there = text.partition(":")
    found = (here, there if colon else here)
    if not all(each.isdecimal() and 0 < int(each) < 65_536 for each in found):
        raise InputError(f"a port here and one there are like 8888 or 8889:8888, from 1 to 65535, not {text!r}")
    return int(found[0]), int(found[1])
