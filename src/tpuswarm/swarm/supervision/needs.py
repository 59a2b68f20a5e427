"""Estimate and check the memory for a swarm's processes and the disk space for its run."""

import re
import shutil
from pathlib import Path

from tpuswarm.errors import InputError
from tpuswarm.swarm.engines.variables import CALL_LIMIT, store_bytes

LARGE_FOLDERS = ("objects", "payloads")
"""The folders of a run that hold its arrays."""
PROCESS_BYTES = 700 * 2**20
"""A member's process without parameters: Python, JAX, Ray, compiled code (550 to 650 MiB measured on CPU)."""
RAY_BYTES = 600 * 2**20
"""Ray's own processes and the coordinator on this machine (550 MiB measured)."""
AGGREGATOR_BYTES = 200 * 2**20
"""An aggregator's process without payloads (130 to 165 MiB measured)."""
HOST_COPIES = 4
"""Copies of the shared parameters on a member's host: anchor, snapshot, payload, an arriving commit."""
STEP_COPIES = 3
"""Further copies during a step on CPU: gradients, and results before they replace it."""


def serving_bytes(members: int, aggregators: int, sent: float, fragment: float) -> float:
    """Estimate the memory for serving members: Ray and its store, the coordinator, and all aggregators with as many
    arriving payloads as they take at a time. sent: bytes of a contribution; fragment: of its largest fragment.
    """
    arriving = min(CALL_LIMIT, members) * min(aggregators * fragment, sent)
    return RAY_BYTES + aggregators * AGGREGATOR_BYTES + arriving + store_bytes(int(fragment))


def check_memory(
    members: int, exchanged: int, fragment: int, state: int, kind: str, others: int = 0, aggregators: int = 1
) -> None:
    """Raise InputError, with the memory needed, for more members than this machine can hold. All sizes in bytes.

    exchanged: shared parameters; fragment: their largest fragment; state: a member's whole state; others: members on
    other machines, which are served from here.
    """
    member_bytes = PROCESS_BYTES + HOST_COPIES * exchanged
    if kind == "cpu":
        member_bytes += state + STEP_COPIES * exchanged
    have = available_memory()
    own = serving_bytes(members + others, aggregators, exchanged, fragment)
    need = own + members * member_bytes
    if have is not None and need > have:
        fit = max(0, int((have - own) // member_bytes))
        advice = f"use --members {fit}" if fit else "use a smaller --expect" if others else "use a smaller model"
        raise InputError(
            f"{members} members need about {need / 2**30:.1f} GiB of memory, {member_bytes / 2**30:.2f} each, but this "
            f"machine has {have / 2**30:.1f} GiB free; {advice}"
        )


def check_disk(folder: Path, need: float) -> None:
    """Raise InputError if the disk has no room for a run of this size; existing files count."""
    there = sum(file.stat().st_size for name in LARGE_FOLDERS for file in (folder / name).rglob("*") if file.is_file())
    free = shutil.disk_usage(folder).free
    if need - there > free:
        raise InputError(
            f"{folder} will hold up to {need / 2**30:.1f} GiB, the last versions and what the members sent, but "
            f"its disk is {max(0.0, need - there - free) / 2**30:.1f} GiB too small; make room, use "
            "--run on a larger disk or gs://BUCKET/FOLDER, --quantize int8, or fewer members"
        )


def available_memory() -> int | None:
    """Return the bytes that processes can still use, according to Linux; None elsewhere."""
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        return None
    found = re.search(r"MemAvailable:\s+(\d+) kB", text)
    return int(found[1]) * 1024 if found else None
