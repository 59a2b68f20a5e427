"""What is wrong with a run, by its own files: how it ended, what it found, which members hold the others up."""

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from tpuswarm.doctor.check import Wrong
from tpuswarm.swarm.views.status import MemberStatus, SwarmStatus, read_status
from tpuswarm.train.run.directory import EVENTS, read_rows
from tpuswarm.train.run.life import read_life

SILENT_S = 30.0
"""Seconds without a new status.json of a swarm that runs; its supervisor writes one each second."""
OFTEN, OFTEN_S = 3, 3600.0
"""So many losses of one member within so many seconds are no longer chance."""
SLOW = 0.5
"""A member below this share of the median speed is a straggler."""
FEW = 3
"""Members that train, from which on their speeds are compared."""
AGAIN = "the same `tpuswarm train` command with --run goes on from what is saved"
WHY = {
    "ended": "nothing is trained, and machines that were rented for it still cost",
    "silent": "nobody replaces its members or shows how it stands while its first process hangs",
    "alarm": "the swarm works, but not as it should: work is thrown away, or learning suffers",
    "straggler": "its work comes late, is worth less, and may be dropped",
    "lost-often": "each loss costs uncommitted work and the minutes until the member is back",
    "finding": "it costs speed at every step, or makes the run another one than was meant",
}
"""Of each check."""


class Ill(NamedTuple):
    """One thing that is wrong."""

    of: str
    """The run, a member, or a kind of finding."""
    check: str
    wrong: Wrong


def of_run(folder: Path, called: str, now: float | None = None) -> Iterator[Ill]:
    """All of it. now: Unix seconds. Raises InputError for files that are none of a run's."""
    now = time.time() if now is None else now
    life, events = read_life(folder), list(read_rows(folder / EVENTS))
    if life.state == "failed":
        yield Ill(called, "ended", Wrong(f"it failed: {life.message}", f"mend that, then {AGAIN}"))
    elif life.state == "killed":
        yield Ill(called, "ended", Wrong("its process was killed, and nobody has resumed it", AGAIN))
    status = read_status(folder)
    if status is not None and life.pid is not None:
        yield from _of_swarm(status, called, events, now)
    yield from _findings(events)


def _of_swarm(status: SwarmStatus, called: str, events: list[dict[str, Any]], now: float) -> Iterator[Ill]:
    silent = now - status.time
    if silent > SILENT_S:
        what = f"it has said nothing for {silent:.0f} s"
        yield Ill(
            called, "silent", Wrong(what, f"end its process with kill -9; {AGAIN}, and nothing committed is lost")
        )
    for sentence in status.alarms:
        yield Ill(called, "alarm", Wrong(sentence, "see docs/swarm.md for alarms; `tpuswarm ledger show` for its work"))
    yield from _stragglers(status.members)
    lost = Counter(each["member"] for each in events if each["event"] == "lost" and now - each["time"] < OFTEN_S)
    for member, times in lost.most_common():
        if times >= OFTEN:
            last = [each["message"] for each in events if each["event"] == "lost" and each["member"] == member][-1]
            what = f"lost {times} times within an hour, the last time: {last}"
            yield Ill(member, "lost-often", Wrong(what, f"`tpuswarm logs {called} {member}`; doctor on its machine"))


def _stragglers(members: tuple[MemberStatus, ...]) -> Iterator[Ill]:
    speeds = {each.id: each.tokens_per_s for each in members if each.state == "alive" and each.tokens_per_s}
    if len(speeds) < FEW:
        return
    usual = median(speeds.values())
    for member, speed in speeds.items():
        if speed < SLOW * usual:
            what = f"{speed:,.0f} tokens/s, beside {usual:,.0f} of the median of {len(speeds)} members"
            mend = "doctor on its machine; where the type is a slower one, a smaller batch for its pool"
            yield Ill(member, "straggler", Wrong(what, mend))


def _findings(events: list[dict[str, Any]]) -> Iterator[Ill]:
    """What the newest process of the run has found, each kind and place once."""
    starts = [number for number, each in enumerate(events) if each["event"] == "started"]
    since = events[starts[-1] :] if starts else events
    said = [each for each in since if each["event"] == "diagnostic"]
    said += [finding for each in since if each["event"] == "summary" for finding in each["findings"]]
    newest = {(each["kind"], each.get("place")): each for each in said}
    for (kind, _), each in newest.items():
        yield Ill(kind, "finding", Wrong(each["message"], f"docs/slow-tpu.md, `{kind}`"))
