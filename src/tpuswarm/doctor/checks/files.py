"""How many files a process may have open."""

from collections.abc import Iterator

from tpuswarm.doctor.check import Check, Subject, Wrong

LEAST = 4096
"""Ray raises what a process may have to what it may ask for, and calls less than this too few (ray.init)."""
MEND = (
    "raise it: `nofile = 65536` in [setup] of swarm.toml and `tpuswarm setup`, or a line `* - nofile 65536` in "
    "/etc/security/limits.conf; then log in again"
)


def probe(host: Subject) -> Iterator[Wrong]:
    """The most that a log-in may ask for; with how many it begins does not matter."""
    most = host.facts["files"]
    if most is not None and most < LEAST:
        yield Wrong(f"a process may have {most:,} files open at most, fewer than {LEAST:,}", MEND)


CHECK = Check(
    "files", "ulimit -Hn", "Ray, data loaders and large checkpoints open thousands of files and sockets", MEND, probe
)
