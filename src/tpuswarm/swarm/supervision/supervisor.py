"""The supervisor of a run: keeps its processes alive, follows its ledger, and records what happens.

It holds the run's directory and alone writes its text files. Its death ends the processes that it started; the same
command then resumes from the ledger.
"""

import json
import time
from collections.abc import Callable, Mapping
from signal import SIGHUP, SIGINT
from typing import Any, NamedTuple

from tpuswarm.config.formatting import token_unit
from tpuswarm.errors import InputError, RunFailed, TpuswarmError
from tpuswarm.swarm.anywhere.gateway import GATEWAY
from tpuswarm.swarm.core.alarms import Step
from tpuswarm.swarm.core.arithmetic.quantize import bytes_per_element
from tpuswarm.swarm.core.ledger_view import LedgerView
from tpuswarm.swarm.core.summary import Summary
from tpuswarm.swarm.core.values import Record
from tpuswarm.swarm.engines.actor import Outcome
from tpuswarm.swarm.engines.notice import NOTICE_S
from tpuswarm.swarm.engines.ray import ANYWHERE, Cluster
from tpuswarm.swarm.processes.clock import Clock
from tpuswarm.swarm.processes.run_plan import COORDINATOR, FILE_SERVER, RunPlan, member_name
from tpuswarm.swarm.supervision.fatal_line import fatal_line, names_cause
from tpuswarm.swarm.supervision.ledger_follower import LedgerFollower
from tpuswarm.swarm.supervision.placement import Placement
from tpuswarm.swarm.supervision.remote_members import DIALLED_IN, RemoteHandle, RemoteMembers
from tpuswarm.swarm.supervision.run_reporter import RunReporter
from tpuswarm.swarm.supervision.supervised_process import SupervisedProcess, guest_name
from tpuswarm.swarm.supervision.traces import TraceCollector
from tpuswarm.swarm.views.events import commit_event
from tpuswarm.swarm.views.screen import Screen
from tpuswarm.swarm.views.status import FINISHED, STOPPED, SwarmStatus
from tpuswarm.train.process.stop import StopSignals
from tpuswarm.train.run.directory import EVENTS, METRICS, Run, read_rows_back

POLL_INTERVAL_S, SHORT_POLL_INTERVAL_S = 0.2, 0.02
"""The short one, times the number of processes, holds while a member waits until its rows are stored."""
MIN_BACKOFF_S, MAX_BACKOFF_S = 1.0, 60.0
"""Wait before a dead process is restarted; doubles while it makes no progress."""
MAX_FAILURES, MAX_DEATHS = 4, 12
"""A process may fail with an error, or die silently, this often in a row without a step (of a member) or a commit (of
the others). Then the run gives up, or only sets a member aside, if another one may train. The same goes for a member
that dies twice before its first step with the same cause in its log."""
SET_ASIDE_RETRY_S = 600.0
"""A member that was set aside is tried again after this time: the user may have fixed the cause."""
LAST_REPORT_TIMEOUT_S = 5.0
"""Timeout of each report: of a member that ended, and of the coordinator after the last member."""


class RunEnd(NamedTuple):
    """How a run ended."""

    how: str
    """`finished` or `stopped`."""
    message: str
    signal: int | None


class Supervisor:
    """One life of a run's supervisor."""

    def __init__(
        self,
        run: Run,
        plan: RunPlan,
        cluster: Cluster,
        screen: Screen,
        environment: Callable[[int | None], dict[str, str]],
        watch: Callable[["Supervisor"], None] = lambda supervisor: None,
        on_row: Callable[[dict[str, Any]], None] = lambda row: None,
        listen: tuple[str, int] | None = None,
    ):
        """environment: returns a member's variables by its number, or for None those of a joined one; watch: called in
        each round, for a demo; on_row: called with each metrics row of a member; listen: host and port for members
        that dial in.
        """
        self.run, self.plan, self.screen = run, plan, screen
        self._unit = token_unit(plan.tokens_per_row)
        self._cluster, self._environment, self._watch = cluster, environment, watch
        state_bytes = self._cluster.state_bytes / 4 * bytes_per_element(plan.swarm.quantize)
        self._ledger = LedgerFollower(run.folder, state_bytes, plan.keep_payloads)
        self.reporter = RunReporter(run, plan, screen, cluster.join_address, on_row)
        self._listen = listen
        self._placement = Placement(cluster, run.folder, self.reporter.event)
        self._summary: Summary | None = None
        commits = (row["version"] for row in read_rows_back(run.folder / EVENTS) if row["event"] == "commit")
        self._last_announced = next(commits, 0)
        self.processes: dict[str, SupervisedProcess] = {}
        self._known_nodes: set[str] = set()
        """Nodes that ever had a member: a machine that returns is another node."""
        self._joined: frozenset[str] = frozenset()
        """Members that have had an incarnation."""
        self._traces = TraceCollector(run.folder, self.reporter.event)
        self._stopping_since = 0.0
        self._lost_at_stop = 0
        """Tokens that members trained and could not push before the run stopped."""
        self._clock = Clock(time.monotonic)

    @property
    def status(self) -> SwarmStatus | None:
        """The status that was written last."""
        return self.reporter.status

    @property
    def view(self) -> LedgerView | None:
        """The ledger up to its newest commit; None before the first."""
        return self._ledger.view

    def run_to_end(self) -> RunEnd:
        """Supervise until the run is finished or stopped. Raise RunFailed or InputError for lasting failures."""
        self._define_processes()
        with StopSignals() as stop:
            while True:
                self.run.check()
                self._cluster.require_alive()
                self._keep_alive()
                self._follow_ledger()
                self._collect_reports()
                self._traces.update(self.processes)
                self._write_status()
                self._watch(self)
                if self.processes[COORDINATOR].left and self._members_done():
                    self._follow_ledger()
                    self._write_status(FINISHED)
                    return RunEnd("finished", f"finished: {self.plan.settings['steps']} steps", None)
                if stop.requested is not None:
                    if not self._stopping_since:
                        self._give_notice()
                    if self._stop_is_complete() or time.monotonic() - self._stopping_since > NOTICE_S:
                        self._follow_ledger()
                        self._lost_at_stop += sum(it.tokens_at_risk for it in self.processes.values() if it.is_busy)
                        # SIGTERM takes the machine away: another head will continue the run.
                        self._write_status(STOPPED if stop.requested == SIGINT else "stopped")
                        why = "its terminal closed: " if stop.requested == SIGHUP else ""
                        return RunEnd("stopped", f"{why}{self._stopped_at()}", int(stop.requested))
                time.sleep(self._poll_interval_s())

    def _poll_interval_s(self) -> float:
        running = [process for process in self.processes.values() if process.actor]
        if any((process.report or {}).get("awaits_storage") for process in running):
            return min(POLL_INTERVAL_S, SHORT_POLL_INTERVAL_S * len(running))
        return POLL_INTERVAL_S

    def _define_processes(self) -> None:
        """Define the coordinator, the aggregators, and the members that the run was started with.

        Aggregators serve the run's data files, or a process of its own if they may be on other machines.
        """
        plan, folder = self.plan, self.run.folder.resolve()
        count = plan.swarm.aggregators
        shards = tuple(f"aggregator-{number}" for number in range(count))
        data = str(folder / "data")
        entry = "tpuswarm.swarm.supervision.entry"
        given = {"plan": plan, "store": str(folder), "shards": shards, "alone": True}
        self._add(SupervisedProcess(COORDINATOR, f"{entry}:coordinator", given))
        given = {"store": str(folder), "data": data, "shards": count}
        for number, name in enumerate(shards):
            self._add(SupervisedProcess(name, f"{entry}:shard", given | {"index": number}))
        files_from = shards[0]
        if self.run.in_bucket and self._cluster.join_address and plan.files:
            files_from = FILE_SERVER
            self._add(SupervisedProcess(files_from, f"{entry}:file_server", {"store": str(folder), "data": data}))
        if self._listen:
            given = {"store": str(folder), "listen": self._listen, "largest": self._cluster.largest}
            self._add(SupervisedProcess(GATEWAY, f"{entry}:gateway", given))
            self._remote = RemoteMembers(self, plan, shards, files_from)
        self._member_arguments = {
            "plan": plan, "shards": shards, "data": data, "files_from": files_from, "evaluates": False,
        }  # fmt: skip
        for number in range(plan.swarm.members):
            name = member_name(number)
            given = {**self._member_arguments, "name": name, "evaluates": number == 0}
            if self._cluster.is_external:
                self._add(SupervisedProcess(name, f"{entry}:member", {**given, "data": None}, node=ANYWHERE))
            else:
                self._add(SupervisedProcess(name, f"{entry}:member", given, self._environment(number)))

    def _add(self, process: SupervisedProcess) -> None:
        self.processes[process.name] = process

    def _aggregators(self) -> list[SupervisedProcess]:
        return [process for process in self.processes.values() if process.is_aggregator]

    def _last_row(self, name: str) -> dict[str, Any]:
        """Return the row of a member's last step, before this supervisor too; empty without one."""
        rows = read_rows_back(self.run.folder / METRICS, json.dumps({"member": name})[1:-1].encode())
        return next((row for row in rows if "loss" in row), {})

    def _keep_alive(self) -> None:
        now = time.monotonic()
        self._assign_joined_machines()
        if not self._stopping_since:
            self._placement.move(self._aggregators(), now)
        for process in list(self.processes.values()):
            is_coordinator = process.name == COORDINATOR
            if process.left and is_coordinator and process.actor and process.actor.gone and not self._members_done():
                process.left, process.actor = False, None  # members must still learn from it that the run has ended
            if process.left:
                continue
            if process.actor is None:
                if now >= process.restart_at and not self._stopping_since:
                    self._start(process)
                continue
            outcome = process.actor.outcome()
            if outcome is not None:
                self._handle_end(process, outcome, now)

    def _assign_joined_machines(self) -> None:
        """Give each joined machine a member, if possible its former one, and release members of lost machines."""
        nodes = self._cluster.member_nodes()
        for process in self.processes.values():
            if process.is_guest and process.node not in nodes and process.actor is None:
                process.left = True
        for node, host in nodes.items():
            if node in self._known_nodes:
                continue
            guests = [
                process
                for process in self.processes.values()
                if process.is_guest and not process.left and process.node in nodes
            ]
            name = guest_name(host, [guest.name for guest in guests if guest.has_answered])
            if name in (guest.name for guest in guests):
                continue  # until it answers or its node is gone: it may be this machine's former process
            self._known_nodes.add(node)
            if name in self.processes:
                self.processes[name].move(node)
            else:
                given = {**self._member_arguments, "name": name, "data": None}
                entry = "tpuswarm.swarm.supervision.entry:member"
                self._add(SupervisedProcess(name, entry, given, self._environment(None), node))
            self.reporter.event("note", member=name, message=f"new machine: {name}")

    def _start(self, process: SupervisedProcess) -> None:
        arguments = process.arguments
        if process.is_aggregator:
            arguments = self._placement.place(process, self._aggregators(), time.monotonic())
        if process.name == COORDINATOR and process.started_at:
            arguments = {**arguments, "alone": False}
        if process.is_member:
            steps, evaluates = self.begin_member(process)
            process.arguments = arguments = {**arguments, "steps": steps, "evaluates": evaluates}
        log = (self.run.folder / "logs" / f"{process.name}.log").resolve()
        if not process.node:
            process.log, process.log_start = log, log.stat().st_size if log.exists() else 0
        actor = self._cluster.start(process.name, process.maker, arguments, process.environment, log, process.node)
        if actor is None:
            return
        process.set_started(actor, self._clock())
        if process.is_aggregator:
            self._placement.log_start(process)

    def begin_member(self, process: SupervisedProcess) -> tuple[int, bool]:
        """Return how many steps a member made before, and whether it shall evaluate."""
        process.row = process.row or self._last_row(process.name)
        return process.row.get("step", 0), self._should_evaluate(process)

    def change_remote(self, name: str, instance: str, change: Mapping[str, Any]) -> None:
        """Change fields of a member of the gateway."""
        if (actor := self.processes[GATEWAY].actor) is not None:
            actor.send("update", (name, instance, change))

    def report_dialled_in(self, name: str, facts: Mapping[str, str]) -> None:
        versions = ", ".join(f"{package} {version}" for package, version in facts.items())
        self.reporter.event("note", member=name, message=f"{name} connected ({versions})")

    def report_lost(self, process: SupervisedProcess, reason: str) -> None:
        self.reporter.event("lost", message=reason, own_machine=process.is_guest, **self._loss(process))

    def _should_evaluate(self, process: SupervisedProcess) -> bool:
        others = [other for other in self.processes.values() if other.is_member and other is not process]
        return not any(other.arguments["evaluates"] for other in others if not other.left)

    def _handle_end(self, process: SupervisedProcess, outcome: Outcome, now: float) -> None:
        if process.is_aggregator and process.node:
            self._placement.handle_end(process, outcome, now)
            return
        if process.is_member and outcome.how != "dead":
            self._request_report(process)
        refused = process.is_member and outcome.how in ("wrong", "over")
        may_leave = outcome.how == "left" or refused
        if outcome.how == "ended" or (may_leave and (self._stopping_since or process.is_guest)):
            process.left = True  # its actor stays: members must learn from the coordinator that the run has ended
            if outcome.how == "left":
                self._report_left(process)
            elif refused:
                self.reporter.event("note", member=process.name, message=outcome.reason)
                self._dismiss(process, outcome)
            if process.is_guest and process.actor:
                process.actor.kill()  # its machine waits for that
            return
        if process.actor and outcome.how != "dead":
            process.actor.kill()  # frees its devices and its name for the next one
        process.actor = None
        if refused:
            why = InputError(outcome.reason) if outcome.how == "wrong" else RunFailed(outcome.reason)
            self._set_aside(process, why, now)
            return
        if outcome.how == "wrong":
            raise InputError(outcome.reason)
        if outcome.how == "over":
            raise RunFailed(f"{process.name}: {outcome.reason}")
        self._schedule_restart(process, outcome, now)

    def _schedule_restart(self, process: SupervisedProcess, outcome: Outcome, now: float) -> None:
        process.deaths += 1
        error = fatal_line(process.log, process.log_start) if process.log and outcome.how == "dead" else ""
        is_hopeless = process.is_member and not process.rows and error == process.last_error and names_cause(error)
        process.last_error = "" if process.rows else error
        process.restart_at = now + min(MIN_BACKOFF_S * 2 ** max(0, process.deaths - 1), MAX_BACKOFF_S)
        if process.is_member:
            if outcome.how == "left":
                process.restart_at = now + MAX_BACKOFF_S
                self._report_left(process)
            elif process.pid or outcome.how != "dead" or not process.is_guest:  # else Ray lists a lost machine's node
                is_killed = outcome.how == "dead" and process.node != DIALLED_IN
                reason = error or ("killed" if is_killed else outcome.reason)
                self.report_lost(process, reason)
        else:
            reason = f"it died{error and f' ({error})'}" if outcome.how == "dead" else outcome.reason
            kind = "coordinator" if process.name == COORDINATOR else "shard"
            self.reporter.event(kind, name=process.name, message=f"{reason}; restarting it")
        if is_hopeless or process.deaths >= (MAX_FAILURES if outcome.how == "failed" else MAX_DEATHS):
            self._give_up(process, f"{error} (logs/{process.name}.log)" if error else outcome.reason, now)

    def _report_left(self, process: SupervisedProcess) -> None:
        self.reporter.event("left", **self._loss(process))
        if self._stopping_since:
            self._lost_at_stop += process.tokens_at_risk

    def _loss(self, process: SupervisedProcess) -> dict[str, Any]:
        """Return the facts of an event about a member that ended, with the tokens that it trained and did not push."""
        who = {"member": process.name, "incarnation": process.incarnation, "pid": process.pid}
        return {**who, "tokens": process.tokens_at_risk, "unit": self._unit}

    def _give_up(self, process: SupervisedProcess, reason: str, now: float) -> None:
        sentence = f"{process.name} failed {process.deaths} times without any progress: {reason}"
        if process.is_guest:
            process.left = True
            self.reporter.event("note", member=process.name, message=f"{sentence}; giving up on its machine")
            self._dismiss(process, Outcome("failed", sentence))
        elif process.is_member:
            self._set_aside(process, RunFailed(sentence), now)
        else:
            raise RunFailed(sentence)

    def _dismiss(self, process: SupervisedProcess, outcome: Outcome) -> None:
        """Tell the command on a guest's machine why its member ends."""
        if isinstance(process.actor, RemoteHandle):
            process.actor.dismiss(outcome.reason)
        elif process.is_guest and process.node:
            self._cluster.dismiss(process.node, outcome)

    def _set_aside(self, process: SupervisedProcess, why: TpuswarmError, now: float) -> None:
        """Set a member of this machine aside. Raise `why` if no other one may train and the run has not ended."""
        others = [other for other in self.processes.values() if other.is_member and other is not process]
        if not self.processes[COORDINATOR].left and all(other.left or other.set_aside_reason for other in others):
            raise why
        process.set_aside_reason, process.restart_at = str(why), now + SET_ASIDE_RETRY_S

    def _collect_reports(self) -> None:
        for process in list(self.processes.values()):
            if process.actor:
                self._handle_report(process, process.actor.report(process.rows))
            if process.actor and process.is_hung(now := self._clock()):
                then = "others get its rows unless it is back soon" if process.node == DIALLED_IN else "restarting it"
                message = f"{process.name} has not answered for {now - process.last_answer:.0f} s: {then}"
                self.reporter.event("note", message=message)
                process.last_answer = now  # until Ray has noticed
                process.actor.kill()
        self.reporter.sync_rows()  # before the next requests, which tell the members that their rows are stored

    def _request_report(self, process: SupervisedProcess, seconds: float = 2 * LAST_REPORT_TIMEOUT_S) -> None:
        for _ in range(2):
            if process.actor:
                timeout_s = max(0.0, min(LAST_REPORT_TIMEOUT_S, seconds / 2))
                self._handle_report(process, process.actor.report(process.rows, timeout_s))

    def _handle_report(self, process: SupervisedProcess, answer: tuple[int, Any] | None) -> None:
        """Store a report, and write a member's metrics rows."""
        if answer is None:
            return
        process.pid, report = answer
        process.last_answer = self._clock()
        if process.name == COORDINATOR:
            self._summary = report or self._summary
        if process.name == GATEWAY and report is not None:
            self._remote.update(report, self._clock(), is_open=not self._stopping_since)
        if not process.is_member or report is None:
            return
        if report["incarnation"] and report["incarnation"] != process.incarnation:
            again, self._joined = process.name in self._joined, self._joined | {process.name}
            facts = {"incarnation": report["incarnation"], "pid": process.pid, "again": again}
            self.reporter.event("joined", member=process.name, **facts)
        if part := report.pop("trace", None):
            self._traces.add_part(process, part)
        process.report, rows = report, report["rows"]
        if not rows:
            return
        process.rows += len(rows)
        process.deaths, process.set_aside_reason = 0, ""
        for row in rows:
            if "loss" in row:
                process.row = row
                if not row.get("uncounted"):
                    process.steps.append(Step(row["version"], row["loss"], row.get("grad_norm")))
        self.reporter.rows(process.name, rows)

    def _follow_ledger(self) -> None:
        """Announce new commits, and remove old files now and then."""
        is_first = self.view is None
        for record in self._ledger.new_records(self._may_have_news()):
            self._announce(record)
            if not is_first:
                self.reporter.last_progress = time.monotonic()
        if message := self._ledger.clean():
            self.reporter.event("note", message=message)

    def _write_status(self, phase: str = "") -> None:
        self.reporter.write_status(self._summary, self.processes.values(), self._ledger, self._clock(), phase)

    def _may_have_news(self) -> bool:
        """Whether to look for records: in a bucket that costs a request, and the coordinator reports new ones."""
        view = self.view
        if not self.run.in_bucket or self.processes[COORDINATOR].left or self._stopping_since:
            return True
        return self._summary is not None and (view is None or self._summary.version > view.version)

    def _announce(self, record: Record) -> None:
        for process in self.processes.values():
            if not process.is_member:
                process.deaths = 0
        if record.version > self._last_announced:
            self._last_announced = record.version
            self.reporter.count(record)
            self.reporter.event("commit", **commit_event(record), unit=self._unit)

    def _give_notice(self) -> None:
        """Ask all members to push their work and leave."""
        self._stopping_since = time.monotonic()
        trained = any(process.incarnation for process in self.processes.values())
        pushing = f": the members push their last work, in at most {NOTICE_S:.0f} s; Ctrl-C again throws it away"
        self.screen.note(f"stopping{pushing * trained}")
        for process in self.processes.values():
            if process.is_member and process.actor:
                process.actor.leave()

    def _members_done(self) -> bool:
        return not any(process.is_busy for process in self.processes.values())

    def _stop_is_complete(self) -> bool:
        if any(process.is_busy and process.incarnation for process in self.processes.values()):
            return False
        # Only a report that starts now, after all members have left, knows their last pushes.
        self._request_report(self.processes[COORDINATOR], self._stopping_since + NOTICE_S - time.monotonic())
        return self._summary is None or not self._summary.has_undecided

    def _stopped_at(self) -> str:
        where = "before the first commit"
        if view := self.view:
            where = f"at commit {view.version}, {view.tokens:,} {self._unit} counted"
        lost = f"; {self._lost_at_stop:,} trained {self._unit} were not pushed in time" if self._lost_at_stop else ""
        return f"stopped {where}{lost}"
