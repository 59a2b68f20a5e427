"""A notice that the machine goes."""

from collections.abc import Iterator

from tpuswarm.doctor.check import Check, Subject, Wrong

MEND = "nothing is to be done: with a keeper (`tpuswarm keep`) it comes back, and jobs and members go on there"


def probe(host: Subject) -> Iterator[Wrong]:
    """Of a preemption or a maintenance."""
    told = host.facts["metadata"] or {}
    if told.get("preempted") == "TRUE":
        yield Wrong("it is being preempted: it has at most 30 seconds left", MEND)
    event = told.get("maintenance") or "NONE"
    if event != "NONE":
        yield Wrong(f"its metadata announces a maintenance: {event}", MEND)


CHECK = Check(
    "notice", "preempted, maintenance-event in the metadata", "what is not saved within seconds is lost", MEND, probe
)
