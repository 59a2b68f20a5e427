"""Room on the disk, and whether it can be written at all."""

from collections.abc import Iterator

from tpuswarm.config.units import GIB
from tpuswarm.doctor.check import Check, Subject, Wrong

LEAST, SHARE = 2 * GIB, 0.02
"""Bytes, and share of the disk, below which it is as good as full."""
MEND = "make room: `du -xh ~ /tmp | sort -h | tail` shows where it went; old checkpoints and caches go first"


def probe(host: Subject) -> Iterator[Wrong]:
    """Of the home and of /tmp."""
    for each in host.facts["disks"]:
        if each["refused"]:
            read_only = "ead-only" in each["refused"]
            mend = "a disk that has become read-only is damaged: replace the machine" if read_only else MEND
            yield Wrong(f"nothing can be written in {each['path']}: {each['refused']}", mend)
        elif each["free"] < min(LEAST, SHARE * each["size"]) or each["inodes"] == 0:
            what = "no inodes" if each["inodes"] == 0 else f"{each['free'] / GIB:.1f} of {each['size'] / GIB:.0f} GiB"
            yield Wrong(f"the disk of {each['path']} has {what} left", MEND)


CHECK = Check(
    "disk", "room and a test file in the home and in /tmp",
    "checkpoints fail, logs stop, and libtpu does not start on a full disk", MEND, probe,
)  # fmt: skip
