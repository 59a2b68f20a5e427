"""The gateway: admits members that dial in, passes their requests on, and collects their reports.

It answers for one member at a time what the coordinator and the aggregators answer, and nothing else. It holds no state
that matters: after its death members are admitted again, under the same name.
"""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints

from tpuswarm.swarm.anywhere.reports import Report, check_report
from tpuswarm.swarm.core.messages import Accepted, Refused
from tpuswarm.swarm.core.people import person_of
from tpuswarm.swarm.core.values import Identity
from tpuswarm.swarm.engines.actor import Outcome
from tpuswarm.swarm.processes.coordinator import Begin, Wait
from tpuswarm.swarm.processes.effects import Call, Unreachable
from tpuswarm.swarm.processes.requests import MemberName, request
from tpuswarm.swarm.storage.retention import UNNAMED_RETENTION_S

GATEWAY = "gateway"
"""Address of its process, and of the calls that it answers itself."""
MEMBER_REQUESTS: dict[str, Callable[..., str | None]] = {
    "hello": lambda member, *more: member,
    "beat": lambda report: report.incarnation.member,
    "push": lambda header: header.identity.incarnation.member,
    "leave": lambda incarnation: incarnation.member,
    "put": lambda identity, *more: identity.incarnation.member,
    **dict.fromkeys(("found", "fetch", "average", "updates", "file", "ranges"), lambda *arguments: None),
}
"""Requests of coordinator and aggregators that members make; each function returns the member that one names."""
FRESH_S = 10.0
"""A member that was heard of within this time is at work, or goes on if it was believed lost."""
MAX_REMEMBERED_S = 600.0
"""A member that is silent for this long is forgotten; the coordinator has given its rows to others long before."""
MAX_MEMBERS_OF_A_PERSON = 64
"""Until they are forgotten, those that have left included."""
MAX_UNACCEPTED_PUSHES = 128
"""Of a person in a day; each member that dies leaves one at most. Their payloads are deleted after that time."""
MAX_WASTED_PAYLOADS = 1000
"""Payloads of a person in a day that arrive again, damaged, or for nothing."""
MAX_UNPUSHED_ROWS = 100_000
"""Rows of metrics of a person in a day, beyond the rows of data in their accepted pushes."""
DAY_S = 86_400.0
MAX_REASON_CHARS = 500
Word = Annotated[str, StringConstraints(max_length=64, pattern=r"^[ -~]*$")]
Facts = Annotated[dict[Word, Word], Field(max_length=16)]
How = Literal["", "ended", "left", "over", "wrong", "failed"]
"""How a member's process ended, as in Outcome; empty while it works."""


@dataclass(frozen=True)
class Admitted:
    """A member's place in the run, and what its process needs to know."""

    member: str
    plan: str
    """The RunPlan as JSON."""
    shards: tuple[str, ...]
    files_from: str
    steps: int
    """Steps that this member made before."""
    evaluates: bool


@dataclass(frozen=True)
class Reported:
    """Answer to a report."""

    rows: int
    """Metrics rows of this instance that are stored."""
    should_leave: bool


@dataclass
class RemoteMember:
    """A member that dialled in."""

    person: str
    instance: str
    """MACHINE.NUMBER, both random, the number drawn for each process: a newer one replaces an older one."""
    facts: Mapping[str, str]
    """Versions of its software."""
    pid: int
    seen: float
    admitted: Admitted | None = None
    should_leave: bool = False
    dismissed: str = ""
    """Why it may not go on."""
    outcome: Outcome | None = None
    """How it ended."""
    report: Report | None = None
    """Its last report, with the rows that are not stored."""
    reports: int = 0
    """How many there were."""
    rows_stored: int = 0
    rows_reported: int = 0

    def works(self, now: float) -> bool:
        """Return whether it was heard of just now, and has not ended."""
        return now - self.seen < FRESH_S and self.outcome is None and not self.dismissed


@dataclass
class _Push:
    """A push that is not accepted."""

    touched: float
    fragments: set[int] = field(default_factory=set)
    """Those whose payload is stored."""


@dataclass
class _Usage:
    """What a person's members have sent in a day."""

    began: float
    pushes: dict[Identity, _Push] = field(default_factory=dict)
    wasted_payloads: int = 0
    unpushed_rows: int = 0


@dataclass
class Gateway:
    """Members by name. Any thread may call it."""

    calls: Callable[[Call], Any]
    clock: Callable[[], float]
    members: dict[str, RemoteMember] = field(default_factory=dict)
    _founders: set[str] = field(default_factory=set)
    """People of members that the coordinator has asked to create the first version."""
    _usages: dict[str, _Usage] = field(default_factory=dict)
    """By person."""
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def serve(self, person: str, call: Call) -> Any:
        """Execute a request of a person's member. Raise Unreachable if no answer comes."""
        if call.address == GATEWAY:
            with self._lock:
                self._forget_silent_members()
                handler = {"join": self.join, "report": self.take_report}.get(call.method)
                return handler(person, *call.arguments) if handler else Refused(f"there is no request {call.method!r}")
        find_member = MEMBER_REQUESTS.get(call.method)
        if find_member is None:
            return Refused(f"members do not request {call.method!r}")
        try:
            named = find_member(*call.arguments)
        except (AttributeError, TypeError):
            return Refused(f"{call.method} is malformed")
        if named is not None and person_of(str(named)) != person:
            return Refused(f"{named} is not a member of {person}")
        if call.method == "found" and person not in self._founders:
            return Refused("only the member that was asked creates the first version")
        if call.method == "put" and (why := self._why_not_store(person, call.arguments[0])):
            return Refused(why)
        answer = self.calls(call)
        if isinstance(answer, Begin):
            self._founders.add(person)
        with self._lock:
            usage = self._usage(person)
            if call.method == "push" and isinstance(answer, Accepted):
                header = call.arguments[0]
                usage.pushes.pop(header.identity, None)
                usage.unpushed_rows = max(0, usage.unpushed_rows - len(header.rows))
            elif call.method == "put":
                push = usage.pushes.get(call.arguments[0])
                if not isinstance(answer, Accepted) or push is None or call.arguments[1] in push.fragments:
                    usage.wasted_payloads += 1
                else:
                    push.fragments.add(call.arguments[1])
        return answer

    def _usage(self, person: str) -> _Usage:
        """Return what a person has sent, without what is too long ago."""
        now = self.clock()
        usage = self._usages.setdefault(person, _Usage(now))
        if now - usage.began > DAY_S:
            usage.began, usage.wasted_payloads, usage.unpushed_rows = now, 0, 0
        usage.pushes = {key: push for key, push in usage.pushes.items() if push.touched > now - UNNAMED_RETENTION_S}
        return usage

    def _why_not_store(self, person: str, identity: Identity) -> str:
        """Return why a person may not store a payload of this push now; empty if they may."""
        with self._lock:
            usage = self._usage(person)
            if usage.wasted_payloads >= MAX_WASTED_PAYLOADS:
                return f"{person} has sent {MAX_WASTED_PAYLOADS} payloads in vain today"
            if identity not in usage.pushes and len(usage.pushes) >= MAX_UNACCEPTED_PUSHES:
                return f"{person} has stored payloads of {MAX_UNACCEPTED_PUSHES} pushes that were never accepted"
            usage.pushes.setdefault(identity, _Push(0.0)).touched = self.clock()
            return ""

    @request
    def join(
        self, person: str, member: MemberName, instance: Word, pid: int, facts: Facts
    ) -> Admitted | Refused | Wait:
        """Ask for a place until the supervisor has given one. A newer instance of a member replaces the older one."""
        if person_of(member) != person:
            return Refused(f"{member} is not a member of {person}")
        known = self.members.get(member)
        if known is None or known.instance != instance:
            if known is not None and known.works(self.clock()) and _machine_of(known.instance) != _machine_of(instance):
                return Refused(f"another machine is {member} already; name this one with --name")
            count = sum(other.person == person for other in self.members.values())
            if known is None and count >= MAX_MEMBERS_OF_A_PERSON:
                return Refused(f"{person} has {count} members already")
            self.members[member] = known = RemoteMember(person, instance, facts, pid, self.clock())
        known.seen = self.clock()
        if known.dismissed:
            return Refused(known.dismissed)
        return known.admitted or Wait()

    @request
    def take_report(
        self, person: str, member: MemberName, instance: Word, report: dict[str, Any] | None, how: How, reason: str
    ) -> Reported | Refused | Unreachable:
        """Take a member's report, and how it ended if it has; Unreachable asks a member to join again."""
        known = self.members.get(member)
        if known is None or known.person != person:
            return Unreachable()
        if known.instance != instance:
            return Refused(f"another process took the place of {member}")
        known.seen = self.clock()
        if report is not None:
            try:
                checked = check_report(report, member)
            except ValueError as error:
                return Refused(f"the report is malformed: {error}")
            usage, end = self._usage(person), checked["first"] + len(checked["rows"])
            usage.unpushed_rows += min(len(checked["rows"]), max(0, end - known.rows_reported))
            known.rows_reported = max(known.rows_reported, end)
            if usage.unpushed_rows > MAX_UNPUSHED_ROWS:
                return Refused(f"{person} has sent {MAX_UNPUSHED_ROWS:,} rows of metrics today without a push")
            known.report, known.reports = checked, known.reports + 1
        if how:
            shown = "".join(sign if sign.isprintable() else " " for sign in reason[:MAX_REASON_CHARS])
            known.outcome = Outcome(how, shown)
        if known.dismissed:
            return Refused(known.dismissed)
        return Reported(known.rows_stored, known.should_leave)

    def state(self) -> dict[str, RemoteMember]:
        """Return all members, for the supervisor."""
        with self._lock:
            return dict(self.members)

    def update(self, member: str, instance: str, change: Mapping[str, Any]) -> None:
        """Let the supervisor change fields of a member, unless another instance has replaced it."""
        with self._lock:
            known = self.members.get(member)
            if known is not None and known.instance == instance:
                for name, value in change.items():
                    setattr(known, name, value)

    def _forget_silent_members(self) -> None:
        now = self.clock()
        for name, known in list(self.members.items()):
            if now - known.seen > MAX_REMEMBERED_S:
                del self.members[name]


def _machine_of(instance: str) -> str:
    return instance.partition(".")[0]
