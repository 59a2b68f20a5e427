"""A swarm's head that a member's host cannot reach."""

from collections.abc import Iterator

from tpuswarm.doctor.check import Check, Subject, Wrong

MEND = (
    "`tpuswarm init` opens the ports between the fleet's machines; a host in another network needs a peering; a head "
    "that has died is replaced by the keeper"
)


def probe(host: Subject) -> Iterator[Wrong]:
    """A connection from there, where the fleet trains."""
    head = host.facts["head"]
    if head and head["why"]:
        yield Wrong(f"the swarm's head (Ray, {head['address']}) cannot be reached from here: {head['why']}", MEND)


CHECK = Check(
    "head", "a connection to the swarm's head, where the fleet trains",
    "its member cannot join, or hand in what it has trained: its work is lost", MEND, probe,
)  # fmt: skip
