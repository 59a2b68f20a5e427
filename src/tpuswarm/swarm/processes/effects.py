"""The effects that a swarm process requests from the engine that runs it.

A process is a generator. Its code between two yields is atomic. The engine executes the yielded effects, slowly or
never: a process may die at any yield, before or after the effect. Crash tests cut there.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

Process = Generator["RunBlocking | Call | Parallel | Sleep", Any, Any]
"""Yields effects, receives their results, and may return a value to its caller."""


@dataclass(frozen=True)
class RunBlocking:
    """Run an action that takes time or touches the world; its result is sent back, or its exception raised."""

    name: str
    """Name of the crash point."""
    action: Callable[[], Any]


@dataclass(frozen=True)
class Call:
    """Call a method of another process; its result is sent back, or Unreachable raised.

    The call may arrive late or twice, and its answer never.
    """

    address: str
    method: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class Parallel:
    """Make several calls at once; sends back a list of their results, with Unreachable as a value."""

    calls: tuple[Call, ...]


@dataclass(frozen=True)
class Sleep:
    seconds: float


class Unreachable(Exception):
    """No answer: the call may or may not have been executed."""


class ProcessEnded(Exception):
    """This process must end, for the given reason: fenced, refused, left, or its numbers are not finite."""
