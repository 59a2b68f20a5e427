"""What a supervisor says of its run: events, alarms, and once a second how all stands."""

import math
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tpuswarm.config.formatting import format_figure
from tpuswarm.swarm.core.alarms import Watched, alarms
from tpuswarm.swarm.core.summary import Summary
from tpuswarm.swarm.processes.plan import Plan
from tpuswarm.swarm.supervision.followed import Followed
from tpuswarm.swarm.supervision.kept import KeptProcess
from tpuswarm.swarm.views.events import sentence
from tpuswarm.swarm.views.screen import Screen
from tpuswarm.swarm.views.status import FINISHED, Progress, SwarmStatus, after_the_end, compose, write_status
from tpuswarm.train.look.live import Pace
from tpuswarm.train.look.pictures import PICTURES, TEXTS, write_picture
from tpuswarm.train.run.directory import METRICS, SAMPLE, Run, append_rows
from tpuswarm.train.run.listing import newest_evaluation

STATUS = 1.0
"""Seconds between two words of how all stands."""
NUMBER = re.compile(r"(?<!\w)[\d.,]+")


class Telling:
    """Writes it into the run's files, and onto the screen."""

    def __init__(self, run: Run, plan: Plan, screen: Screen, address: str, took: Callable[[dict[str, Any]], None]):
        """address: of the Ray that was started for the run; empty: it was there; took: called with each row."""
        self._took = took
        self._run, self._plan, self._screen, self._address = run, plan, screen, address
        self.status: SwarmStatus | None = None
        """As it was written last."""
        self.evaluation: Mapping[str, Any] = newest_evaluation(run.folder)
        """The row of the newest."""
        self.progress_at = math.inf
        """When there was a commit, or who could make one began to train: until then nothing can be committed."""
        self._pace = Pace()
        self._alarms: tuple[str, ...] = ()
        self._status_at = time.monotonic()
        self._told_address = False

    def event(self, event: str, **facts: Any) -> None:
        """Something happened."""
        self._run.write_event(event, **facts)
        self._screen.event(sentence({"event": event, **facts}))

    def rows(self, member: str, rows: Sequence[dict[str, Any]]) -> None:
        """A member measured something."""
        for row in rows:
            if "loss" in row:
                self.progress_at = min(self.progress_at, time.monotonic())
                if row["loss"] is not None:
                    self._screen.loss(row["loss"])
            else:
                for end, picture in row.pop(PICTURES, {}).items():
                    write_picture(self._run.folder, f"{row['version']:08d}{end}.png", picture)
                texts = row.pop(TEXTS, [])
                self.evaluation = row
                self._screen.note(f"commit {row['version']}: held-out loss {format_figure(row['eval_loss'])}")
                for text in texts:
                    about = {
                        "step": row["step"],
                        "version": row["version"],
                        "message": f"a hook at commit {row['version']}",
                    }
                    self._run.write_event(SAMPLE, **about, text=text)
                    self._screen.note(f"commit {row['version']}: {text}")
        append_rows(self._run.folder / "members" / member / METRICS, rows)
        append_rows(self._run.folder / METRICS, rows)
        for row in rows:
            self._took(row)

    def tell(
        self, summary: Summary | None, kept: Iterable[KeptProcess], followed: Followed, heard: float, last: str = ""
    ) -> None:
        """How all stands, at most so often; heard: the time on the clock by which processes were heard; last: the phase
        that stays for good.
        """
        clock = time.monotonic()
        if not last and clock - self._status_at < STATUS:
            return
        self._status_at = clock
        leased = {each.name for each in summary.leased} if summary else set()
        version = summary.version if summary else None
        by_name = {each.name: each for each in kept}
        carried = followed.carried()
        members = [
            each.status(leased, version, self._plan.tokens_per_row, carried[each.name], heard)
            for each in by_name.values() if each.member
        ]  # fmt: skip
        alive = [Watched(each.id, tuple(by_name[each.id].steps)) for each in members if each.lives]
        cycle = summary.median_cycle if summary else None
        aside = [f"{each.name} does not train: {each.given_up}" for each in by_name.values() if each.given_up]
        found = (*aside, *alarms(followed.recent, alive, cycle, clock - self.progress_at, time.time()))
        known = {NUMBER.sub("", each) for each in self._alarms}
        for text in found:
            if NUMBER.sub("", text) not in known:  # the same with other numbers is not another alarm
                self.event("alarm", message=text)
        self._alarms = found
        horizon = self._plan.horizon * self._plan.tokens_per_row
        pids = {each.name: each.pid for each in by_name.values() if not each.member and each.process and each.pid}
        if summary and clock >= self.progress_at:
            self._pace.add(clock, summary.tokens.applied)
        progress = Progress(
            self._screen.began,
            self._pace.per_second,
            self.evaluation.get("eval_loss"),
            self.evaluation.get("version"),
            carried.total(),
        )
        self.status = compose(summary, members, horizon, found, self._address, pids, time.time(), progress)
        if last:
            self.status = replace(self.status, phase=last)
        if last == FINISHED:
            gone = tuple(after_the_end(each, "finished") for each in self.status.members)
            self.status = replace(self.status, members=gone, tokens_per_s=0.0)
        write_status(self._run.folder, self.status)
        if not self._told_address:
            self._told_address = True
            self._run.send_soon()
        self._screen.status(self.status)
