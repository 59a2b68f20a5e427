"""A program that computes on the CPU of a host that has chips, and does not say so."""

from collections.abc import Iterator

from tpuswarm.config.formatting import format_age
from tpuswarm.doctor.check import Check, Subject, Wrong

SAID = "falling back to cpu"
"""By JAX, older ones with capitals, where it finds chips and no libtpu that it can use."""
YOUNG_S = 60.0
"""Seconds that a program may need before it takes its chips."""
MEND = (
    "libtpu is missing there, or JAX_PLATFORMS names another device: `tpuswarm setup --on NAME` installs it; a program "
    "that is to use the CPU says so with JAX_PLATFORMS=cpu"
)


def probe(host: Subject) -> Iterator[Wrong]:
    """Programs with JAX and without a chip, and what their logs say."""
    spoken = {each["job"]: each["line"] for each in host.facts["spoken"] if each["mark"].lower() == SAID}
    for job, line in spoken.items():
        yield Wrong(f"job {job} says: {line}", MEND)
    for each in host.facts["on_cpu"] if host.chips and not spoken else ():
        if each["age_s"] > YOUNG_S:
            what = f"process {each['pid']} has run JAX for {format_age(each['age_s'])}, and holds no chip"
            yield Wrong(f"{what}: {each['command'][:60]}", MEND)


CHECK = Check(
    "on-cpu", "processes with jaxlib, open files, the ends of the logs of kept jobs",
    "it trains a hundred times slower, and the TPU beside it costs the same", MEND, probe,
)  # fmt: skip
