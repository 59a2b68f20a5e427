"""A machine that costs, and does nothing."""

from collections.abc import Iterator

from tpuswarm.config.formatting import format_age
from tpuswarm.doctor.check import Check, Subject, Wrong

IDLE_S = 3600.0
"""Seconds after which a machine should have begun to do something."""
MEND = "`tpuswarm down NAME`, or `tpuswarm pause NAME` until it is needed"


def probe(host: Subject) -> Iterator[Wrong]:
    """Of the first worker, for all: whether a chip is in use, a program runs that was asked for, or somebody is in."""
    if host.age_s is None or host.age_s < IDLE_S or not host.chips or host.worker or host.facts["blind"]:
        return
    if not host.facts["attended"] and not any(each["path"].startswith("/dev") for each in host.facts["holders"]):
        costs = f"costs ${host.hourly:,.2f} an hour" if host.hourly else "costs money"
        yield Wrong(f"it has been there for {format_age(host.age_s)}, {costs}, and nothing runs on it", MEND)


CHECK = Check(
    "idle", "open files, processes that were asked for, log-ins", "it costs as much as one that trains", MEND, probe
)
