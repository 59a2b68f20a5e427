"""What a swarm's processes need of a machine's memory."""

import re
from pathlib import Path

from tpuswarm.errors import InputError

PROCESS_BYTES = 700 * 2**20
"""Of a member's process before any parameter: Python, JAX, Ray, compiled code (seen: 550 to 650 MiB on CPU)."""
RAY_BYTES = 800 * 2**20
"""Of Ray's own processes, the coordinator and one aggregator on this machine (seen: 700 MiB)."""
HOST_COPIES = 4
"""Copies of the shared state on a member's host: anchor, snapshot, payload, a commit in flight."""
STEP_COPIES = 3
"""Further copies that a step on CPU needs: gradients, and results before they replace it."""


def check_memory(members: int, exchanged: int, state: int, kind: str) -> None:
    """Raise InputError, with the memory needed, for more members than this machine can hold."""
    each = PROCESS_BYTES + HOST_COPIES * exchanged
    if kind == "cpu":
        each += state + STEP_COPIES * exchanged
    have = available_memory()
    need = RAY_BYTES + members * each
    if have is not None and need > have:
        fit = max(0, int((have - RAY_BYTES) // each))
        way = f"use --members {fit}" if fit else "use a smaller model"
        raise InputError(
            f"{members} members need about {need / 2**30:.1f} GiB of memory, {each / 2**30:.2f} each, but this machine "
            f"has {have / 2**30:.1f} GiB free; {way}"
        )


def available_memory() -> int | None:
    """Bytes that processes can still have, by Linux; None elsewhere."""
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        return None
    found = re.search(r"MemAvailable:\s+(\d+) kB", text)
    return int(found[1]) * 1024 if found else None
