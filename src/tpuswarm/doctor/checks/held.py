"""A chip that a process has open which is no job of ours, nor an `exec` that somebody attends to."""

from collections.abc import Iterator, Mapping
from typing import Any

from tpuswarm.config.shown import age
from tpuswarm.doctor.check import HERE, Check, Subject, Wrong

MEND = "end it if nobody needs it: `tpuswarm exec NAME -- kill PID`; a job of yours with `tpuswarm stop JOB`"


def probe(host: Subject) -> Iterator[Wrong]:
    """Who holds a chip, and since when."""
    for each in host.facts["holders"]:
        is_ours = each["asked_for"] or "tpu-runtime" in each["command"]  # a TensorFlow pod's service
        if each["path"].startswith("/dev") and not is_ours:
            left = ", left by an `exec` or a job that is over" if each["left"] else ""
            who = f"process {each['pid']} of {each['user']}{left}"
            yield Wrong(
                f"{who} holds {each['path']}, and began {age(each['age_s'])} ago: {each['command'][:60]}",
                f"if nobody needs it: `{_end(host, each)}`",
            )


def _end(host: Subject, process: Mapping[str, Any]) -> str:
    kill = f"{'' if process['user'] == host.facts['user'] else 'sudo '}kill {process['pid']}"
    return kill if host.label == HERE else f"tpuswarm exec {host.label} -- {kill}"


CHECK = Check(
    "held", "open files of all processes",
    "a TPU serves one process at a time: the next one waits for ever, or ends with \"already in use\"", MEND, probe,
)  # fmt: skip
