"""libtpu's lock, left behind by a process that was killed."""

from collections.abc import Iterator

from tpuswarm.doctor.check import Check, Subject, Wrong

FILE = "/tmp/libtpu_lockfile"  # libtpu's own place
MEND = "remove it where no process holds the chips: `rm /tmp/libtpu_lockfile`; --fix does"
REMOVE = 'rm -f "${TPUSWARM_ROOT:-}' + FILE + '"'


def probe(host: Subject) -> Iterator[Wrong]:
    """A lock that nobody owns."""
    lock = host.facts["lock"]
    if lock and not host.facts["holders"]:
        fix = REMOVE if lock["mine"] else f"sudo {REMOVE}"
        yield Wrong(f"{FILE} of {lock['user']} is there, and no process holds a chip", f"`rm {FILE}`", fix)


CHECK = Check("lock", FILE, "the next program takes the TPU for one that is in use, and does not start", MEND, probe)
