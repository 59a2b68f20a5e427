"""A process that the supervisor keeps alive, and how a member among them looks from outside."""

import re
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from tpuswarm.swarm.core.alarms import ENOUGH, REMEMBERED, Step
from tpuswarm.swarm.engines.ray import ANYWHERE, Started
from tpuswarm.swarm.views.status import MemberStatus

SILENT = 5.0
"""Seconds without an answer after which a guest without a lease is shown as lost: Ray notices a dead machine later."""
HUNG, HUNG_MEMBER, STARTING = 20.0, 40.0, 300.0
"""Seconds without an answer until a process is killed: coordinator and shards, on which everybody waits; members, whose
leases end sooner; one that never answered yet.
"""
LONGEST = 48
"""Letters of a machine's name in that of its member."""


@dataclass
class KeptProcess:
    """A process that is to be alive."""

    name: str
    maker: str
    arguments: dict[str, Any]
    environment: Mapping[str, str] = field(default_factory=dict)
    node: str | None = None
    """Of Ray, for a member that is not on this machine; see Cluster.start."""
    process: Started | None = None
    born: float = 0.0
    wake: float = 0.0
    """When it is made again."""
    deaths: int = 0
    """Since it last got anywhere."""
    pid: int | None = None
    heard: float = 0.0
    """When it last answered a look, by the supervisor's Clock."""
    seen: Any = None
    """Its newest look."""
    rows: int = 0
    """Rows of metrics taken from this process."""
    row: dict[str, Any] = field(default_factory=dict)
    """The newest of them."""
    steps: deque[Step] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    """The last of its process."""
    left: bool = False
    given_up: str = ""
    """Why it does not train, where trying again at once was in vain; an alarm until it does."""

    @property
    def member(self) -> bool:
        """Whether it is a member."""
        return self.maker.endswith(":member")

    @property
    def guest(self) -> bool:
        """Whether it is a member on a machine that joined."""
        return self.node not in (None, ANYWHERE)

    @property
    def incarnation(self) -> str | None:
        """The newest one of this process; None before the first."""
        return (self.seen or {}).get("incarnation")

    @property
    def answered(self) -> bool:
        """Whether it is there for all that is known."""
        return self.process is not None and self.pid is not None

    @property
    def busy(self) -> bool:
        """Whether it may still hand in something: what it trained, or the evaluation of the last version."""
        owes = self.incarnation or self.arguments.get("evaluates")
        return self.member and self.process is not None and not self.left and bool(owes)

    def silent(self, now: float) -> bool:
        """Whether it has to be killed: it was asked for too long how it stands. now: by the supervisor's Clock.

        Not a member that has left; a coordinator is asked to the end, for members hear from it that the run has ended.
        """
        if self.process is None or (self.left and self.member) or (self.node == ANYWHERE and self.pid is None):
            return False  # a cluster may be long in finding room for it
        return now - self.heard > (STARTING if self.pid is None else HUNG_MEMBER if self.member else HUNG)

    def began(self, process: Started, now: float) -> None:
        """It is alive as another process."""
        self.process, self.born, self.heard = process, now, now
        self.pid, self.seen, self.rows = None, None, 0
        self.steps.clear()

    def moved(self, node: str) -> None:
        """Its machine has come back as another node of Ray; what ran there is gone, or Ray is about to say so."""
        if self.left:
            self.process = None
        self.node, self.left, self.wake, self.deaths, self.given_up = node, False, 0.0, 0, ""

    def status(
        self, leased: Collection[str], version: int | None, tokens_per_row: int, carried: int, now: float
    ) -> MemberStatus:
        """As a member. leased: incarnations that the coordinator counts as alive; version: the newest."""
        seen, row = self.seen or {}, self.row
        silent = self.guest and self.pid is not None and now - self.heard > SILENT
        state: Any = "left" if self.left else "lost" if silent else "joining"
        if self.process is None:
            state = "lost"
        elif self.incarnation in leased and not self.left:
            state = "evaluating" if seen.get("evaluating") else "alive"
        base, speed = seen.get("base"), seen.get("rows_per_s")
        losses = [step.loss for step in list(self.steps)[-ENOUGH:] if step.loss is not None]
        return MemberStatus(
            id=self.name,
            state=state,
            pid=self.pid if self.process and not self.left else None,
            incarnation=self.incarnation,
            base=base,
            tokens=row.get("tokens", 0),
            tokens_per_s=speed * tokens_per_row if speed and state in ("alive", "joining") else None,
            loss=fmean(losses) if losses else None,
            grad_norm=row.get("grad_norm"),
            lag=None if base is None or version is None else max(0, version - base),
            carried=carried,
        )


def guest_name(host: str, taken: Collection[str]) -> str:
    """Of the member on a machine that joined: always the same one where it is free, so that it goes on as what it was.

    taken: names of guests that are there; two `join` on one machine are two members.
    """
    name = f"j-{re.sub(r'[^A-Za-z0-9._-]', '-', host)[:LONGEST]}"
    number, found = 1, name
    while found in taken:
        number += 1
        found = f"{name}-{number}"
    return found
