"""A chip that a process has open which is no job of ours, nor an `exec` that somebody attends to."""

from collections.abc import Iterator

from tpuswarm.config.shown import age
from tpuswarm.doctor.check import Check, Subject, Wrong

MEND = "end it if nobody needs it: `tpuswarm exec NAME -- kill PID`; a job of yours with `tpuswarm stop JOB`"


def probe(host: Subject) -> Iterator[Wrong]:
    """Who holds a chip, and since when."""
    for each in host.facts["holders"]:
        if each["path"] in host.facts["devices"] and not each["asked_for"]:
            yield Wrong(
                f"process {each['pid']} of {each['user']} has held {each['path']} for {age(each['age_s'])}: "
                f"{each['command'][:60]}",
                f"if nobody needs it: `tpuswarm exec {host.label} -- kill {each['pid']}`",
            )


CHECK = Check(
    "held", "open files of all processes",
    "a TPU serves one process at a time: the next one waits for ever, or ends with \"already in use\"", MEND, probe,
)  # fmt: skip
