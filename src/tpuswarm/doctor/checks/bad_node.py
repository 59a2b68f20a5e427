"""What a job's log says when the machine itself is bad."""

import re
from collections.abc import Iterator

from tpuswarm.doctor.check import Check, Subject, Wrong

SAID = (
    "Couldn't open iommu group",
    "open(/dev/vfio",
    "Failed to initialize TPU system",
    "TPU initialization failed",
    "No accelerator found",
)
"""By libtpu on machines that no restart of the program has mended: those that the Marin project's iris replaces
(github.com/marin-community/marin, issue 4120).
"""
MEND = "where nothing else holds the chips, replace the machine: `tpuswarm down NAME`, and its pool makes it again"


def probe(host: Subject) -> Iterator[Wrong]:
    """Of each job; one whose chips another process holds says the same, and that is told by `held`."""
    if any(each["path"].startswith("/dev") for each in host.facts["holders"]):
        return  # they work for whoever has them now
    for each in host.facts["spoken"]:
        if each["mark"] in SAID and not re.search(r"busy|in use", each["line"]):
            yield Wrong(f"job {each['job']} says: {each['line']}", MEND)


CHECK = Check(
    "bad-node", "the ends of the logs of kept jobs, of the last day",
    "a machine whose chips do not start costs as much as one whose do, and stops its slice", MEND, probe,
)  # fmt: skip
