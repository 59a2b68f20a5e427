"""Report a run: events and alarms as they happen, and its status once a second."""

import math
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from tpuswarm.config.formatting import format_figure
from tpuswarm.errors import InputError
from tpuswarm.swarm.core.alarms import LiveMember, alarms
from tpuswarm.swarm.core.people import person_of
from tpuswarm.swarm.core.summary import Summary, Tokens
from tpuswarm.swarm.core.values import Record
from tpuswarm.swarm.processes.run_plan import RunPlan
from tpuswarm.swarm.supervision.ledger_follower import LedgerFollower
from tpuswarm.swarm.supervision.supervised_process import SupervisedProcess
from tpuswarm.swarm.views.events import sentence
from tpuswarm.swarm.views.screen import Screen
from tpuswarm.swarm.views.status import (
    FINISHED,
    Progress,
    SwarmStatus,
    after_the_end,
    compose,
    read_status,
    resume,
    write_status,
)
from tpuswarm.train.look.display import own_metrics
from tpuswarm.train.look.pictures import PICTURES, TEXTS, write_picture
from tpuswarm.train.look.widgets import Pace
from tpuswarm.train.process.atomic import fsync_path
from tpuswarm.train.run.directory import METRICS, SAMPLE_EVENT, Run, append_rows, writing
from tpuswarm.train.run.listing import read_newest_evaluation

STATUS_INTERVAL_S = 1.0
NUMBER = re.compile(r"(?<!\w)[\d.,]+")


class RunReporter:
    """Writes events, metrics and status to the run's files and the screen."""

    def __init__(self, run: Run, plan: RunPlan, screen: Screen, address: str, on_row: Callable[[dict[str, Any]], None]):
        """address: of the Ray that was started for the run, or empty; on_row: called with each metrics row."""
        self._on_row = on_row
        self._run, self._plan, self._screen, self._address = run, plan, screen, address
        self.status: SwarmStatus | None = None
        """The status that was written last."""
        self.evaluation: Mapping[str, Any] = read_newest_evaluation(run.folder)
        """Row of the newest evaluation."""
        self.last_progress = math.inf
        """Time of the last commit, or of the first step: before it nothing can be committed."""
        self._pace = Pace()
        self._alarms: tuple[str, ...] = ()
        self._status_at = time.monotonic()
        self._sent_address = False
        self._has_new_rows = False
        before = None
        with suppress(InputError):  # a damaged status is replaced
            before = read_status(run.folder)
        self._before = before
        self._people = Counter(before.people if before else {})
        """Tokens counted by person."""
        self._processed = before.tokens.processed if before else 0
        self._carried = before.carried if before else 0
        """Counters, which never fall: a new coordinator or supervisor knows only what the ledger has."""

    def event(self, event: str, **facts: Any) -> None:
        """Write and show an event."""
        self._run.write_event(event, **facts)
        self._screen.event(sentence({"event": event, **facts}))

    def count(self, record: Record) -> None:
        """Count the contributions of a new commit for each person."""
        for decision in record.decisions:
            if decision.fate == "applied":
                self._people[person_of(decision.identity.incarnation.member)] += decision.tokens

    def rows(self, member: str, rows: Sequence[dict[str, Any]]) -> None:
        """Write and show a member's metrics rows."""
        for row in rows:
            if "loss" in row:
                self.last_progress = min(self.last_progress, time.monotonic())
                if row["loss"] is not None:
                    self._screen.loss(row["loss"])
            else:
                for suffix, picture in row.pop(PICTURES, {}).items():
                    write_picture(self._run.folder, f"{row['version']:08d}{suffix}.png", picture)
                texts = row.pop(TEXTS, [])
                self.evaluation = row
                self._screen.note(f"commit {row['version']}: held-out loss {format_figure(row['eval_loss'])}")
                for text in texts:
                    about = {
                        "step": row["step"],
                        "version": row["version"],
                        "message": f"a hook at commit {row['version']}",
                    }
                    self._run.write_event(SAMPLE_EVENT, **about, text=text)
                    self._screen.note(f"commit {row['version']}: {text}")
        append_rows(self._run.folder / "members" / member / METRICS, rows)
        append_rows(self._run.folder / METRICS, rows)
        self._has_new_rows = True
        for row in rows:
            self._on_row(row)

    def sync_rows(self) -> None:
        """Wait until new rows are on disk."""
        if self._has_new_rows:
            with writing(self._run.folder / METRICS):
                fsync_path(self._run.folder / METRICS)
            self._has_new_rows = False

    def write_status(
        self,
        summary: Summary | None,
        processes: Iterable[SupervisedProcess],
        ledger: LedgerFollower,
        now: float,
        phase: str = "",
    ) -> None:
        """Write and show the status, at most once per interval.

        now: by the clock of the processes' answers; phase: the final one, if the run has ended.
        """
        clock = time.monotonic()
        if not phase and clock - self._status_at < STATUS_INTERVAL_S:
            return
        self._status_at = clock
        leased = {incarnation.name for incarnation in summary.leased} if summary else set()
        version = summary.version if summary else None
        by_name = {process.name: process for process in processes}
        carried = ledger.carried()
        members = [
            process.status(leased, version, self._plan.tokens_per_row, carried[process.name], now)
            for process in by_name.values() if process.is_member
        ]  # fmt: skip
        alive = [LiveMember(member.id, tuple(by_name[member.id].steps)) for member in members if member.is_alive]
        cycle = summary.median_cycle if summary else None
        set_aside = [
            f"{process.name} does not train: {process.set_aside_reason}"
            for process in by_name.values()
            if process.set_aside_reason
        ]
        found = (*set_aside, *alarms(ledger.recent, alive, cycle, clock - self.last_progress, time.time()))
        known = {NUMBER.sub("", text) for text in self._alarms}
        for text in found:
            if NUMBER.sub("", text) not in known:  # other numbers do not make another alarm
                self.event("alarm", message=text)
        self._alarms = found
        horizon = self._plan.horizon * self._plan.tokens_per_row
        pids = {
            process.name: process.pid
            for process in by_name.values()
            if not (process.is_member or process.node) and process.actor and process.pid
        }
        if summary:
            summary = replace(summary, tokens=self._with_forgotten(summary.tokens))
            if clock >= self.last_progress:
                self._pace.add(clock, summary.tokens.applied)
        self._carried = max(self._carried, carried.total())
        progress = Progress(
            self._screen.began,
            self._pace.per_second,
            self.evaluation.get("eval_loss"),
            self.evaluation.get("version"),
            self._carried,
            own_metrics(self.evaluation),
            {process.name: process.machine for process in by_name.values() if process.machine},
            dict(self._people),
        )
        self.status = compose(summary, members, horizon, found, self._address, pids, time.time(), progress)
        if summary is None and self._before is not None:
            self.status = resume(self.status, self._before)
        if phase:
            self.status = replace(self.status, phase=phase)
        if phase == FINISHED:
            ended = tuple(after_the_end(member, "finished") for member in self.status.members)
            self.status = replace(self.status, members=ended, tokens_per_s=0.0)
        write_status(self._run.folder, self.status)
        if not self._sent_address:
            self._sent_address = True
            self._run.upload_soon()
        self._screen.status(self.status)

    def _with_forgotten(self, tokens: Tokens) -> Tokens:
        """Add tokens of dead incarnations that a new coordinator does not know; they are lost."""
        self._processed = max(self._processed, tokens.processed)
        forgotten = self._processed - tokens.processed
        return replace(tokens, processed=self._processed, lost=tokens.lost + forgotten)
