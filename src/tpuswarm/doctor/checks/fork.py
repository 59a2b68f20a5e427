"""A program that forks after JAX has started its threads."""

from collections.abc import Iterator

from tpuswarm.doctor.check import Check, Subject, Wrong

SAID = "os.fork() was called"
"""By JAX's own warning."""
MEND = "start processes with multiprocessing's `spawn`, or before anything uses JAX"


def probe(host: Subject) -> Iterator[Wrong]:
    """Of each job."""
    for each in host.facts["spoken"]:
        if each["mark"] == SAID:
            yield Wrong(f"job {each['job']} forks while JAX's threads run: {each['line']}", MEND)


CHECK = Check(
    "fork", "the ends of the logs of kept jobs, of the last day",
    "a child of a process with JAX's threads may wait for ever for a lock that nobody holds any more", MEND, probe,
)  # fmt: skip
