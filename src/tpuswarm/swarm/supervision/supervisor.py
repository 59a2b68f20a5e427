"""The supervisor of a run: keeps its processes alive, follows its ledger, and writes down what happened.

It holds the run's directory and is the only one that writes its text files. Its own death ends the processes that it
started; the same command goes on from the ledger.
"""

import time
from collections.abc import Callable
from signal import SIGHUP, SIGINT
from typing import Any, NamedTuple

from tpuswarm.config.formatting import token_unit
from tpuswarm.errors import InputError, RunFailed, TpuswarmError
from tpuswarm.swarm.core.alarms import Step
from tpuswarm.swarm.core.arithmetic.quantize import bytes_per_element
from tpuswarm.swarm.core.summary import Summary
from tpuswarm.swarm.core.values import Record
from tpuswarm.swarm.core.view import View
from tpuswarm.swarm.engines.actor import Outcome
from tpuswarm.swarm.engines.notice import GOODBYE
from tpuswarm.swarm.engines.ray import ANYWHERE, Cluster
from tpuswarm.swarm.processes.clock import Clock
from tpuswarm.swarm.processes.plan import HEAD, Plan, member_name
from tpuswarm.swarm.supervision.followed import Followed
from tpuswarm.swarm.supervision.kept import KeptProcess, guest_name
from tpuswarm.swarm.supervision.telling import Telling
from tpuswarm.swarm.supervision.traces import Traces
from tpuswarm.swarm.views.events import commit_event
from tpuswarm.swarm.views.screen import Screen
from tpuswarm.swarm.views.status import FINISHED, STOPPED, SwarmStatus
from tpuswarm.train.process.stop import StopSignals
from tpuswarm.train.run.directory import EVENTS, METRICS, Run, read_rows_back

LOOK = 0.2
"""Seconds between two rounds of looking at everything."""
BACKOFF, BACKOFF_MAX = 1.0, 60.0
"""Seconds until a process that died is made again: doubled while it gets nowhere."""
FAILURES, DEATHS = 4, 12
"""Ends of a process in a row without a step (of a member) or a commit (of the others), until the run gives up: by an
error of its own, and without a word. A member is only set aside then, while another one may train.
"""
ANOTHER_TRY = 600.0
"""Seconds until a member that was set aside is tried again: somebody may have put right what was wrong."""
LAST_LOOK = 5.0
"""Seconds for each of two looks: for the last rows of a member that ended, and the coordinator's word when all have."""


class Ended(NamedTuple):
    """How a run ended."""

    how: str
    """finished or stopped."""
    message: str
    signal: int | None


class Supervisor:
    """One life of a run's supervisor."""

    def __init__(
        self,
        run: Run,
        plan: Plan,
        cluster: Cluster,
        screen: Screen,
        environment: Callable[[int | None], dict[str, str]],
        watch: Callable[["Supervisor"], None] = lambda supervisor: None,
        took: Callable[[dict[str, Any]], None] = lambda row: None,
    ):
        """environment: of the member with a number, or of one that joined; watch: called at each look, for a demo;
        took: called with each row of a member.
        """
        self.run, self.plan, self.screen = run, plan, screen
        self._unit = token_unit(plan.tokens_per_row)
        self._cluster, self._environment, self._watch = cluster, environment, watch
        self._followed = Followed(run.folder, self._cluster.state_bytes / 4 * bytes_per_element(plan.swarm.quantize))
        self.telling = Telling(run, plan, screen, "" if cluster.found else cluster.address, took)
        self._summary: Summary | None = None
        told = (each["version"] for each in read_rows_back(run.folder / EVENTS) if each["event"] == "commit")
        self._told = next(told, 0)
        self.kept: dict[str, KeptProcess] = {}
        self._nodes: set[str] = set()
        """That were ever given a member: a machine that comes back is another node."""
        self._joined: frozenset[str] = frozenset()
        """Members that have had an incarnation."""
        self._traces = Traces(run.folder, self.telling.event)
        self._stopping = 0.0
        self._clock = Clock(time.monotonic)

    @property
    def status(self) -> SwarmStatus | None:
        """As it was written last."""
        return self.telling.status

    @property
    def view(self) -> View | None:
        """Of the newest commit; None before the first."""
        return self._followed.view

    def go(self) -> Ended:
        """Until the run is finished or stopped; raises RunFailed and InputError for what it cannot mend."""
        self._desire()
        with StopSignals() as stop:
            while True:
                self.run.check()
                self._keep()
                self._follow()
                self._look()
                self._traces.keep(self.kept)
                self._tell()
                self._watch(self)
                head = self.kept[HEAD]
                if head.left and self._gone():
                    self._follow()
                    self._tell(FINISHED)
                    return Ended("finished", f"finished: {self.plan.settings['steps']} steps", None)
                if stop.asked is not None:
                    if not self._stopping:
                        self._say_goodbye()
                    if self._gone(settled=True) or time.monotonic() - self._stopping > GOODBYE:
                        self._follow()
                        # Who takes its machine away sends SIGTERM: then another head goes on.
                        self._tell(STOPPED if stop.asked == SIGINT else "stopped")
                        why = "its terminal closed: " if stop.asked == SIGHUP else ""
                        return Ended("stopped", f"{why}{self._stopped_at()}", int(stop.asked))
                time.sleep(LOOK)

    def _desire(self) -> None:
        """What is to be alive: a coordinator, shards, and the members that the run was started with."""
        plan, folder = self.plan, self.run.folder.resolve()
        count = plan.swarm.aggregators
        shards = tuple(f"aggregator-{number}" for number in range(count))
        data = str(folder / "data")
        hosts = "tpuswarm.swarm.supervision.entry"
        given = {"plan": plan, "store": str(folder), "shards": shards, "alone": True}
        self._add(KeptProcess(HEAD, f"{hosts}:coordinator", given))
        for number, name in enumerate(shards):
            given = {"store": str(folder), "data": data, "index": number, "shards": count}
            self._add(KeptProcess(name, f"{hosts}:shard", given))
        self._member = {"plan": plan, "shards": shards, "data": data, "evaluates": False}
        for number in range(plan.swarm.members):
            name = member_name(number)
            given = {**self._member, "name": name, "steps": self._steps(name), "evaluates": number == 0}
            if self._cluster.found:
                self._add(KeptProcess(name, f"{hosts}:member", {**given, "data": None}, node=ANYWHERE))
            else:
                self._add(KeptProcess(name, f"{hosts}:member", given, self._environment(number)))

    def _add(self, kept: KeptProcess) -> None:
        self.kept[kept.name] = kept

    def _steps(self, name: str) -> int:
        rows = read_rows_back(self.run.folder / "members" / name / METRICS)
        return next((row["step"] for row in rows if "loss" in row), 0)

    def _keep(self) -> None:
        now = time.monotonic()
        self._keep_joined()
        for kept in list(self.kept.values()):
            if kept.left and kept.name == HEAD and kept.process and kept.process.gone and not self._gone():
                kept.left, kept.process = False, None  # members have not heard yet that the run has ended
            if kept.left:
                continue
            if kept.process is None:
                if now >= kept.wake and not self._stopping:
                    self._start(kept)
                continue
            outcome = kept.process.outcome()
            if outcome is not None:
                self._ended(kept, outcome, now)

    def _keep_joined(self) -> None:
        """A machine that joined gets a member, the one that it had before; one that is gone has none."""
        nodes = self._cluster.joined()
        for kept in self.kept.values():
            if kept.guest and kept.node not in nodes and kept.process is None:
                kept.left = True
        for node, host in nodes.items():
            if node in self._nodes:
                continue
            guests = [each for each in self.kept.values() if each.guest and not each.left and each.node in nodes]
            name = guest_name(host, [each.name for each in guests if each.answered])
            if name in (each.name for each in guests):
                continue  # until that one answers, or Ray says that its node is gone: it may be this machine's former
            self._nodes.add(node)
            if name in self.kept:
                self.kept[name].moved(node)
            else:
                given = {**self._member, "name": name, "steps": self._steps(name), "data": None}
                self._add(
                    KeptProcess(name, "tpuswarm.swarm.supervision.entry:member", given, self._environment(None), node)
                )
            self.telling.event("note", member=name, message=f"new machine: {name}")

    def _start(self, kept: KeptProcess) -> None:
        arguments = kept.arguments
        if kept.name == HEAD and kept.born:
            arguments = {**arguments, "alone": False}
        if kept.member:
            now = {"steps": self._steps(kept.name), "evaluates": self._evaluates(kept)}
            kept.arguments = arguments = {**arguments, **now}
        log = self.run.folder / "logs" / f"{kept.name}.log"
        process = self._cluster.start(kept.name, kept.maker, arguments, kept.environment, log.resolve(), kept.node)
        if process is not None:
            kept.began(process, self._clock())

    def _evaluates(self, kept: KeptProcess) -> bool:
        """One member does: the first; in its place, where its machine has left, the next one that starts."""
        others = [each for each in self.kept.values() if each.member and each is not kept and not each.left]
        return not any(each.arguments["evaluates"] for each in others)

    def _ended(self, kept: KeptProcess, outcome: Outcome, now: float) -> None:
        if kept.member and outcome.how != "dead":
            self._look_anew(kept)
        cannot = kept.member and outcome.how in ("wrong", "over")
        if outcome.how == "ended" or ((outcome.how == "left" or cannot) and (self._stopping or kept.guest)):
            kept.left = True  # and its actor stays: members have to hear from the coordinator that the run has ended
            if outcome.how == "left":
                self.telling.event("left", member=kept.name, incarnation=kept.incarnation, pid=kept.pid)
            elif cannot:
                self.telling.event("note", member=kept.name, message=outcome.reason)
                if kept.guest and kept.node:
                    self._cluster.dismiss(kept.node, outcome)
            if kept.guest and kept.process:
                kept.process.kill()  # its machine waits for that
            return
        if kept.process and outcome.how != "dead":
            kept.process.kill()  # what it held on the devices, and its name, are for the next one
        kept.process = None
        if cannot:
            why = InputError(outcome.reason) if outcome.how == "wrong" else RunFailed(outcome.reason)
            self._set_aside(kept, why, now)
            return
        if outcome.how == "wrong":
            raise InputError(outcome.reason)
        if outcome.how == "over":
            raise RunFailed(f"{kept.name}: {outcome.reason}")
        kept.deaths += 1
        kept.wake = now + min(BACKOFF * 2 ** max(0, kept.deaths - 1), BACKOFF_MAX)
        if kept.member:
            facts = {"member": kept.name, "incarnation": kept.incarnation, "pid": kept.pid}
            if outcome.how == "left":
                kept.wake = now + BACKOFF_MAX
                self.telling.event("left", **facts)
            elif kept.pid or outcome.how != "dead" or not kept.guest:  # else Ray notices late that its machine is gone
                reason = "killed" if outcome.how == "dead" else outcome.reason
                at_risk = (kept.seen or {}).get("at_risk", 0)
                what = {"tokens": at_risk, "unit": self._unit}
                self.telling.event("lost", message=reason, own_machine=kept.guest, **what, **facts)
        else:
            reason = "it died" if outcome.how == "dead" else outcome.reason
            kind = "coordinator" if kept.name == HEAD else "shard"
            self.telling.event(kind, name=kept.name, message=f"{reason}; restarting it")
        if kept.deaths >= (FAILURES if outcome.how == "failed" else DEATHS):
            sentence = f"{kept.name} failed {kept.deaths} times without getting anywhere: {outcome.reason}"
            if kept.member and not kept.guest:
                self._set_aside(kept, RunFailed(sentence), now)
                return
            if not kept.guest:
                raise RunFailed(sentence)
            kept.left = True
            self.telling.event("note", member=kept.name, message=f"{sentence}; giving up on its machine")
            if kept.node:
                self._cluster.dismiss(kept.node, Outcome("failed", sentence))

    def _set_aside(self, kept: KeptProcess, why: TpuswarmError, now: float) -> None:
        """A member of this machine cannot train: raises why, unless another one may, or the run has ended."""
        others = [each for each in self.kept.values() if each.member and each is not kept]
        if not self.kept[HEAD].left and all(each.left or each.given_up for each in others):
            raise why
        kept.given_up, kept.wake = str(why), now + ANOTHER_TRY

    def _look(self) -> None:
        for kept in self.kept.values():
            if kept.process:
                self._see(kept, kept.process.look(kept.rows))
            if kept.process and kept.silent(now := self._clock()):
                message = f"{kept.name} has not answered for {now - kept.heard:.0f} s: killing it, to start it again"
                self.telling.event("note", message=message)
                kept.heard = now  # until Ray has noticed
                kept.process.kill()

    def _look_anew(self, kept: KeptProcess, seconds: float = 2 * LAST_LOOK) -> None:
        """Wait, for so long at most, for a look that begins now: first for one under way, which knows less."""
        for _ in range(2):
            if kept.process:
                self._see(kept, kept.process.look(kept.rows, max(0.0, min(LAST_LOOK, seconds / 2))))

    def _see(self, kept: KeptProcess, answer: tuple[int, Any] | None) -> None:
        """Take in a look; of a member also its rows of metrics."""
        if answer is None:
            return
        kept.pid, seen = answer
        kept.heard = self._clock()
        if kept.name == HEAD:
            self._summary = seen or self._summary
        if not kept.member or seen is None:
            return
        if seen["incarnation"] and seen["incarnation"] != kept.incarnation:
            again, self._joined = kept.name in self._joined, self._joined | {kept.name}
            self.telling.event("joined", member=kept.name, incarnation=seen["incarnation"], pid=kept.pid, again=again)
        if part := seen.pop("trace", None):
            self._traces.took(kept, part)
        kept.seen, rows = seen, seen["rows"]
        if not rows:
            return
        kept.rows += len(rows)
        kept.deaths, kept.given_up = 0, ""
        for row in rows:
            if "loss" in row:
                kept.row = row
                if not row.get("uncounted"):
                    kept.steps.append(Step(row["version"], row["loss"], row.get("grad_norm")))
        self.telling.rows(kept.name, rows)

    def _follow(self) -> None:
        """The commits that were made since the last look."""
        first = self.view is None
        for record in self._followed.news(self._is_news()):
            self._commit(record)
            if not first:
                self.telling.progress_at = time.monotonic()
        if said := self._followed.clean():
            self.telling.event("note", message=said)

    def _tell(self, last: str = "") -> None:
        self.telling.tell(self._summary, self.kept.values(), self._followed, self._clock(), last)

    def _is_news(self) -> bool:
        """Whether to look for records: in a bucket each look is a request, and the coordinator says what there is."""
        view = self.view
        if not self.run.in_bucket or self.kept[HEAD].left or self._stopping:
            return True
        return self._summary is not None and (view is None or self._summary.version > view.version)

    def _commit(self, record: Record) -> None:
        for kept in self.kept.values():
            if not kept.member:
                kept.deaths = 0
        if record.version > self._told:
            self._told = record.version
            self.telling.event("commit", **commit_event(record), unit=self._unit)

    def _say_goodbye(self) -> None:
        self._stopping = time.monotonic()
        trained = any(kept.incarnation for kept in self.kept.values())
        self.screen.note(f"stopping{': the members push their last work' * trained}")
        for kept in self.kept.values():
            if kept.member and kept.process:
                kept.process.leave()

    def _gone(self, settled: bool = False) -> bool:
        """Whether no member has anything to hand in and, if asked, everything accepted is decided."""
        if any(kept.busy and (kept.incarnation or not settled) for kept in self.kept.values()):
            return False  # of a run that stops, who has not begun owes nothing, not even an evaluation
        return not settled or self._settled()

    def _settled(self) -> bool:
        """Whether everything accepted is decided, by a look at the coordinator that began when all members had gone."""
        self._look_anew(self.kept[HEAD], self._stopping + GOODBYE - time.monotonic())
        return self._summary is None or self._summary.tokens.outstanding == 0

    def _stopped_at(self) -> str:
        if (view := self.view) is None:
            return "stopped before the first commit"
        return f"stopped at commit {view.version}, {view.tokens:,} {self._unit} counted"
