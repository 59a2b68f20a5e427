"""The lock of apt and dpkg."""

from collections.abc import Iterator

from tpuswarm.config.formatting import format_age
from tpuswarm.doctor.check import Check, Subject, Wrong

MEND = "wait for it: a new machine updates itself for some minutes; set-up waits by itself"


def probe(host: Subject) -> Iterator[Wrong]:
    """Who has it."""
    if held := host.facts["apt"]:
        began = f"process {held['pid']}, which began {format_age(held['age_s'])} ago"
        yield Wrong(f"{held['command'][:60]} ({began}) has apt's lock", MEND)


CHECK = Check("apt", "/var/lib/dpkg/lock-frontend", "meanwhile nobody else can install anything", MEND, probe)
