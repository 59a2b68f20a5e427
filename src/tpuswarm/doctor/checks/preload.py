"""A library that every program is to load first, and that is not there or does not fit."""

from collections.abc import Iterator

from tpuswarm.doctor.check import Check, Subject, Wrong

MEND = "take the LD_PRELOAD line out of /etc/environment, and log in again"


def probe(host: Subject) -> Iterator[Wrong]:
    """What /etc/environment names."""
    for library, there in host.facts["preload"].items():
        if not there:
            yield Wrong(f"/etc/environment preloads {library}, which is not there", MEND)
    for each in host.facts["spoken"]:
        if each["mark"].startswith("required by") or each["mark"] == "cannot be preloaded":
            yield Wrong(f"job {each['job']} says: {each['line']}", MEND)


CHECK = Check(
    "preload", "LD_PRELOAD in /etc/environment, the ends of the logs of kept jobs",
    "every program complains at its start, and some end: TPU VMs preload tcmalloc, which newer systems have elsewhere",
    MEND, probe,
)  # fmt: skip
