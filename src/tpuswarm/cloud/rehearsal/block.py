"""A /16 of 127.0.0.0/8 for each local cloud: held by a listening socket, so that no two have the same."""

import socket
import zlib
from pathlib import Path

from tpuswarm.errors import RunFailed

PORT = 2220
FIRST, LAST = 16, 250
"""Not 127.0, where everything else is."""


def hold(folder: Path, kept: int | None) -> tuple[int, socket.socket]:
    """A block that is free, and what holds it as long as it is open; `kept` if that is not None.

    Raises RunFailed where `kept`, or every block, is another cloud's.
    """
    first = kept if kept is not None else FIRST + zlib.crc32(str(folder).encode()) % (LAST - FIRST + 1)
    for step in range(LAST - FIRST + 1 if kept is None else 1):
        block = FIRST + (first - FIRST + step) % (LAST - FIRST + 1)
        held = socket.socket()
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            held.bind((f"127.{block}.0.1", PORT))
            held.listen()
        except OSError:
            held.close()
            continue
        return block, held
    if kept is not None:
        raise RunFailed(
            f"127.{kept}.0.0/16, where the machines of {folder} are, is used by another local cloud; stop that one"
        )
    raise RunFailed("all of 127.16.0.0 to 127.250.255.255 is used by other local clouds; stop one")
