"""Members that dialled in, as the supervisor sees them: the gateway reports them, and passes its decisions on."""

import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from pydantic import TypeAdapter

from tpuswarm.swarm.anywhere.gateway import FRESH_S, Admitted, RemoteMember
from tpuswarm.swarm.engines.actor import Outcome
from tpuswarm.swarm.processes.run_plan import RunPlan
from tpuswarm.swarm.supervision.supervised_process import SupervisedProcess

DIALLED_IN = "dialled in"
"""Instead of a node's name: the member reaches the swarm by the gateway."""
MAKER = "tpuswarm.swarm.anywhere.remote_member:member"
"""Names its kind; the supervisor does not start it."""
_PLAN: TypeAdapter[RunPlan] = TypeAdapter(RunPlan)

Change = Callable[[str, str, Mapping[str, Any]], None]
"""Changes fields of a member of the gateway, by its name and its instance."""


class RemoteHandle:
    """A member that dialled in; it answers as an ActorHandle does."""

    gone = False

    def __init__(self, name: str, member: RemoteMember, change: Change):
        self._name, self._change = name, change
        self.member = member
        """As the gateway reported it last."""
        self.is_lost = False
        self.steps_before = 0
        """Steps whose rows were stored before: by a supervisor that has died, if the member's process is older."""
        self.evaluates = False
        """Whether it was asked to evaluate; evaluations of others are not stored."""
        self._skipped = 0
        """Rows of this process that are stored already, or never will be."""
        self._stored, self._reports_read = 0, 0
        self._changes: dict[str, Any] = {}
        """Changes of its fields at the gateway; a new gateway needs them again."""

    def outcome(self) -> Outcome | None:
        """Return how it ended; None while it works, or has rows that are not stored."""
        if self.is_lost:
            return Outcome("dead", "it was silent for too long")
        report = self.member.report
        unread = report is not None and report["first"] + len(report["rows"]) > self._stored
        return None if unread else self.member.outcome

    def report(self, since: int, seconds: float = 0.0) -> tuple[int, Any] | None:
        """Return a report once, with the rows that follow the `since` ones that were read; those are stored."""
        self._stored = self._changes["rows_stored"] = self._skipped + since
        self._send_changes()
        report = self.member.report
        if report is None or self.member.reports == self._reports_read:
            return None
        self._reports_read = self.member.reports
        self._skipped += max(0, report["first"] - self._stored)
        unread = report["rows"][max(0, self._stored - report["first"]) :]
        rows: list[dict[str, Any]] = [dict(row) for row in unread]
        rows = [row for row in rows if (row["step"] > self.steps_before if "loss" in row else self.evaluates)]
        self._skipped += len(unread) - len(rows)
        return self.member.pid, {**report, "rows": rows}

    def leave(self) -> None:
        self._changes["should_leave"] = True
        self._send_changes()

    def kill(self) -> None:
        """Give it up until it comes back."""
        self.is_lost = True

    def dismiss(self, reason: str) -> None:
        """Tell it why it may not go on."""
        self._changes["dismissed"] = reason
        self._send_changes()

    def _send_changes(self) -> None:
        """Send what the gateway does not report yet."""
        changes = {name: value for name, value in self._changes.items() if getattr(self.member, name) != value}
        if changes:
            self._change(self._name, self.member.instance, changes)

    def trace(self, steps: int) -> None:
        """Do nothing; see TraceCollector."""


class Head(Protocol):
    """The supervisor, as these members need it."""

    processes: dict[str, SupervisedProcess]
    """By name; members that dial in are added."""

    def begin_member(self, process: SupervisedProcess) -> tuple[int, bool]:
        """Return how many steps a member made before, and whether it shall evaluate."""
        ...

    def change_remote(self, name: str, instance: str, change: Mapping[str, Any]) -> None:
        """Change fields of a member of the gateway."""
        ...

    def report_dialled_in(self, name: str, facts: Mapping[str, str]) -> None: ...

    def report_lost(self, process: SupervisedProcess, reason: str) -> None: ...


class RemoteMembers:
    """All members that dialled in."""

    def __init__(self, head: Head, plan: RunPlan, shards: tuple[str, ...], files_from: str):
        self._head, self._plan = head, _PLAN.dump_json(plan).decode()
        self._shards, self._files_from = shards, files_from
        self._handles: dict[str, RemoteHandle] = {}
        """The newest of each member, lost ones included."""

    def update(self, members: Mapping[str, RemoteMember], now: float, is_open: bool) -> None:
        """Follow the gateway's report. now: by the supervisor's Clock; is_open: whether members may come."""
        head = self._head
        for name, member in members.items():
            handle = self._handles.get(name)
            if handle is None or handle.member.instance != member.instance:
                if not is_open:
                    continue  # it waits for the next head
                handle = RemoteHandle(name, member, head.change_remote)
            handle.member = member
            process = head.processes.get(name)
            if process is None:
                process = head.processes[name] = SupervisedProcess(name, MAKER, {"evaluates": False}, node=DIALLED_IN)
            is_new = process.actor is not handle
            if is_new and member.outcome is None and not member.dismissed and _is_fresh(member):
                if process.actor is not None and process.is_busy:
                    head.report_lost(process, "killed")  # and started again before its silence was noticed
                rows = process.rows if handle is self._handles.get(name) else 0  # those that came before it was lost
                if handle is not self._handles.get(name):
                    handle.steps_before, _ = head.begin_member(process)
                self._handles[name], handle.is_lost = handle, False
                process.move(DIALLED_IN)
                process.set_started(handle, now)
                process.rows = rows
                if not is_open:
                    handle.leave()
                head.report_dialled_in(name, member.facts)
            if member.admitted is None and process.actor is handle:
                steps, evaluates = head.begin_member(process)
                process.arguments = {"evaluates": evaluates}
                handle.evaluates |= evaluates
                admitted = Admitted(name, self._plan, self._shards, self._files_from, steps, evaluates)
                head.change_remote(name, member.instance, {"admitted": admitted})


def _is_fresh(member: RemoteMember) -> bool:
    """Whether a member has just been heard of; gateway and supervisor run on one machine, with one clock."""
    return time.monotonic() - member.seen < FRESH_S
