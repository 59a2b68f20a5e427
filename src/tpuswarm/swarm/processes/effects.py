"""What the processes of a swarm ask of the engine that runs them.

A process is a generator. Its code between two yields is atomic; what it yields is done by the engine, slowly or never:
a process may die at any yield, before or after the effect. That is where crash tests cut.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

Process = Generator["Do | Call | Together | Sleep", Any, Any]
"""Yields effects, is sent their results, may return something to who started it."""


@dataclass(frozen=True)
class Do:
    """Run something that takes time or touches the world; its result, or its exception, comes back."""

    name: str
    """Of the crash point."""
    action: Callable[[], Any]


@dataclass(frozen=True)
class Call:
    """Call a method of another process; what it returns comes back, or Unreachable is raised.

    A call may arrive late, twice, or its answer never.
    """

    address: str
    method: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class Together:
    """Make several calls at once; a list comes back: of each call what it returned, or Unreachable as a value."""

    calls: tuple[Call, ...]


@dataclass(frozen=True)
class Sleep:
    """Wait."""

    seconds: float


class Unreachable(Exception):
    """No answer: the call may or may not have been carried out."""


class Over(Exception):
    """This process has no place in the swarm any more, and says why: fenced, refused, not finite."""
