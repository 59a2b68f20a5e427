"""What a swarm needs of a machine: its memory for the processes, its disk for the run."""

import re
import shutil
from pathlib import Path

from tpuswarm.errors import InputError
from tpuswarm.swarm.core.arithmetic.fragments import FRAGMENT_BYTES
from tpuswarm.swarm.engines.variables import CALLS, store_bytes

ROOMS = ("objects", "payloads")
"""The folders of a run with all that is large."""
PROCESS_BYTES = 700 * 2**20
"""Of a member's process before any parameter: Python, JAX, Ray, compiled code (seen: 550 to 650 MiB on CPU)."""
RAY_BYTES = 600 * 2**20
"""Of Ray's own processes and the coordinator on this machine (seen: 550 MiB)."""
AGGREGATOR_BYTES = 200 * 2**20
"""Of an aggregator's process, before any payload (seen: 130 to 165 MiB)."""
HOST_COPIES = 4
"""Copies of the shared state on a member's host: anchor, snapshot, payload, a commit in flight."""
STEP_COPIES = 3
"""Further copies that a step on CPU needs: gradients, and results before they replace it."""


def serving_bytes(members: int, aggregators: int, sent: float, leaf: float) -> float:
    """What serves so many members: Ray and its store, the coordinator, all aggregators, and as many payloads on their
    way to each as it takes at a time. Bytes: sent, of a contribution; leaf, of the largest array in it.
    """
    fragment = max(leaf, min(FRAGMENT_BYTES, sent))
    arriving = min(CALLS, members) * min(aggregators * fragment, sent)
    return RAY_BYTES + aggregators * AGGREGATOR_BYTES + arriving + store_bytes(int(fragment))


def check_memory(
    members: int, exchanged: int, largest: int, state: int, kind: str, others: int = 0, aggregators: int = 1
) -> None:
    """Raise InputError, with the memory needed, for more members than this machine can hold. All sizes in bytes.

    exchanged: of what members share; largest: of its largest array; state: of a member's whole state; others: members
    on other machines, which are served from here.
    """
    each = PROCESS_BYTES + HOST_COPIES * exchanged
    if kind == "cpu":
        each += state + STEP_COPIES * exchanged
    have = available_memory()
    own = serving_bytes(members + others, aggregators, exchanged, largest)
    need = own + members * each
    if have is not None and need > have:
        fit = max(0, int((have - own) // each))
        way = f"use --members {fit}" if fit else "use a smaller --expect" if others else "use a smaller model"
        raise InputError(
            f"{members} members need about {need / 2**30:.1f} GiB of memory, {each / 2**30:.2f} each, but this machine "
            f"has {have / 2**30:.1f} GiB free; {way}"
        )


def check_disk(folder: Path, need: float) -> None:
    """Raise InputError where a run, of which a part may be there already, has no room to keep so many bytes."""
    there = sum(file.stat().st_size for room in ROOMS for file in (folder / room).rglob("*") if file.is_file())
    free = shutil.disk_usage(folder).free
    if need - there > free:
        raise InputError(
            f"{folder} will hold up to {need / 2**30:.1f} GiB, the last versions and what the members sent, and "
            f"{max(0.0, need - there - free) / 2**30:.1f} GiB of it have no room on its disk; make room, use "
            "--run on a larger disk or gs://BUCKET/FOLDER, --quantize int8, or fewer members"
        )


def available_memory() -> int | None:
    """Bytes that processes can still have, by Linux; None elsewhere."""
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        return None
    found = re.search(r"MemAvailable:\s+(\d+) kB", text)
    return int(found[1]) * 1024 if found else None
