"""Check a run by its files: how it ended, its findings, its slow and lost members."""

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from tpuswarm.doctor.finding import Finding
from tpuswarm.swarm.storage.store import Store
from tpuswarm.swarm.storage.verify import verify
from tpuswarm.swarm.views.missing_rows import missing_rows
from tpuswarm.swarm.views.status import MemberStatus, SwarmStatus, read_status
from tpuswarm.train.run.directory import CHECKPOINTS, EVENTS, read_config, read_rows
from tpuswarm.train.run.life import read_life
from tpuswarm.train.storage.folders import origin

STALE_STATUS_S = 30.0
"""A supervisor writes status.json every second."""
MAX_LOSSES, LOSS_WINDOW_S = 2, 3600.0
MIN_SPEED_RATIO = 0.5
"""Slower members, relative to the median, are stragglers."""
MIN_MEMBERS = 3
"""With fewer the median means nothing."""
RESUME = "resume with the same `tpuswarm train` command and --run"
WHY = {
    "ended": "nothing trains, but rented machines still cost",
    "silent": "while its first process hangs, nothing replaces members or shows the status",
    "alarm": "the swarm runs, but not as it should: it wastes work or learns worse",
    "straggler": "its work comes late, counts less, and may be dropped",
    "lost-often": "each loss costs uncommitted work and the minutes until the member is back",
    "damage": "a resume goes back to what is intact, or cannot start",
    "rows": "curves and reports lack these steps; the model has them",
    "finding": "it slows every step, or changes the training itself",
}


def _finding(subject: str, check: str, problem: str, advice: str) -> Finding:
    return Finding(subject, check, problem, WHY[check], advice)


def check_run(folder: Path, name: str, now: float | None = None) -> Iterator[Finding]:
    """Check a run; raise InputError if its files are not a run's."""
    now = time.time() if now is None else now
    life, events = read_life(folder), list(read_rows(folder / EVENTS))
    if life.state == "failed":
        yield _finding(name, "ended", f"it failed: {life.message}", f"fix that; then {RESUME}")
    elif life.state == "killed":
        yield _finding(name, "ended", "its process was killed, and the run was not resumed", RESUME)
    status = read_status(folder)
    if status is not None and life.pid is not None:
        yield from _check_swarm(status, name, events, now)
    for problem in _find_damage(folder, life.pid is not None):
        yield _finding(name, "damage", problem, "restore a copy, or leave it if the run goes on without it")
    if missing := missing_rows(folder):
        yield _finding(name, "rows", missing, "a run resumes without them; restore a copy of the file for its curves")
    yield from _diagnostics(events)


def _find_damage(folder: Path, is_live: bool) -> list[str]:
    """Name the damage of a run's checkpoints or ledger; of a run in a bucket only a part is here."""
    if origin(folder):
        return []
    if "swarm" in read_config(folder):
        store = Store(folder)
        return verify(store, lambda step: None).problems if store.names("commits/") else []
    from tpuswarm.train.run.checkpoint import newest_intact  # imports JAX

    return newest_intact(folder / CHECKPOINTS, is_live)[1]


def _check_swarm(status: SwarmStatus, name: str, events: list[dict[str, Any]], now: float) -> Iterator[Finding]:
    silent_s = now - status.time
    if silent_s > STALE_STATUS_S:
        advice = f"end its process with kill -9; {RESUME}, and nothing committed is lost"
        yield _finding(name, "silent", f"it has not written its status for {silent_s:.0f} s", advice)
    for alarm in status.alarms:
        yield _finding(name, "alarm", alarm, "see alarms in docs/swarm.md; `tpuswarm ledger show` for its work")
    yield from _stragglers(status.members)
    losses = [event for event in events if event["event"] == "lost"]
    counts = Counter(event["member"] for event in losses if now - event["time"] < LOSS_WINDOW_S)
    for member, count in counts.most_common():
        if count > MAX_LOSSES:
            last = [event["message"] for event in losses if event["member"] == member][-1]
            problem = f"lost {count} times within an hour; the last time: {last}"
            yield _finding(member, "lost-often", problem, f"`tpuswarm logs {name} {member}`; doctor on its machine")


def _stragglers(members: tuple[MemberStatus, ...]) -> Iterator[Finding]:
    speeds = {member.id: member.tokens_per_s for member in members if member.state == "alive" and member.tokens_per_s}
    if len(speeds) < MIN_MEMBERS:
        return
    usual = median(speeds.values())
    for member, speed in speeds.items():
        if speed < MIN_SPEED_RATIO * usual:
            problem = f"{speed:,.0f} tokens/s; the median of {len(speeds)} members is {usual:,.0f}"
            advice = "doctor on its machine; if its TPU type is slower, give its pool a smaller batch"
            yield _finding(member, "straggler", problem, advice)


def _diagnostics(events: list[dict[str, Any]]) -> Iterator[Finding]:
    """Report the findings of the newest process, each kind and place once."""
    starts = [number for number, event in enumerate(events) if event["event"] == "started"]
    current = events[starts[-1] :] if starts else events
    found = [event for event in current if event["event"] == "diagnostic"]
    found += [finding for event in current if event["event"] == "summary" for finding in event["findings"]]
    newest = {(each["kind"], each.get("place")): each for each in found}
    for (kind, _), row in newest.items():
        yield _finding(kind, "finding", row["message"], f"docs/slow-tpu.md, `{kind}`")
