"""The contract of a check: what it looks at, why that matters, and what it makes of a host's facts."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

Facts = Mapping[str, Any]
"""What `collect.py` has printed."""
HERE = "here"
"""The label of this computer."""


@dataclass(frozen=True)
class Subject:
    """A host that is looked at, and what it should be."""

    label: str
    """What people call it: node-3/1; `here`."""
    facts: Facts
    skew_s: float = 0.0
    """Seconds by which its clock is ahead of this computer's."""
    type: str | None = None
    """Of its TPU; None: it is no TPU's host, or nobody knows."""
    chips: int | None = None
    """That its type has on a host."""
    worker: int | None = None
    """Its number in its slice."""
    age_s: float | None = None
    """Seconds since its machine was created."""
    hourly: float | None = None
    """Dollars an hour that its machine costs, with all of its workers."""


@dataclass(frozen=True)
class Wrong:
    """What is wrong with a host."""

    what: str
    """A sentence, with the numbers."""
    mend: str
    """What a person does about it."""
    fix: str | None = None
    """The line of a shell that mends it there; None where that is not safe without a person."""


@dataclass(frozen=True)
class Check:
    """One thing that may be wrong with a host, or among hosts."""

    id: str
    looks_at: str
    why: str
    """Why it matters, in a sentence."""
    mend: str
    """What to do, in a sentence."""
    probe: Callable[[Subject], Iterable[Wrong]]


@dataclass(frozen=True)
class AcrossCheck:
    """One thing in which hosts have to agree."""

    id: str
    looks_at: str
    why: str
    mend: str
    probe: Callable[[list[Subject]], Iterable[tuple[str, Wrong]]]
    """What is wrong, each with the label of the host."""
    fact: str
    """Without which a host is left out."""
