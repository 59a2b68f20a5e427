"""Memory that is used up."""

from collections.abc import Iterator

from tpuswarm.config.units import GIB
from tpuswarm.doctor.check import Check, Subject, Wrong

SHARE = 0.03
"""Of the memory that has to be free."""
MEND = "see who has it: `tpuswarm exec NAME -- 'top -b -n 1 -o RES | head -15'`; fewer data workers, or a larger host"


def probe(host: Subject) -> Iterator[Wrong]:
    """Memory and swap."""
    memory = host.facts["memory"]
    free, whole = memory.get("MemAvailable"), memory.get("MemTotal")
    if free is not None and whole and free < SHARE * whole:
        yield Wrong(f"{free / GIB:.1f} of {whole / GIB:.0f} GiB of memory are free", MEND)
    swap = memory.get("SwapTotal", 0) - memory.get("SwapFree", 0)
    if swap > max(GIB, memory.get("SwapTotal", 0) / 2):
        yield Wrong(f"{swap / GIB:.1f} GiB of memory are on the disk", MEND)


CHECK = Check(
    "memory", "/proc/meminfo", "without memory the system ends the largest process, which is the training", MEND, probe
)
