"""Measure one model over machines of the local cloud: first commit, preemption, death of the head, goodput.

Limits: the first version of gpt2-tiny within 60 s of `train swarm.toml` on ready machines; a contribution within 45 s
after a preempted machine is ready again; a commit within 60 s after the head and its disk are deleted, with another
keeper alive; 95% goodput with a preemption a minute.
"""

import os
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.swarm.chaos import SMALL

from benchmarks.goodput import measure
from benchmarks.report import Settings, Table, verdict
from tpuswarm.cli.demo.demo_cloud import CLOCK_FACTOR, FILE, CloudDemo, epoch_of, training, version_of
from tpuswarm.train.run.directory import EVENTS, read_rows
from tpuswarm.train.storage.copy import download_run
from tpuswarm.watch.state import State

FIRST_LIMIT_S, BACK_LIMIT_S, HEAD_LIMIT_S, MIN_GOODPUT = 60.0, 45.0, 60.0, 0.95
GOODPUT_S = 1200.0
LOCAL = (
    "gpt2-tiny", *SMALL, "--lr", "3e-3", "--batch", "8", "--cycle", "4", "--steps", "1000000", "--members", "2",
)  # fmt: skip
"""The `[train]` of the demo's file, with local processes."""


def run(settings: Settings) -> Iterable[Table]:
    with tempfile.TemporaryDirectory() as name:
        folder, before = Path(name), Path.cwd()
        (folder / "swarm.toml").write_text(FILE)
        environment = dict(os.environ)
        here = CloudDemo(folder)
        try:
            here.run("rehearsal", "start", "--speed", str(CLOCK_FACTOR), shows=False)
            here.run("init", "--yes", shows=False)
            yield _times(here)
            yield _goodput(here, 120.0 if settings.quick else GOODPUT_S)
        finally:
            here.run("down", "--yes", check=False, shows=False)
            here.run("rehearsal", "stop", check=False, shows=False)
            os.chdir(before)
            os.environ.clear()
            os.environ.update(environment)


def _times(here: CloudDemo) -> Table:
    here.run("up", "--yes", "--paid", "--keep", shows=False)
    began = time.time()
    here.run("train", "swarm.toml", "--yes", "--paid", "--detach", shows=False)
    here.wait_until("the first version", lambda seen: version_of(seen) >= 1)
    first = next(commit["time"] for commit in _events(here, "commit")) - began
    state = here.wait_until("all train", lambda seen: len(training(seen)) == 2)
    victim = next(machine for machine in training(state) if "v5e" in machine)
    back = _back(here, victim)
    lost = _lost_with_notice(here, victim)
    before = here.read_state()
    here.delete("demo-head")
    died = time.time()
    here.wait_until("another head", lambda seen: epoch_of(seen) > epoch_of(before))
    here.wait_until("a commit", lambda seen: version_of(seen) > version_of(before))
    head = next(commit["time"] for commit in _events(here, "commit") if commit["epoch"] > epoch_of(before)) - died
    rows = [
        ("`train swarm.toml` on ready machines to version 1", f"{first:.0f} s", f"at most {FIRST_LIMIT_S:.0f} s",
         verdict(first <= FIRST_LIMIT_S)),
        ("a machine is back after a preemption to its member's contribution", f"{back:.0f} s",
         f"at most {BACK_LIMIT_S:.0f} s", verdict(back <= BACK_LIMIT_S)),
        ("a head is deleted with its disk to the next commit", f"{head:.0f} s", f"at most {HEAD_LIMIT_S:.0f} s",
         verdict(head <= HEAD_LIMIT_S)),
        ("tokens lost by a preemption that is announced 30 s before, as by Google", f"{lost}", "0",
         verdict(lost == 0)),
    ]  # fmt: skip
    notes = [
        "A head, a v5e-1 and a v5p-16 of two hosts, all on this machine; gpt2-tiny of two layers; times from the run's "
        "events."
    ]
    return Table("One model over a fleet", ("what", "measured", "limit", "verdict"), rows, notes)


def _back(here: CloudDemo, victim: str) -> float:
    """Return the seconds from a machine's return to its member's first contribution."""
    here.run("rehearsal", "preempt", victim, shows=False)
    here.wait_until("it is gone", lambda seen: victim not in training(seen))
    here.wait_until(
        "its machine is back", lambda seen: any(row.name == victim and row.state == "ready" for row in seen.there)
    )
    began = time.time()
    here.wait_until("its member trains", lambda seen: victim in training(seen))
    here.wait_until("it has contributed", lambda seen: bool(_contributions(here, victim, began)))
    return _contributions(here, victim, began)[0] - began


def _lost_with_notice(here: CloudDemo, victim: str) -> int:
    """Return the tokens lost by a preemption with a notice of the usual length."""
    _, before = here.wait_until("it trains again", lambda seen: victim in training(seen)), time.time()
    here.run("rehearsal", "start", "--speed", "1", shows=False)
    here.run("rehearsal", "preempt", victim, shows=False)
    here.wait_until("its member goes", lambda seen: victim not in training(seen))
    here.run("rehearsal", "start", "--speed", str(CLOCK_FACTOR), shows=False)
    here.wait_until("it trains again", lambda seen: victim in training(seen))
    return sum(event["tokens"] for event in _events(here, "lost") if event["time"] > before)


def _contributions(here: CloudDemo, machine: str, after: float) -> list[float]:
    # times of commits with work of member processes that started after `after`
    joined = [event for event in _events(here, "joined") if event["time"] > after]
    incarnations = {event["incarnation"] for event in joined if event["member"].endswith(machine)}
    commits = _events(here, "commit")
    return [
        commit["time"]
        for commit in commits
        if incarnations & {contributor["incarnation"] for contributor in commit["contributors"]}
    ]


def _events(here: CloudDemo, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_rows(download_run(here.url) / EVENTS) if event["event"] == kind]


def _goodput(here: CloudDemo, seconds: float) -> Table:
    first = here.wait_until("all train", lambda seen: len(training(seen)) == 2)
    start, preempted = time.monotonic(), 0
    while time.monotonic() - start < seconds:
        alive = training(here.read_state())
        if alive:
            here.run("rehearsal", "preempt", alive[preempted % len(alive)], check=False, shows=False)
            preempted += 1
        time.sleep(max(0.0, 60 * preempted - (time.monotonic() - start)))
    last = here.read_state()
    (settled, counted), (settled_before, counted_before) = _settled_and_applied(last), _settled_and_applied(first)
    share = (counted - counted_before) / max(1, settled - settled_before)
    here.run("stop", here.url, shows=False)
    here.run("ledger", "verify", here.url, shows=False)
    fleet = (
        "over machines, one preempted a minute", f"{seconds / 60:.0f}", f"{preempted}",
        f"{version_of(last) - version_of(first)}", f"{share:.1%}", f"at least {MIN_GOODPUT:.0%}",
        verdict(share >= MIN_GOODPUT),
    )  # fmt: skip
    here.run("down", "--yes", shows=False)
    local = measure(seconds, 60, "m", LOCAL)
    beside = (
        "local processes, one killed a minute", f"{local.elapsed_s / 60:.0f}", f"{len(local.kills)}", f"{local.newest}",
        f"{local.goodput:.1%}", "", "" if not local.problems else local.problems[0],
    )  # fmt: skip
    columns = ("swarm", "minutes", "losses", "commits", "goodput", "limit", "verdict")
    notes = ["Both ledgers verify at the end. Two members: a v5e-1 and a v5p-16 of two hosts, or two processes."]
    return Table("Goodput with a loss a minute", columns, [fleet, beside], notes)


def _settled_and_applied(seen: State) -> tuple[int, int]:
    assert seen.swarm is not None
    tokens = seen.swarm.status.tokens
    return tokens.processed - tokens.outstanding, tokens.applied
