"""Define checks, hosts and findings."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

Facts = Mapping[str, Any]
"""The output of `collect.py`."""
THIS_COMPUTER = "here"


@dataclass(frozen=True)
class CheckedHost:
    """A host: its facts, and its expected hardware."""

    label: str
    """`node-3/1`, or `here`."""
    facts: Facts
    clock_skew_s: float = 0.0
    """Positive if its clock is ahead of this computer's."""
    tpu_type: str | None = None
    chips: int | None = None
    """Expected number on this host."""
    worker: int | None = None
    age_s: float | None = None
    """Age of the machine."""
    dollars_per_hour: float | None = None
    """Price of the whole machine."""


class Problem(NamedTuple):
    """One problem of a host."""

    text: str
    advice: str = ""
    """Overrides the advice of the check."""
    fix: str | None = None
    """Shell command that repairs it safely."""
    kill: str | None = None
    """Shell command that ends the process at fault."""


class Finding(NamedTuple):
    """One problem: subject, check, reason and advice."""

    subject: str
    """A host, machine, pool, project, run or member."""
    check: str
    problem: str
    why: str
    advice: str
    fix: str | None = None
    kill: str | None = None


@dataclass(frozen=True)
class Check:
    """One check of a host."""

    id: str
    looks_at: str
    why: str
    advice: str
    probe: Callable[[CheckedHost], Iterable[Problem]]

    def find(self, host: CheckedHost) -> Iterable[Finding]:
        """Yield the problems of a host."""
        for problem in self.probe(host):
            advice = problem.advice or self.advice
            yield Finding(host.label, self.id, problem.text, self.why, advice, problem.fix, problem.kill)
