"""What `tpuswarm join` tells the process of its member, on stdin: arguments would be visible to other users."""

from dataclasses import dataclass

from pydantic import TypeAdapter

from tpuswarm.swarm.anywhere.invites import Invitation

MACHINE_TAKEN = "left: this machine is being taken away"
"""Last line of a member's process that its machine asked to leave."""


@dataclass(frozen=True)
class MemberArguments:
    invitation: Invitation
    member: str
    instance: str
    """Drawn for this process."""
    batch: int | None
    """Rows of a step; None for the run's."""


_ARGUMENTS: TypeAdapter[MemberArguments] = TypeAdapter(MemberArguments)


def to_json(arguments: MemberArguments) -> str:
    return _ARGUMENTS.dump_json(arguments).decode()


def from_json(text: str) -> MemberArguments:
    return _ARGUMENTS.validate_json(text)
