"""What `tpuswarm join` tells the process of its member, on stdin: arguments would be visible to other users."""

from dataclasses import dataclass

from pydantic import TypeAdapter

from tpuswarm.swarm.anywhere.invites import Invitation


@dataclass(frozen=True)
class Errand:
    invitation: Invitation
    member: str
    instance: str
    """Drawn for this process."""
    batch: int | None
    """Rows of a step; None for the run's."""


_ERRAND: TypeAdapter[Errand] = TypeAdapter(Errand)


def to_json(errand: Errand) -> str:
    return _ERRAND.dump_json(errand).decode()


def from_json(text: str) -> Errand:
    return _ERRAND.validate_json(text)
