"""A clock that goes wrong."""

from collections.abc import Iterator

from tpuswarm.doctor.check import Check, Subject, Wrong

MOST_S = 30.0
MEND = "set it: `sudo systemctl restart chrony` (or systemd-timesyncd) on the host; if all hosts seem off, it is here"


def probe(host: Subject) -> Iterator[Wrong]:
    """Against this computer's."""
    if abs(host.skew_s) > MOST_S:
        way = "ahead of" if host.skew_s > 0 else "behind"
        yield Wrong(f"its clock is {abs(host.skew_s):,.0f} s {way} this computer's", MEND)


CHECK = Check(
    "clock", "its time beside this computer's",
    "Google refuses requests that are signed minutes off, and leases and logs no longer fit together", MEND, probe,
)  # fmt: skip
