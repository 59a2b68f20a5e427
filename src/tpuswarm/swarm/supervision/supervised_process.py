"""A process that the supervisor keeps alive, and its status if it is a member."""

import re
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from tpuswarm.swarm.core.alarms import COMPARED_STEP_COUNT, MAX_REMEMBERED_STEPS, Step
from tpuswarm.swarm.engines.ray import ANYWHERE
from tpuswarm.swarm.views.status import MemberStatus

SILENCE_S = 5.0
"""A guest without a lease is shown as lost after this silence: Ray notices a dead machine later."""
HUNG_S, HUNG_MEMBER_S, STARTUP_S = 20.0, 40.0, 300.0
"""A process is killed after this silence: coordinator and aggregators, on which everything depends; members, whose
leases end sooner; any process that has never answered."""
MAX_HOST_CHARS = 48
"""Characters of a machine's name in its member's name."""


@dataclass
class SupervisedProcess:
    """A process that should be alive."""

    name: str
    maker: str
    arguments: dict[str, Any]
    environment: Mapping[str, str] = field(default_factory=dict)
    node: str | None = None
    """Ray's node of a process that is not on this machine; see Cluster.start."""
    machine: str = ""
    """Name of the machine that an aggregator is on; empty for this one."""
    actor: Any = None
    """An ActorHandle, or the RemoteHandle of a member that dialled in."""
    started_at: float = 0.0
    restart_at: float = 0.0
    deaths: int = 0
    """Deaths since its last progress."""
    log: Path | None = None
    """Its log on this machine, if it has one."""
    log_start: int = 0
    """Size of its log when it was started last."""
    last_error: str = ""
    """The error in its log when it died last, if that was before its first step."""
    pid: int | None = None
    last_answer: float = 0.0
    """By the supervisor's Clock."""
    report: Any = None
    """Its last report."""
    rows: int = 0
    """Metrics rows read from this process."""
    row: dict[str, Any] = field(default_factory=dict)
    """The newest row."""
    steps: deque[Step] = field(default_factory=lambda: deque(maxlen=MAX_REMEMBERED_STEPS))
    """Newest steps of this process."""
    left: bool = False
    set_aside_reason: str = ""
    """Why the member does not train although it was restarted; an alarm until it does."""

    @property
    def is_member(self) -> bool:
        return self.maker.endswith(":member")

    @property
    def is_aggregator(self) -> bool:
        return self.maker.endswith(":shard")

    @property
    def is_guest(self) -> bool:
        """Whether it is a member on a machine that joined."""
        return self.is_member and self.node not in (None, ANYWHERE)

    @property
    def incarnation(self) -> str | None:
        """The newest incarnation of this process; None before the first."""
        return (self.report or {}).get("incarnation")

    @property
    def has_answered(self) -> bool:
        return self.actor is not None and self.pid is not None

    @property
    def is_busy(self) -> bool:
        """Whether it may still push its work or evaluate the last version."""
        has_work = self.incarnation or self.arguments.get("evaluates")
        return self.is_member and self.actor is not None and not self.left and bool(has_work)

    @property
    def tokens_at_risk(self) -> int:
        """Tokens of a member that its death loses, or its end has lost, as it reported last."""
        return int((self.report or {}).get("at_risk", 0))

    def is_hung(self, now: float) -> bool:
        """Whether it must be killed because it does not answer. now: by the supervisor's Clock.

        Not a member that has left. The coordinator must answer to the end: members learn from it that the run ended.
        """
        if self.actor is None or (self.left and self.is_member) or (self.node == ANYWHERE and self.pid is None):
            return False  # a cluster may need long to find room
        limit = STARTUP_S if self.pid is None else HUNG_MEMBER_S if self.is_member else HUNG_S
        return now - self.last_answer > limit

    def set_started(self, actor: Any, now: float) -> None:
        """Note that it runs as a new actor."""
        self.actor, self.started_at, self.last_answer = actor, now, now
        self.pid, self.report, self.rows = None, None, 0
        self.steps.clear()

    def move(self, node: str) -> None:
        """Note that its machine returned as another node of Ray; the process on the old node ends."""
        if self.left:
            self.actor = None
        self.node, self.left, self.restart_at, self.deaths, self.set_aside_reason = node, False, 0.0, 0, ""

    def status(
        self, leased: Collection[str], version: int | None, tokens_per_row: int, carried: int, now: float
    ) -> MemberStatus:
        """Return a member's status. leased: incarnations with a lease; version: the newest; carried: bytes sent."""
        report, row = self.report or {}, self.row
        silent = self.is_guest and self.pid is not None and now - self.last_answer > SILENCE_S
        state: Any = "left" if self.left else "lost" if silent else "joining"
        if self.actor is None:
            state = "lost"
        elif self.incarnation in leased and not self.left:
            state = "evaluating" if report.get("evaluating") else "alive"
        base, speed = report.get("base"), report.get("rows_per_s")
        losses = [step.loss for step in list(self.steps)[-COMPARED_STEP_COUNT:] if step.loss is not None]
        return MemberStatus(
            id=self.name,
            state=state,
            pid=self.pid if self.actor and not self.left else None,
            incarnation=self.incarnation,
            base=base,
            tokens=row.get("tokens", 0),
            tokens_per_s=speed * tokens_per_row if speed and state in ("alive", "joining") else None,
            loss=fmean(losses) if losses else None,
            grad_norm=row.get("grad_norm"),
            lag=None if base is None or version is None else max(0, version - base),
            carried=carried,
            push_bytes_per_s=report.get("push_bytes_per_s"),
            round_trip_s=report.get("round_trip_s"),
        )


def guest_name(host: str, taken: Collection[str]) -> str:
    """Name the member of a joined machine, always the same one if it is free, so that the member resumes.

    taken: names of present guests; two `join` on one machine are two members.
    """
    base = f"j-{re.sub(r'[^A-Za-z0-9._-]', '-', host)[:MAX_HOST_CHARS]}"
    number, name = 1, base
    while name in taken:
        number += 1
        name = f"{base}-{number}"
    return name
