"""How many files a process may have open."""

from collections.abc import Iterator

from tpuswarm.doctor.check import Check, Subject, Wrong

LEAST = 1024
MEND = "raise it: a line `* - nofile 65536` in /etc/security/limits.conf, and log in again"


def probe(host: Subject) -> Iterator[Wrong]:
    """The limit of a log-in."""
    soft = host.facts["files"]
    if soft is not None and soft < LEAST:
        yield Wrong(f"a process may have {soft} files open, fewer than {LEAST:,}", MEND)


CHECK = Check(
    "files", "ulimit -n", "Ray, data loaders and large checkpoints open thousands of files and sockets", MEND, probe
)
