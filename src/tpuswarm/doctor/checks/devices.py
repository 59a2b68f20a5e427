"""Chips that a host should have and has not."""

from collections.abc import Iterator

from tpuswarm.doctor.check import Check, Subject, Wrong

MEND = "delete the machine with `tpuswarm down NAME`: its pool makes it again elsewhere"


def probe(host: Subject) -> Iterator[Wrong]:
    """Files of chips against the type's count."""
    there = len(host.facts["devices"])
    if host.chips is not None and there < host.chips:
        what = "none" if not there else f"{there}: {', '.join(host.facts['devices'])}"
        yield Wrong(f"a host of a {host.type} has {host.chips} chips, and it shows {what}", MEND)


CHECK = Check(
    "devices", "/dev/accel*, /dev/vfio/*",
    "without its chips a program ends with an error, or trains on the CPU and says nothing", MEND, probe,
)  # fmt: skip
