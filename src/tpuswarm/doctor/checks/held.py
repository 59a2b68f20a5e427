"""A chip that a process has open: one that nobody asked for, or, for who wants the chips now, any."""

from collections.abc import Iterator, Mapping
from typing import Any

from tpuswarm.config.formatting import format_age
from tpuswarm.doctor.check import HERE, Check, Subject, Wrong
from tpuswarm.remote.places import SERVICE

MEND = "end it if nobody needs it: `tpuswarm exec NAME -- kill PID`; a job of yours with `tpuswarm stop JOB`"


def probe(host: Subject) -> Iterator[Wrong]:
    """Who holds a chip, and since when; a job of ours and an `exec` that somebody attends to may."""
    return (_said(host, each) for each in _holders(host) if not each["asked_for"])


def probe_busy(host: Subject) -> Iterator[Wrong]:
    """The same of whoever it is, a notebook left out."""
    return (_said(host, each) for each in _holders(host))


def _holders(host: Subject) -> Iterator[Mapping[str, Any]]:
    for each in host.facts["holders"]:
        is_service = each["job"].startswith(SERVICE) or "tpu-runtime" in each["command"]  # a TensorFlow pod's service
        if each["path"].startswith("/dev") and not is_service:
            yield each


def _said(host: Subject, process: Mapping[str, Any]) -> Wrong:
    job, pid, user = process["job"], process["pid"], process["user"]
    left = ", left by an `exec` or a job that is over" if process["left"] else ""
    who = f"job {job} (process {pid} of {user})" if job else f"process {pid} of {user}{left}"
    kill = f"{'' if user == host.facts['user'] else 'sudo '}kill {pid}"
    there = kill if host.label == HERE else f"tpuswarm exec {host.label} -- {kill}"
    return Wrong(
        f"{who} holds {process['path']}, and began {format_age(process['age_s'])} ago: {process['command'][:60]}",
        f"if nobody needs it: `{f'tpuswarm stop {job}' if job else there}`",
    )


WHY = 'a TPU serves one process at a time: the next one waits for ever, or ends with "already in use"'
CHECK = Check("held", "open files of all processes", WHY, MEND, probe)
BUSY = Check("busy", "open files of all processes", WHY, MEND, probe_busy)
"""For a command that takes the chips; `doctor` does not ask."""
