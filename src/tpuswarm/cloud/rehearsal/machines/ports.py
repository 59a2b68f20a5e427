"""TCP ports of each machine's own: Ray listens on all addresses of a computer, and here machines share one."""

import socket
from collections.abc import Mapping

FIRST, SIZE, COUNT = 24_000, 100, 87
"""All ranges lie above those of a fleet's router and below the ports that Linux gives to connections, 32768."""


def hold() -> tuple[int, socket.socket] | None:
    """The first port of a range that no other machine has, of this cloud or another; None: there is none left.

    The socket listens there, on loopback alone, and holds the range as long as it is open.
    """
    for number in range(COUNT):
        first = FIRST + number * SIZE
        held = socket.socket()
        try:
            held.bind(("127.0.0.1", first))
            held.listen()
        except OSError:
            held.close()
            continue
        return first, held
    return None


def metrics(first: int) -> int:
    """Where libtpu serves its metrics."""
    return first + 1


def variables(first: int) -> Mapping[str, str]:
    """What tells programs on a machine: a port for libtpu, one half for a swarm's head, one for a member beside it."""
    half = first + SIZE // 2
    return {
        "TPU_RUNTIME_METRICS_PORTS": str(metrics(first)),
        "TPUSWARM_HEAD_PORTS": f"{metrics(first) + 1}-{half - 1}",
        "TPUSWARM_MEMBER_PORTS": f"{half}-{first + SIZE - 1}",
    }
