"""A port of a machine as a port of this computer: loopback at both ends, and there again after a lost connection."""

import asyncio
import errno
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
) -> None:
    """Until it is cancelled. `find`: the host as it is now, asked again before each connection.

    Raises Taken where the port of this computer is, and NoWay or what `find` raises where there is no first connection.
    """
    wait, first = AGAIN_S, True
    while True:
        try:
            host = await find()
            connection = await connections.to(host)
            try:
                listener = await connection.forward_local_port("127.0.0.1", here, "127.0.0.1", there)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                raise Taken(
                    f"port {here} of this computer is taken by another program: `tpuswarm forward "
                    f"{host.label} {here + 1}:{there}` takes the next one"
                ) from error
        except TpuswarmError as error:
            # Later whatever it is passes: the cloud may not answer, the machine may be repaired or made again.
            if first or isinstance(error, HostKeyChanged | Taken):
                raise
            say(f"{error}; again in {wait:g} s")
            await asyncio.sleep(wait)
            wait = min(MOST_S, wait * 2)
            continue
        say(f"http://127.0.0.1:{here} is port {there} of {host.label}; Ctrl-C ends it")
        first, wait = False, AGAIN_S
        await connection.wait_closed()
        listener.close()
        say(f"the connection to {host.label} was lost: connecting again")


def ports(text: str) -> tuple[int, int]:
    """PORT or PORT:PORT, here and there. Raises InputError."""
    here, colon, there = text.partition(":")
    found = (here, there if colon else here)
    if not all(each.isdecimal() and 0 < int(each) < 65_536 for each in found):
        raise InputError(f"a port here and one there are like 8888 or 8889:8888, from 1 to 65535, not {text!r}")
    return int(found[0]), int(found[1])
